"""A step traced without torch._dynamo is the one traced with it; and whoever asks for more of torch._dynamo gets all of it."""

from __future__ import annotations

import json
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
