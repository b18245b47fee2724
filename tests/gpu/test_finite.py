"""A step that is not finite, on a CUDA device, which is a step further when the host learns of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.plan.types import Plan
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.run import run
from tests.cpu_dist.test_train_faults import MODEL, everything, same, sample_of
from tests.cpu_dist.train_cases import Quiet, every_line

pytestmark = pytest.mark.gpu
SETTINGS = {"lr": 1e-2, "schedule": "constant", "warmup": 0, "save_every": 1, "keep": 20, "steps": 10}


def compilable(model: str) -> str:
    """Without the lines of its forward that look at the batch to fail on purpose; samples that are not numbers stay.

    A buffer is written in place: one that is put in its place would be an output of a CUDA graph, which the next replay overwrites.
    """
    changed = model.replace('if os.environ.get("RAISE_AT") in [str(int(one)) for one in number]:', "if False:")
    changed = changed.replace('os.environ.get("POISON_AT") in [str(int(one)) for one in number]', "False")
    changed = changed.replace("self.calls = self.calls + 1", "self.calls.add_(1)")
    assert changed.count("for one in number") == 0 and "NAN_AT" in changed
    return changed


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
@pytest.mark.parametrize("compiled", ["none", "model", "graphs"])
def test_a_sample_that_is_not_a_number_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, compiled: str
) -> None:
    every_line(monkeypatch)
    (tmp_path / "mine.py").write_text(MODEL if compiled == "none" else compilable(MODEL))
    plan = Plan(
        model={"model": str(tmp_path / "mine.py")}, hardware="auto", precision="fp32", optimizer=optimizer, compile=compiled,
        micro_batch=4 if compiled == "graphs" else 2, accumulate=1 if compiled == "graphs" else 2,
    )  # fmt: skip
    run(plan, SETTINGS, screen=Quiet(), out=tmp_path / "good", device="cuda")
    monkeypatch.setenv("NAN_AT", str(sample_of(5)))
    with pytest.raises(RunFailed, match="the loss of step 5 is nan"):
        run(plan, SETTINGS, screen=Quiet(), out=tmp_path / "bad", device="cuda")
    before, after = everything(tmp_path / "good", 4), everything(tmp_path / "bad", 5)
    assert same(before, after) and after["buffer norm.running_mean"].isfinite().all()
    assert run(plan, {}, screen=Quiet(), out=tmp_path / "bad", resume=True, device="cuda").step == 10
