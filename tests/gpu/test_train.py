"""Training on a CUDA device: read one step late, resumed exactly, cheap between two steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.plan.types import Plan
from foretell.runtime.train import log as logs
from foretell.runtime.train import save
from foretell.runtime.train.run import run

pytestmark = pytest.mark.gpu

PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": {"dropout": 0.1}}, hardware="auto", micro_batch=16, accumulate=2,
    precision="bf16-mixed", predicted={"flops_per_step": 1e12, "step_seconds": 0.05},
)  # fmt: skip
SETTINGS = {"steps": 10, "data": str(Path(json.__file__).parent), "lr": 1e-2, "schedule": "constant", "save_every": 5}


class Quiet:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, text: str, step: int) -> None:
        self.lines.append(text)

    def say(self, text: str) -> None:
        pass


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in logs.read(out / "log.jsonl") if row["event"] == "step"]


def test_a_resumed_run_begins_where_the_other_was(tmp_path: Path) -> None:
    """Steps 1 to 5 once; step 6 twice, from the same weights, samples and random numbers.

    The first loss after resuming must be the same number; later ones only nearly, since attention's backward adds in an
    order that changes from run to run.
    """
    run(PLAN, SETTINGS, screen=Quiet(), out=tmp_path / "a", device="cuda")
    first = losses(tmp_path / "a")
    (newest,) = [one for one in save.complete(tmp_path / "a" / "checkpoints") if one.step == 10]
    newest.path.rename(tmp_path / "aside")
    run(PLAN, {}, screen=Quiet(), out=tmp_path / "a", resume=True, device="cuda")
    again = losses(tmp_path / "a")
    assert [step for step, _ in again] == list(range(1, 11))
    assert again[:6] == first[:6]
    assert all(a == pytest.approx(b, rel=2e-2) for (_, a), (_, b) in zip(first, again, strict=True))


def test_what_is_measured_of_a_device(tmp_path: Path) -> None:
    screen = Quiet()
    done = run(PLAN, {**SETTINGS, "steps": 60, "no_save": True}, screen=screen, out=tmp_path / "a", device="cuda")
    found = done.measurement
    assert found is not None and found.allocated_bytes and found.reserved_bytes
    assert found.reserved_bytes >= found.allocated_bytes > 10 * 2**20
    assert found.peak_flops_per_second and found.mfu == pytest.approx(1e12 / found.step_seconds / found.peak_flops_per_second)
    assert found.phases["backward"] + found.phases["update"] + found.phases["between"] == pytest.approx(found.step_seconds, rel=0.1)
    assert len(losses(tmp_path / "a")) == 60 and "MFU" in screen.lines[-1]
    assert losses(tmp_path / "a")[-1][1] < losses(tmp_path / "a")[0][1]
