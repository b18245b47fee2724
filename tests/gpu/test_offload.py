"""What leaves the device and comes back, on a real one: the same bits as without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.plan.recipe import model_of
from foretell.plan.types import MASTER, Plan, Residency
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.trace.load.model import Source, load

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that give the same bits every time
SOURCE = Source(model="gpt2", overrides={"layers": 6, "dim": 1024, "heads": 16, "context": 512, "vocab_size": 4096}, micro_batch=4, seq=512)
HOST = {"blocks.*": "host", "rest": "host"}


def losses(scratch: Path, **more: Any) -> list[float]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    workload = load(SOURCE)
    plan = Plan(**{"model": model_of(SOURCE), "hardware": "H200", "micro_batch": 4, "precision": MASTER, **more})
    job = apply(workload, plan, start(plan, device=DEVICE), learning_rate=1e-3, scratch=scratch)
    try:
        torch.manual_seed(1)
        return [float(job.train_step([workload.batch] * plan.accumulate).loss) for _ in range(6)]
    finally:
        job.close()
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("more", [
    {"states": HOST}, {"states": HOST, "weights": {"blocks.*": "host"}}, {"states": {"blocks.2-5": "disk"}},
    {"states": HOST, "accumulate": 3, "weights": {"blocks.3-5": "host"}},
    {"states": {"blocks.2-4": "host"}}, {"states": {"blocks.2-4": "host"}, "state_format": "split", "weights": {"blocks.3": "host"}},
    {"states": HOST, "clip": None}, {"states": HOST, "clip": None, "weights": {"blocks.*": "host"}},
    {"blocks": {"blocks.0-4": Residency(mode="host")}}, {"blocks": {"blocks.0-3": Residency(mode="disk")}},
    {"blocks": {"blocks.0-2": Residency(mode="recompute"), "blocks.3-4": Residency(mode="host")}, "states": HOST},
])  # fmt: skip
def test_where_things_are_changes_no_bit(more: dict[str, Any], tmp_path: Path) -> None:
    same = {key: more[key] for key in ("clip", "accumulate", "state_format") if key in more}
    assert losses(tmp_path, **more) == losses(tmp_path, **same)


@pytest.mark.parametrize("form", ["split", "bf16", "int8", "split-int8"])
def test_every_format_gives_the_same_bits_wherever_it_is(form: str, tmp_path: Path) -> None:
    assert losses(tmp_path, state_format=form, states=HOST) == losses(tmp_path, state_format=form)


@pytest.mark.parametrize("form", ["fp32", "split", "int8"])
def test_the_cpu_updates_as_the_device_does(form: str, tmp_path: Path) -> None:
    found, expected = losses(tmp_path, state_format=form, states=HOST, cpu_share=0.5), losses(tmp_path, state_format=form)
    assert found[0] == expected[0]
    assert found == pytest.approx(expected, rel=2e-3)
