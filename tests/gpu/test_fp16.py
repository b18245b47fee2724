"""fp16 with a scaled loss on a CUDA device: torch.amp.GradScaler's steps, no waiting for the host, the memory that was said."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.hardware import parse
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Plan
from foretell.runtime.parallel.apply import Job, apply, placed
from foretell.runtime.parallel.ranks import start
from foretell.runtime.train import log as logs
from foretell.runtime.train import save
from foretell.runtime.train.numbers import scaler
from foretell.runtime.train.run import run
from foretell.simulate.plan import predict_plan
from foretell.trace.load.model import load
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload, build_optimizer, compute_loss

pytestmark = pytest.mark.gpu

PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": {"dropout": 0.0, "layers": 4, "dim": 256, "heads": 4}}, hardware="auto", micro_batch=8,
    accumulate=2, precision="fp16-mixed",
)  # fmt: skip
STEPS, HURT, RATE = 8, 3, 1e-3


def built(plan: Plan) -> Workload:
    torch.manual_seed(3)
    return load(source_of(plan))


def batches(plan: Plan) -> list[Any]:
    torch.manual_seed(4)
    given = [load(source_of(plan)).batch for _ in range(plan.accumulate)]
    return [placed(batch, device=torch.device("cuda", 0), precision=plan.precision) for batch in given]


def job_of(plan: Plan) -> Job:
    return apply(built(plan), plan, start(plan, device="cuda"), learning_rate=RATE)


def by_hand(plan: Plan) -> list[tuple[float, float]]:
    """A plain loop with torch.amp.GradScaler: losses and scales; step HURT has a huge loss."""
    workload = built(plan)
    model = workload.model.cuda().train()
    optimizer = build_optimizer(plan.optimizer, list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = RATE
    grads, seen = torch.amp.GradScaler("cuda"), []
    for step in range(STEPS):
        total = 0.0
        for batch in batches(plan):
            with torch.autocast("cuda", torch.float16):
                loss = compute_loss(Workload(model, batch, workload.loss)) / plan.accumulate
            grads.scale(loss * 1e20 if step == HURT else loss).backward()
            total += loss.item()
        if plan.clip is not None:
            grads.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        scale = grads.get_scale()
        grads.step(optimizer)
        grads.update()
        optimizer.zero_grad()
        seen.append((total, scale))
    return seen


@pytest.mark.parametrize("more", [{}, {"clip": None}, {"optimizer": "adamw-foreach"}], ids=["fused", "not clipped", "foreach"])
def test_steps_are_those_of_torchs_own_scaler(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales to the bit, losses nearly: attention's backward adds in an order that changes from run to run."""
    plan = PLAN.with_(**more)
    wanted = by_hand(plan)
    job, found, plain = job_of(plan), [], scaler.LossScaler.up
    for step in range(STEPS):
        monkeypatch.setattr(scaler.LossScaler, "up", (lambda mine, loss: plain(mine, loss * 1e20)) if step == HURT else plain)
        result = job.train_step(batches(plan))
        assert result.loss_scale is not None and result.grad_norm is not None
        assert bool(result.grad_norm.isfinite()) == (step != HURT)
        found.append((result.loss.item(), result.loss_scale.item()))
    assert [scale for _, scale in found] == [scale for _, scale in wanted] and wanted[-1][1] < wanted[0][1]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=2e-3)
    assert found[HURT + 1][0] == pytest.approx(found[HURT][0], rel=1e-4), "the step that overflowed changed nothing"
    assert found[-1][0] < found[0][0]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device(waiting_is_an_error: None) -> None:
    """A fused optimizer: scale, skip and growth are decided on the device."""
    job, given = job_of(PLAN), batches(PLAN)
    for _ in range(2):
        job.train_step(given)
    torch.cuda.set_sync_debug_mode("error")
    result = job.train_step(given)
    torch.cuda.set_sync_debug_mode("default")
    assert result.loss_scale is not None and result.loss.isfinite()


def test_memory_is_what_the_plan_said() -> None:
    job, given = job_of(PLAN), batches(PLAN)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        job.train_step(given)
    measured = torch.cuda.max_memory_allocated()
    trace = capture(functools.partial(load, source_of(PLAN)), recipe_of(PLAN), capability=torch.cuda.get_device_capability())
    said = predict_plan(trace, PLAN, parse("auto")).worst.memory.allocated_bytes
    print(f"allocated: said {said:,}, measured {measured:,} ({said / measured - 1:+.2%})")
    assert said == pytest.approx(measured, rel=0.03)


class Quiet:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def test_a_run_keeps_its_scale_through_an_overflow_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read one step late, as a device is: the third of ten steps overflows, and the run resumed after five goes on alike."""
    plain, count = scaler.LossScaler.up, iter(range(10**6))
    monkeypatch.setattr(scaler.LossScaler, "up", lambda mine, loss: plain(mine, loss * (1e30 if next(count) == 4 else 1.0)))
    asked = {"steps": 10, "data": str(Path(json.__file__).parent), "lr": 1e-3, "schedule": "constant", "save_every": 5}
    plan = PLAN.with_(model={**PLAN.model, "seq": 64})
    run(plan, asked, screen=Quiet(), out=tmp_path / "a", device="cuda")
    first = [row for row in logs.read(tmp_path / "a" / "log.jsonl") if row["event"] == "step"]
    assert len({row["loss_scale"] for row in first[:3]}) == 1 and first[3]["loss_scale"] == first[2]["loss_scale"] / 2
    (newest,) = [one for one in save.complete(tmp_path / "a" / "checkpoints") if one.step == 10]
    newest.path.rename(tmp_path / "aside")
    run(plan, {}, screen=Quiet(), out=tmp_path / "a", resume=True, device="cuda")
    again = [row for row in logs.read(tmp_path / "a" / "log.jsonl") if row["event"] == "step"]
    assert [row["loss_scale"] for row in again] == [row["loss_scale"] for row in first]
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in first], rel=2e-2)
