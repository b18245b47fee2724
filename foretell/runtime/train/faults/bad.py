"""A step whose numbers are bad: it is undone and computed once more to tell the samples from the hardware, written down and passed over.

    undo ─► the same samples on another rank ─► faults.jsonl ─► go on after them
                                                    └─ more than --bad-steps of late ─► a checkpoint from before them, and past its samples too
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foretell.checkpoint import store
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.process.progress import EVALUATION
from foretell.runtime.train import save
from foretell.runtime.train.folder import note_fault
from foretell.runtime.train.numbers import guard
from foretell.runtime.train.numbers.bad import WINDOW_STEPS
from foretell.runtime.train.numbers.guard import LOSS, WEIGHTS, Finding

if TYPE_CHECKING:
    from foretell.runtime.train.loop import TrainingRun

DATA, HARDWARE = "data", "hardware"
SAME = 0.01
"""Two losses of the same samples that differ by less are the same: other ranks may round otherwise."""
SHOWN = 8
"""Samples told on the screen; the file has all."""


@dataclass(frozen=True, kw_only=True)
class SecondTry:
    """What the samples of a bad step gave when they were computed once more."""

    verdict: str
    """data or hardware."""
    rank: int | None
    """Whose samples they are, or whose hardware it is; None where that cannot be told."""
    host: str
    data_rank: int | None
    again: float
    """The bad number, computed once more."""
    by: int | None
    """By which rank."""
    where: str
    """The block that was first not finite; empty where none was."""

    @property
    def words(self) -> str:
        when = f"on rank {self.by}" if self.by not in (None, self.rank) else "the second time"
        if self.verdict == DATA:
            whose = f"of rank {self.rank}" if self.rank is not None else "of the step"
            return f"it is the samples {whose}: {self.again:g} {when} too" + (f", {self.where}" if self.where else "")
        whose = f"rank {self.rank} on {self.host}" if self.rank is not None else "some rank"
        return f"it is the hardware of {whose}, not the samples: the same ones gave {self.again:g} {when}"


@dataclass(frozen=True, kw_only=True)
class _Said:
    """What one rank says of a bad step."""

    data_rank: int
    host: str
    first: float | None
    """Its loss of its own samples."""
    took: int
    """Whose samples it computed the second time."""
    second: float | None
    norm: float
    """Of the whole gradient, the second time."""
    finding: Finding | None


def passed_over(run: TrainingRun) -> bool:
    """Undo the bad step, write it down, and see that the run may go on after it; False where it may not. All ranks call it."""
    bad, policy = run.bad, run.bad_steps
    if bad is None or not policy.allowed:
        return False
    began = time.perf_counter()
    _undo(run, bad)
    first, what = run.first_sample(bad.step - 1), policy.what(bad)
    replay = _replayed(run, bad, first, what)
    _tell(run, bad, replay, first, what, time.perf_counter() - began)
    spent = policy.note(bad.step)
    run.go_to(bad.step, run.first_sample(bad.step))
    if spent and not _went_back(run, bad):
        return False
    run.bad = None
    return True


def give_up(run: TrainingRun) -> None:
    """The step leaves no trace but its number; save, look for the first block, say so."""
    bad = run.bad
    assert bad is not None
    share, first, what = run.feed.share.step, run.first_sample(bad.step - 1), run.bad_steps.what(bad)
    _undo(run, bad)
    done = run.save() if not run.settings.no_save else None
    run.measured()
    run.seed(bad.step - 1)
    limit = run.bad_steps.limit(bad)
    where = f"above {limit:g}, which is {run.settings.spike:g} times the median" if limit is not None and math.isfinite(
        guard.value_of(bad, what) or 0.0) else guard.find_first(run.job, run.feed.at(first), run.control)  # fmt: skip
    kept = f"saved after step {run.step} in {done.path}" if isinstance(done, save.SavedCheckpoint) else run.kept()
    if run.log is not None:
        run.log.write("not finite", bad.step, what=what, where=where, first_sample=first)
    passed = len(run.bad_steps.passed)
    more = f"; {passed} steps were bad within {WINDOW_STEPS}" if passed > 1 else ""
    remedy = f"look at samples {first} to {first + share - 1} of the run's order, or lower --lr; {kept}"
    raise guard.no_number(bad, what, f"{where}{more}", remedy)


def _undo(run: TrainingRun, bad: StepReading) -> None:
    """The host may be a step further than what it has read; the device has updated nothing since."""
    run.job.settle()
    run.job.skips.undo(run.step - bad.step + 1)
    if run.log is not None and run.step > bad.step:
        run.log.back_to(bad.step)
    run.step = bad.step


# --- once more -------------------------------------------------------------------------------------------------------


def _replayed(run: TrainingRun, bad: StepReading, first: int, what: str) -> SecondTry:
    """Each data rank computes the samples of the next one, with what that one drew; a single one computes its own again."""
    run.progress.at(EVALUATION)
    ranks, job = run.ranks, run.job
    took = (ranks.data_rank + 1) % ranks.data_size
    batches = run.feed.at(first, took)
    run.seed(bad.step - 1, took)
    broken = guard.bad_weight(job)
    loss, found = guard.watched(job, batches)
    result = job.look(loss)
    said = _Said(
        data_rank=ranks.data_rank, host=platform.node(), first=run.bad_steps.own_loss(bad.step), took=took,
        second=float(loss) if loss is not None else None, norm=float(result.grad_norm) if result.grad_norm is not None else 0.0,
        finding=broken or found,
    )  # fmt: skip
    told = [_Said(**{**one, "finding": Finding(**one["finding"]) if one["finding"] else None}) for one in run.control.gather(asdict(said))]
    return judged(told, what, guard.value_of(bad, what) or 0.0)


def judged(told: Sequence[_Said], what: str, value: float) -> SecondTry:
    """Whose fault a bad number is, given what every rank said."""
    found = [(rank, one.finding) for rank, one in enumerate(told) if one.finding is not None]
    where = guard.first_of([finding for _, finding in found]).sentence() if found else ""
    broken = next((rank for rank, finding in found if finding.phase == WEIGHTS), None)
    whose = _culprit(told, what)
    if what != LOSS:
        same = _alike(value, told[0].norm)
        ranks = {rank for rank, _ in found}
        if same and found and len(told) > 1:  # backward is a rank's own until gradients are summed
            whose = _rank_of(told, told[min(ranks)].took)
        again, by = told[0].norm, None
    else:
        by = next((rank for rank, one in enumerate(told) if whose is not None and one.took == told[whose].data_rank and one.second is not None), None)
        second = told[by].second if by is not None else None
        again = math.nan if second is None else second
        same = whose is not None and _alike(told[whose].first or 0.0, again)
    verdict = DATA if same and broken is None else HARDWARE
    rank = broken if broken is not None else whose
    return SecondTry(
        verdict=verdict, rank=rank, host=told[rank].host if rank is not None else "", data_rank=told[rank].data_rank if rank is not None else None,
        again=again, by=by, where=where,
    )  # fmt: skip


def _culprit(told: Sequence[_Said], what: str) -> int | None:
    """The rank with the worst loss, where it is the loss; of a gradient that is summed nobody knows whose it was, unless there is one rank."""
    if what != LOSS:
        return 0 if len({one.data_rank for one in told}) == 1 else None
    known = [(rank, one.first) for rank, one in enumerate(told) if one.first is not None]
    return max(known, key=lambda one: (not math.isfinite(one[1]), one[1] if math.isfinite(one[1]) else 0.0), default=(None, 0.0))[0]


def _rank_of(told: Sequence[_Said], data_rank: int) -> int | None:
    return next((rank for rank, one in enumerate(told) if one.data_rank == data_rank), None)


def _alike(first: float, second: float) -> bool:
    """Neither is a number, or both are about the same."""
    if not math.isfinite(first) or not math.isfinite(second):
        return math.isfinite(first) == math.isfinite(second)
    return abs(first - second) <= SAME * abs(first)


# --- telling ---------------------------------------------------------------------------------------------------------


def _tell(run: TrainingRun, bad: StepReading, replay: SecondTry, first: int, what: str, seconds: float) -> None:
    value, limit = guard.value_of(bad, what) or 0.0, run.bad_steps.limit(bad)
    if not run.ranks.is_first:
        return
    rank = replay.data_rank if replay.verdict == DATA else None
    samples = run.feed.places(first, rank)[0].reshape(-1).tolist() if rank is not None else None
    above = f", above {limit:g}" if limit is not None and math.isfinite(value) else ""
    shown = f" {', '.join(map(str, samples[:SHOWN]))}{', …' if samples[SHOWN:] else ''}" if samples else ""
    run.screen.say(
        f"step {bad.step}: the {what} is {value:g}{above}: {replay.words}{shown}; the step is undone, and samples {first} to "
        f"{first + run.feed.share.step - 1} of the run's order are passed over"
    )
    row: dict[str, Any] = {
        "step": bad.step, "what": what, "value": _sayable(value), "limit": limit, **asdict(replay), "again": _sayable(replay.again),
        "samples": samples, "first_sample": first, "last_sample": first + run.feed.share.step - 1, "seconds": round(seconds, 4),
    }  # fmt: skip
    note_fault(run.folder.path, "bad step", **row)
    if run.log is not None:
        run.log.write("bad step", bad.step, what=what, verdict=replay.verdict, rank=replay.rank, first_sample=first)


def _sayable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# --- too many --------------------------------------------------------------------------------------------------------


def _went_back(run: TrainingRun, bad: StepReading) -> bool:
    """Take the run back to the newest good checkpoint from before the bad steps, or the oldest there is, and go on with the samples after them."""
    policy, saver = run.bad_steps, run.saver
    if saver is None or not policy.may_go_back(bad.step):
        return False
    saver.wait()
    run.tell_save()
    passed, position = policy.passed, run.first_sample(bad.step)

    def names() -> list[str]:
        kept = [one for one in save.complete(run.folder.checkpoints) if one.step < bad.step]
        before = [one.path.name for one in kept if one.step < passed[0]]
        return before + [one.path.name for one in reversed(kept) if one.step >= passed[0]]

    found, _ = run.newest(run.control.first(names))
    if found is None:
        return False
    run.take_up(*found)
    policy.went_back(bad.step)
    skipped = run.feed.first
    run.go_to(run.step, position)
    if run.ranks.is_first:
        run.screen.say(
            f"step {bad.step}: {len(passed)} bad steps within {WINDOW_STEPS} are more than --bad-steps {policy.allowed}: back to the checkpoint of "
            f"step {run.step}; samples {skipped} to {position - 1} of the run's order are passed over"
        )
        note_fault(run.folder.path, "rollback", step=bad.step, checkpoint=run.step, bad_steps=passed, first_sample=skipped, last_sample=position - 1)
    run.control.first(lambda: _forget_newer(run))
    if run.memory is not None:
        run.memory.forget()
    saver.good = {path for path in saver.good if path.exists()}
    if run.log is not None:
        run.log.back_to(run.step)
    run.last_saved = None
    run.save()  # from now on the order goes on after them, whenever the run is resumed
    return True


def _forget_newer(run: TrainingRun) -> None:
    """Checkpoints of the course that was left."""
    for one in save.candidates(run.folder.checkpoints):
        if one.name > store.folder_name(run.step):
            store.remove(one)
