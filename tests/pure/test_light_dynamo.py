"""A step traced without torch._dynamo is the one traced with it; and whoever asks for more of torch._dynamo gets all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_TRACED = """
import hashlib, json, sys
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import child, light_dynamo, plain_child
def texts(trace):
    asked = [child.request(Source(model="gpt-tiny"), Recipe(optimizer=one, recompute=how), (9, 0), {})
             for one, how in (("adamw-fused", "none"), ("adamw", "full"), ("sgd", "selective"))]
    return [hashlib.sha256(trace(one)["text"].encode()).hexdigest() for one in asked]
found = {"light": texts(plain_child.traced)}
"""
_TRACES = _TRACED + """
found["files"] = len([name for name in sys.modules if name.startswith("torch._dynamo.")])
try:
    with light_dynamo.refusing():
        import torch._dynamo.utils
except light_dynamo.AllOfDynamoRefused:
    found["refused"] = True
held = sys.modules["torch._dynamo"]
import torch._dynamo.eval_frame as frames
found["same"] = frames is sys.modules["torch._dynamo.eval_frame"] and frames.OptimizedModule is held.OptimizedModule
found["spec"] = str(frames.__spec__.origin).endswith("eval_frame.py")
found["kept"] = sys.modules["torch._dynamo"].config is held.config
found["whole"] = texts(child.trace_asked)
print(json.dumps(found))
"""
_NEEDS_MORE = _TRACED.replace("found =", "import torch\n") .split("import torch\n")[0] + """
import torch
from foretell.trace.load import model
loaded = model.load
def load(source):
    torch._dynamo.reset()
    return loaded(source)
model.load = load
print(json.dumps({"after": texts(plain_child.traced), "whole": "torch._dynamo.eval_frame" in sys.modules}))
"""


def told(code: str) -> dict[str, Any]:
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def traces() -> dict[str, Any]:
    return told(_TRACES)


def test_the_trace_is_the_same_to_the_byte(traces: dict[str, Any]) -> None:
    assert traces["light"] == traces["whole"] and len(set(traces["light"])) == 3


def test_only_what_a_step_needs_of_it_is_there(traces: dict[str, Any]) -> None:
    assert traces["files"] == 2, "its settings, and the names of sources"


def test_a_file_of_it_that_is_imported_brings_all_of_it_once(traces: dict[str, Any]) -> None:
    assert traces["same"] and traces["spec"] and traces["kept"]


def test_nobody_gets_all_of_it_while_a_step_is_recorded(traces: dict[str, Any]) -> None:
    assert traces["refused"]


@pytest.mark.slow(reason="a second process with all of torch._dynamo; who asks for more of it gets it above")
def test_a_model_that_needs_more_is_traced_once_more_with_all_of_it(traces: dict[str, Any]) -> None:
    found = told(_NEEDS_MORE)
    assert found["whole"] and found["after"] == traces["light"]


_RULES = """
import sys, torch
from foretell.trace.sandbox import light_dynamo
light_dynamo.install()
torch._dynamo.trace_rules.clear_lru_cache()
light = len([name for name in sys.modules if name.startswith("torch._dynamo.")])
one = torch.ones(1)
print(light, torch._dynamo.trace_rules.lookup.__module__, torch.compile(torch.sin, backend="eager")(one).item() == one.sin().item())
"""


def test_rules_that_nobody_read_are_forgotten_without_reading_them() -> None:
    done = subprocess.run([sys.executable, "-c", _RULES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["2", "torch._dynamo.trace_rules", "True"], "its settings and sources alone; then all of it"


@pytest.mark.slow(reason="ranks that import torch themselves; forked ones have it")
def test_ranks_of_a_plan_that_compiles_nothing_start_without_it(tmp_path: Path) -> None:
    from foretell.plan import file as plans
    from foretell.plan.types import Mesh, Plan

    tiny = {"layers": 2, "dim": 32, "heads": 2, "context": 32, "vocab_size": 256}
    model = {"model": "gpt-tiny", "overrides": tiny, "seq": 32}
    plans.write(Plan(model=model, hardware="CPU", micro_batch=2, precision="fp32", mesh=Mesh(dp_shard=2)), tmp_path / "plan.json")
    words = ["run", str(tmp_path / "plan.json"), "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "foretell", *words], env=env, capture_output=True, text=True, timeout=240, check=True)
    assert "torch.distributed.fsdp" in done.stderr and "torch._dynamo." not in done.stderr.replace("torch._dynamo.config", "")
