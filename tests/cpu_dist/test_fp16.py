"""fp16 with a scaled loss, really run: as torch.amp.GradScaler's loop on one rank, as one fp32 process on several, through
overflows, saves and a run that does not recover."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.runtime.train import save
from foretell.runtime.train.numbers import clip, scaler
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.trace.load.model import Source
from foretell.trace.record.step import Workload, build_optimizer, compute_loss
from tests.cpu_dist.train_cases import PLAN, TINY, Quiet, every_line, go, losses, write_own

SOURCE = Source(
    model="gpt-tiny", overrides={"layers": 2, "dim": 16, "heads": 4, "vocab_size": 32, "context": 8}, micro_batch=2
)
FP16 = Plan(model={}, hardware="auto", micro_batch=2, accumulate=2, precision="fp16-mixed")
RATE = 1e-3


def job_of(plan: Plan) -> Job:
    return apply(verify.build(SOURCE), plan, start(plan, device="cpu"), learning_rate=RATE)


def by_hand(plan: Plan, steps: int, hurt: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
    """A plain loop with torch.amp.GradScaler; losses and scales, and the weights. Step `hurt` has a huge loss."""
    workload = verify.build(SOURCE)
    model = workload.model.train()
    optimizer = build_optimizer(plan.optimizer, list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = RATE
    grads, seen = torch.amp.GradScaler("cpu"), []
    one = dict.fromkeys(model.parameters(), 1.0)
    for step in range(steps):
        total = torch.zeros(())
        for batch in verify.batches(SOURCE, plan.accumulate):
            with torch.autocast("cpu", torch.float16):
                loss = compute_loss(Workload(model, batch, workload.loss)) / plan.accumulate
            grads.scale(loss * 1e20 if step == hurt else loss).backward()
            total = total + loss.detach()
        if plan.clip is not None:  # norms added up as the runtime does
            grads.unscale_(optimizer)
            squares = clip.squares(one, one)
            assert squares is not None
            clip.scale(one, squares.sqrt(), plan.clip)
        scale = grads.get_scale()
        grads.step(optimizer)
        grads.update()
        optimizer.zero_grad()
        seen.append((total.item(), scale))
    return seen, [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------- one rank


@pytest.mark.parametrize("limit", [0.1, None])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "momentum"])
def test_steps_are_those_of_torchs_own_scaler(optimizer: str, limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, through an overflow in the third step, with the scale in the clipping factor or alone."""
    plan, hurt = FP16.with_(optimizer=optimizer, clip=limit), 2
    wanted, weights = by_hand(plan, 6, hurt)
    job, found = job_of(plan), []
    plain = scaler.LossScaler.up
    for step in range(6):
        monkeypatch.setattr(scaler.LossScaler, "up", (lambda mine, loss: plain(mine, loss * 1e20)) if step == hurt else plain)
        before = [p.detach().clone() for p in job.parameters()]
        result = job.train_step(verify.batches(SOURCE, 2))
        assert result.loss_scale is not None and result.grad_norm is not None
        assert bool(result.grad_norm.isfinite()) == (step != hurt)
        if step == hurt:
            assert all(torch.equal(a, b) for a, b in zip(before, job.parameters(), strict=True)), "an overflow changes nothing"
        found.append((result.loss.item(), result.loss_scale.item()))
    assert found == wanted and wanted[-1][1] == 32768.0
    assert all(torch.equal(a, b) for a, b in zip(job.parameters(), weights, strict=True))


def test_gradients_and_their_norm_are_told_without_the_scale() -> None:
    """As fp32 has them, but for fp16's rounding."""
    jobs = [job_of(FP16.with_(precision=precision)) for precision in ("fp32", "fp16-mixed")]
    results = []
    for job in jobs:
        loss = job.backward(verify.batches(SOURCE, 2))
        results.append((job.gradients(), job.update(loss)))
    (wide, exact), (narrow, near) = results
    assert near.grad_norm is not None and exact.grad_norm is not None
    assert near.grad_norm.item() == pytest.approx(exact.grad_norm.item(), rel=2**-8)
    assert exact.loss_scale is None and near.loss_scale is not None
    assert all((narrow[name] - grad).norm() <= 0.05 * grad.norm() + 1e-6 for name, grad in wide.items())


def test_the_scale_grows_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "GOOD_STEPS", 3)
    job, found = job_of(FP16), []
    for _ in range(7):
        result = job.train_step(verify.batches(SOURCE, 2))
        assert result.loss_scale is not None
        found.append(result.loss_scale.item() / scaler.FIRST)
    assert found[:4] == [1.0, 1.0, 1.0, 2.0]


# ---------------------------------------------------------------- several ranks

MESHES = {
    "shards": FP16.with_(mesh=Mesh(dp_shard=2), clip=0.1),
    "replicas, not clipped": FP16.with_(mesh=Mesh(dp_replicate=2), clip=None),
    "pipeline": FP16.with_(mesh=Mesh(pp=2), pipeline=Pipeline(schedule="1f1b", cuts=("blocks.1",)), clip=0.1),
    "tensor": FP16.with_(mesh=Mesh(tp=2), clip=0.1),
}


LONG = ("replicas, not clipped", "pipeline", "tensor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow(reason="another mesh of the same rule") if name in LONG else ()) for name in MESHES]
)
def test_ranks_in_fp16_compute_what_one_fp32_process_does(name: str, ranks: Callable[[int], PoolWorld]) -> None:
    plan = MESHES[name]
    known = ranks(1).run(verify.reference_rank, SOURCE, plan, 5)[0]
    bounds = ranks(1).run(verify.bounds_rank, SOURCE, plan, known, 5)[0]
    found = verify.merge(ranks(2).run(verify.run_rank, SOURCE, plan, 5))
    difference = verify.compare(known, found, bounds)
    print(f"{name}: {difference}")
    assert known.losses[-1] < known.losses[0] and difference.good, difference
    assert bounds.gradient < 0.05 and bounds.loss < 0.01, "bounds that wide would show nothing"


def overflow_on_one_rank(rank: int, world: int, plan: Plan) -> list[tuple[float, bool]]:
    """Three steps; in the second one rank alone gets a huge gradient. Scales, and whether weights changed."""
    job = apply(verify.build(SOURCE), plan, start(plan, device="cpu"), learning_rate=RATE)
    seen = []
    for step in range(3):
        loss = job.backward(verify.batches(SOURCE, 2))
        if step == 1 and rank == 1:
            grad = next(p.grad for p in job.parameters() if p.grad is not None)
            clip.local(grad).view(-1)[0] = float("inf")
        before = [clip.local(p.detach()).clone() for p in job.parameters()]
        result = job.update(loss)
        changed = any(not torch.equal(a, clip.local(b.detach())) for a, b in zip(before, job.parameters(), strict=True))
        assert result.loss_scale is not None
        seen.append((result.loss_scale.item(), changed))
    return seen


def test_an_overflow_on_one_rank_is_skipped_on_all(ranks: Callable[[int], PoolWorld]) -> None:
    """Whatever this rank's own pieces are, and whichever stage it has."""
    for name in ("replicas, not clipped", "pipeline"):
        one, two = ranks(2).run(overflow_on_one_rank, MESHES[name])
        assert [scale for scale, _ in one] == [scale for scale, _ in two]
        first = one[0][0]
        assert [scale / first for scale, _ in one] == [1.0, 1.0, 0.5]
        assert [changed for _, changed in one] == [changed for _, changed in two] == [one[0][1], False, True]


# ---------------------------------------------------------------- a run


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every_line(monkeypatch)


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if row["event"] == "step"]


def hurting(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Multiply the losses of these micro-batches, counted from the start, hugely."""
    plain, count = scaler.LossScaler.up, iter(range(10**6))
    monkeypatch.setattr(scaler.LossScaler, "up", lambda mine, loss: plain(mine, loss * (1e30 if next(count) in calls else 1.0)))


def test_a_run_goes_on_after_an_overflow_and_a_resumed_one_keeps_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps are five and five, bit for bit, where the third overflowed: scale and good steps are saved."""
    plan = PLAN.with_(model={"model": "gpt-tiny", "overrides": {**TINY, "dim": 16, "context": 8}, "seq": 8}, precision="fp16-mixed")
    hurting(monkeypatch, {4})  # the first micro-batch of step 3
    screen = Quiet()
    go(tmp_path / "a", plan, screen=screen)
    found = rows(tmp_path / "a")
    assert [row["loss_scale"] for row in found] == [65536.0] * 3 + [32768.0] * 7
    assert [row["step"] for row in found if row["grad_norm"] in ("inf", "nan")] == [3]
    assert "1 step had no update: scaled fp16 gradients overflowed, and the scale was halved" in screen.said
    (middle,) = [one for one in save.complete(tmp_path / "a" / "checkpoints") if one.step == 5]
    assert middle.about["scaler"] == {"scale": 32768.0, "good_steps": 2}
    (newest,) = [one for one in save.complete(tmp_path / "a" / "checkpoints") if one.step == 10]
    newest.path.rename(tmp_path / "aside")
    first = losses(tmp_path / "a")
    hurting(monkeypatch, set())
    go(tmp_path / "a", plan, resume=True)
    again = rows(tmp_path / "a")
    assert [row["loss_scale"] for row in again] == [row["loss_scale"] for row in found] and losses(tmp_path / "a") == first


def test_gradients_that_stay_bad_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the least scale it is no overflow any more: the run says so, and where."""
    monkeypatch.setattr(scaler, "FIRST", 4 * scaler.LEAST)
    own = write_own(tmp_path, monkeypatch)
    plan = PLAN.with_(model={"model": f"{own}:model", "loss": f"{own}:loss"}, precision="fp16-mixed")
    Path(own).write_text(Path(own).read_text().replace('float(os.environ.get("MARK_AS", 0)) if', "9.0 if True or"))
    with pytest.raises(RunFailed, match=r"the gradient's norm of step 4 is nan with the loss scaled by 0\.00048.*first in backward"):
        go(tmp_path / "a", plan, data=own, steps=20)
    assert len(rows(tmp_path / "a")) == 4


@pytest.mark.parametrize(
    "state", [{"scale": 0.0, "good_steps": 1}, {"scale": "x", "good_steps": 1}, {"scale": 2.0}, [1], {"scale": 1.0, "good_steps": -1}]
)
def test_a_saved_scale_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(save.Damaged, match="loss scale that is none"):
        scaler.checked(state, "there")
    assert scaler.checked(None, "there") is None
