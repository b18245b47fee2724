"""The training loop: a plan, data and settings in; a run folder out.

The host stays one step ahead of the device: a step is asked for, the next one's samples are prepared, and only then is
the step before read and written down. Rank 0 writes and speaks; everybody computes, saves and stops together.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from foretell.checkpoint.format import Spec
from foretell.checkpoint.interval import steps_between
from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.text import shell_word
from foretell.plan.types import Plan
from foretell.runtime import folder as folders
from foretell.runtime import guard, log, measure, save
from foretell.runtime.apply import Job, apply
from foretell.runtime.control import Control
from foretell.runtime.data import Feed, Share
from foretell.runtime.folder import MEASUREMENT, Folder, Settings
from foretell.runtime.guard import RunFailed
from foretell.runtime.measure import Measurement, Reading, Tally
from foretell.runtime.prepare import applies, build, count_of, rank_seed, samples_of
from foretell.runtime.ranks import Ranks
from foretell.runtime.signals import Signals
from foretell.runtime.watch import Watch
from foretell.trace.cache import versions
from foretell.trace.step import Batch
from foretell.units import human_bytes

TELL_SECONDS = 0.1
"""The line on the screen is written anew at most this often."""
MEMORY_SECONDS = 1.0
"""Peaks of memory are asked for at most this often: it takes the host some 0.1 ms."""
FIRST_SAVE_STEPS = 5
"""Where the interval is to be found, the first save comes after so many steps: it is measured, and shows that it works."""
LEAVE_SECONDS = 10.0
"""A run that fails waits so long for a save under way."""
DONE, STOPPED = "done", "stopped"


class Screen(Protocol):
    """Where a run speaks; on rank 0 only."""

    def step(self, text: str, step: int) -> None:
        """The line of a step, over the one before where that is possible."""

    def say(self, text: str) -> None:
        """A line that stays."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: str
    """done, or stopped by a signal."""
    signal: str
    step: int
    folder: Path
    measurement: Measurement | None
    saved: save.Saved | None
    compares: bool = True
    """What the plan predicts is of this kind of device."""


def train(
    plan: Plan, settings: Settings, ranks: Ranks, folder: Folder, *, screen: Screen, control: Control | None = None,
    resume: bool = False, command: str = "", watch_seconds: Mapping[str, float] | None = None,
) -> Outcome:  # fmt: skip
    """Run a plan. The folder is there (`folder.begin` or `folder.go_on`); every rank calls this."""
    control = control or Control(ranks)
    watch = Watch(control, tell=screen.say, **dict(watch_seconds or {}))
    run: Run | None = None
    try:
        run = _prepared(plan, settings, ranks, folder, control, screen, command, resume=resume)
        if resume:
            run.resume()
            control.first(lambda: folders.settle(folder.path, plan))
        with Signals(screen.say if ranks.is_first else lambda _: None) as signals:
            outcome = run.all_steps(signals)
        control.gather(None)
        return outcome
    except UserError:
        raise  # every rank raises it
    except torch.OutOfMemoryError as error:
        why = f"rank {ranks.rank} ran out of device memory: {str(error).splitlines()[0]}{measure.others_words(ranks.device)}"
        watch.publish(why)
        said = plan.predicted.get("memory_bytes")
        known = f"; the plan predicted {human_bytes(said)}" if said else ""
        raise RunFailed(why, f"use a smaller micro-batch or recompute{known}; {_left(folder)}") from error
    except RuntimeError as error:  # a collective that failed: because someone is gone?
        with Signals():  # a launcher ends the others at once: there is still something to say
            verdict = watch.explain()
        if not verdict:
            watch.publish(_words(ranks, error))
            raise
        raise RunFailed(f"{verdict}; all ranks stop", _left(folder), speaks=watch.speaks, died=watch.died) from error
    except Exception as error:
        watch.publish(_words(ranks, error))
        raise
    finally:
        if run is not None and run.saver is not None:
            run.saver.wait(LEAVE_SECONDS)
        if run is not None:
            run.job.close()
        watch.stop()


def _words(ranks: Ranks, error: Exception) -> str:
    """An exception of this rank's own, for the others to tell."""
    return " ".join(f"rank {ranks.rank} failed: {type(error).__name__}: {error}".split())[:500]


def _left(folder: Folder) -> str:
    kept = save.complete(folder.checkpoints)
    if not kept:
        return "there is no checkpoint yet"
    return f"the last checkpoint is of step {kept[0].step}; go on with --resume --out {shell_word(folder.path)}"


# --- preparing -------------------------------------------------------------------------------------------------------


def _prepared(
    plan: Plan, settings: Settings, ranks: Ranks, folder: Folder, control: Control, screen: Screen, command: str,
    resume: bool = False,
) -> Run:  # fmt: skip
    workload = control.together(lambda: build(plan, settings.seed))
    known = save.whole_of(workload.model, plan)
    if settings.init_from is not None and not (resume and control.first(lambda: bool(save.candidates(folder.checkpoints)))):
        path, may_miss = Path(settings.init_from), settings.init_missing
        report = control.together(lambda: load_into(workload.model, path, may_miss=may_miss))
        if ranks.is_first:
            for line in report.lines():
                screen.say(line)
    unit, per_sample = count_of(workload.batch, plan.micro_batch)
    train_samples, eval_samples = control.together(lambda: samples_of(plan, settings, workload))
    if ranks.is_first:
        screen.say(f"data: {train_samples.note}")
        if not applies(plan, ranks):
            screen.say(f"the plan is for {plan.hardware} and this is a {ranks.device.type}: what it predicts is not compared")
    schedule = settings.schedule_for(plan)
    job = apply(workload, plan, ranks, learning_rate=schedule.at(0), scratch=settings.scratch or folder.path)
    torch.manual_seed(rank_seed(settings.seed, ranks.data_rank))
    share = Share(micro_batch=plan.micro_batch, accumulate=plan.accumulate, ranks=ranks.data_size, rank=ranks.data_rank)
    feed = Feed(train_samples, share, seed=settings.seed, device=ranks.device, workers=settings.workers)
    held = Feed(eval_samples, share, seed=settings.seed, device=ranks.device, shuffle=False) if eval_samples else None
    measure.forget_peaks(ranks.device)
    return Run(
        plan=plan, settings=settings, ranks=ranks, folder=folder, control=control, screen=screen, command=command,
        job=job, feed=feed, held=held, unit=unit, per_step=per_sample * share.step, known=known,
        saver=None if settings.no_save else _saver(settings, ranks, folder, control),
    )  # fmt: skip


def _saver(settings: Settings, ranks: Ranks, folder: Folder, control: Control) -> save.Saver:
    """Its thread talks over a group of its own."""
    back = save.Members(Control(ranks))
    cuda = ranks.device.type == "cuda"
    return save.Saver(folder.checkpoints, save.Members(control), back, keep=settings.keep, pin=cuda, spare=save.room(ranks))


# --- the run itself --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """A run under way on this rank."""

    plan: Plan
    settings: Settings
    ranks: Ranks
    folder: Folder
    control: Control
    screen: Screen
    command: str
    job: Job
    feed: Feed
    held: Feed | None
    unit: str
    per_step: int
    known: Mapping[str, Spec]
    """Parameters of the whole model."""
    saver: save.Saver | None

    def __post_init__(self) -> None:
        self.schedule = self.settings.schedule_for(self.plan)
        self.peak = measure.peak_flops(self.ranks.device, self.plan.precision)
        self.clock = measure.clock_of(self.ranks.device)
        self.tally = Tally()
        self.step = 0
        """Updates done."""
        self.log: log.Log | None = None
        self.signals = Signals()
        self.bad: Reading | None = None
        self.last_saved: save.Saved | None = None
        self.next_save: int | None = None
        """Where the interval is to be found: the step of the next save, the same on every rank."""
        self._told = self._asked_memory = 0.0
        self._told_direct = self._told_disk = False
        self._memory: dict[str, int | None] = {}

    # ------------------------------------------------------------ start and end

    def resume(self) -> None:
        """Take up the newest checkpoint that is as it was written; without any the run begins at its start."""
        folder, complaint = self.folder.checkpoints, ""
        for name in self.control.first(lambda: [path.name for path in save.candidates(folder)]):
            staged, why = self.control.together(lambda name=name: self._staged(folder / name))  # type: ignore[misc]
            complaints = [said for said in self.control.gather(why) if said]
            if not complaints and staged is not None:
                self._take(*staged)
                return
            complaint = complaint or complaints[0]
            if self.ranks.is_first:
                self.screen.say(f"the checkpoint {name} is not used: {complaints[0]}")
        if complaint:
            raise UserError(f"no checkpoint of {self.folder.path} can be used: {complaint}", "start a new run with another --out")
        if self.ranks.is_first:
            self.screen.say("there is no checkpoint to resume from: the run begins at its start")

    def _staged(self, path: Path) -> tuple[tuple[save.Saved, save.Staged] | None, str]:
        """What this rank needs of a checkpoint, or what is damaged of it. Nothing of the run is changed by that."""
        try:
            saved = save.look(path)
            if save.data_of(saved, self.feed.samples.count)["digest"] != self.feed.samples.digest():
                raise UserError(f"the data is not what {path} learned from", "give the same --data, unchanged, or start a new run")
            return (saved, save.stage(save.Reader(saved), self.job, self.known, seed=self.settings.seed)), ""
        except save.Damaged as error:
            return None, error.problem

    def _take(self, saved: save.Saved, staged: save.Staged) -> None:
        save.take(staged, self.job)
        self.feed.seek(saved.about["data"])
        self.step, self.last_saved = saved.step, saved
        if self.saver is not None:
            self.saver.good.add(saved.path)
        if self.ranks.is_first:
            before = save.saved_mesh(saved)
            how = "" if before == self.plan.mesh else f", saved on {before.world} ranks"
            self.screen.say(f"resumed after step {self.step}{how}")

    def all_steps(self, signals: Signals) -> Outcome:
        self.signals = signals
        resumed = self.step if self.step else None
        if self.ranks.is_first:
            more = log.adapters(self.settings.log, self.folder.path, self.settings.to_json(), last_step=resumed)
            self.log = log.Log(self.folder.path, more, last_step=self.step)
            self.log.write("resume" if resumed else "start", self.step, time=time.time(), command=self.command)
        try:
            stopped = self._steps()
            if self.bad is not None:
                self._give_up(self.bad)
            if not stopped:
                self.evaluate()
            saved = self.save() if not self.settings.no_save else None
            self._look_at_disk(last=True)
            measured = self.measured()
            if isinstance(saved, save.NotSaved):
                raise RunFailed(f"the last checkpoint was not saved: {saved.why}", self._kept())
        finally:
            if self.log is not None:
                self.log.close()
            gc.unfreeze()
        return Outcome(
            status=STOPPED if stopped else DONE, signal=self.signals.asked, step=self.step, folder=self.folder.path,
            measurement=measured, saved=saved, compares=applies(self.plan, self.ranks),
        )  # fmt: skip

    def _kept(self) -> str:
        kept = self.last_saved
        return f"the one of step {kept.step} is kept in {kept.path}" if kept else "make room and start again"

    # ------------------------------------------------------------ steps

    def _steps(self) -> bool:
        """Steps until the last one, a signal or a bad number; whether a signal stopped them."""
        settings = self.settings
        first = self.step
        if settings.mtbf is not None:
            self.next_save = first + FIRST_SAVE_STEPS
        batches = self._fetched() if self.step < settings.steps else []
        while self.step < settings.steps:
            for group in self.job.optimizer.param_groups:
                group["lr"] = self.schedule.at(self.step)
            self.clock.begin()
            if self.saver is not None and self.job.updates_early:
                self.saver.before_update()
            loss = self.job.backward(batches)
            self.clock.middle()
            if self.saver is not None:
                self.saver.before_update()
            result = self.job.update(loss)
            self.step += 1
            self.clock.end(self.step, result.loss, result.grad_norm)
            if self.step < settings.steps:
                batches = self._fetched()
            self._note(self.clock.read())
            self._look_at_disk()
            self._tell_save()
            self._find_next_save()
            if self.step == first + 2:
                gc.collect()
                gc.freeze()  # what is alive now stays: later collections need not look at it again
                if self.saver is not None and (settings.save_every or settings.mtbf):
                    self.saver.warm(save.pieces(self.job), save.own_state(self.job))
            stop = self.control.should_stop(self.step, bool(self.signals.asked), self.tally.last_seconds)
            if stop or self.bad is not None:
                break
            self._due()
        self._note(self.clock.read(all=True))
        self.control.finish()
        return self.step < settings.steps and self.bad is None

    def _look_at_disk(self, *, last: bool = False) -> None:
        """Warn once if the disk is slower than the plan took it to be; at the end say how fast it was."""
        shelf = self.job.moved.store.shelf if self.job.moved is not None else None
        if shelf is None or not self.ranks.is_first or self._told_disk:
            return
        read, write = (self.plan.predicted.get(f"disk_{way}_bytes_per_second") for way in ("read", "write"))
        said = shelf.slower(read, write) if read and write else None
        moved, seconds = shelf.measured()
        if said is None and last and seconds:
            said = f"disk: {human_bytes(moved)} moved to and from {shelf.folder} at {human_bytes(moved / seconds)}/s"
        if said is not None:
            self._told_disk = True
            self.screen.say(said)

    def _fetched(self) -> list[Batch]:
        began = time.perf_counter()
        batches = self.feed.next()
        self.tally.data_seconds.append(time.perf_counter() - began)
        return batches

    def _due(self) -> None:
        """Evaluation and checkpoint, where it is their turn."""
        evaluates = self.settings.eval_every and self.step % self.settings.eval_every == 0
        saves = self.settings.save_every and self.step % self.settings.save_every == 0
        saves = not self.settings.no_save and (saves or (self.next_save is not None and self.step >= self.next_save))
        if self.step == self.settings.steps or not (evaluates or saves):
            return
        self._note(self.clock.read(all=True))
        if self.bad is not None:
            return
        if evaluates:
            self.evaluate()
        if saves:
            self.save(wait=False)
        self.clock.pause()

    def _note(self, readings: list[Reading]) -> None:
        for reading in readings:
            self.tally.add(reading)
            if not math.isfinite(reading.loss) or not math.isfinite(reading.grad_norm or 0.0):
                self.bad = self.bad or reading
            if self.log is not None:
                self._tell(reading)

    def _tell(self, reading: Reading) -> None:
        """Write the step down and, now and then, show it."""
        assert self.log is not None
        now = time.monotonic()
        if now - self._asked_memory > MEMORY_SECONDS:
            self._memory, self._asked_memory = measure.memory(self.ranks.device), now
        share = measure.mfu(self.plan, reading.seconds, self.peak)
        self.log.write(
            "step", reading.step, loss=reading.loss, grad_norm=reading.grad_norm, lr=self.schedule.at(reading.step - 1),
            seconds=reading.seconds, backward_seconds=reading.backward_seconds, update_seconds=reading.update_seconds,
            mfu=share, **self._memory,
        )  # fmt: skip
        if now - self._told < TELL_SECONDS and reading.step < self.settings.steps:
            return
        self._told = now
        seconds = self.tally.recent_seconds() or reading.seconds
        predicted = self.plan.predicted.get("step_seconds") if applies(self.plan, self.ranks) else None
        peak = self._memory.get("allocated_bytes")
        text = log.line(
            reading, self.settings.steps, rate=self.per_step / seconds, unit=self.unit,
            mfu=measure.mfu(self.plan, seconds, self.peak),
            memory_bytes=peak if peak is not None else self._memory.get("host_bytes"),
            drift=seconds / predicted - 1 if predicted else None,
        )  # fmt: skip
        self.screen.step(text, reading.step)

    # ------------------------------------------------------------ evaluate, save, measure

    def evaluate(self) -> None:
        """Mean loss over held-out samples, the same ones every time."""
        if self.held is None:
            return
        began = time.perf_counter()
        share = self.held.share
        rounds = min(self.settings.eval_batches, max(1, (self.held.samples.count or share.step) // share.step))
        losses = [float(self.job.evaluate(self.held.at(turn * share.step))) for turn in range(rounds)]
        self.tally.eval_loss = sum(losses) / rounds
        self.tally.eval_seconds.append(time.perf_counter() - began)
        if self.log is not None:
            self.log.write("eval", self.step, loss=self.tally.eval_loss, seconds=self.tally.eval_seconds[-1])
            self.screen.say(f"step {self.step}: held-out loss {self.tally.eval_loss:.4f}")

    def _tell_save(self) -> save.Saved | save.NotSaved | None:
        """How the last save went, as soon as that is known."""
        done = self.saver.poll() if self.saver is not None else None
        if done is None:
            return None
        good = done.result if isinstance(done.result, save.Saved) else None
        why = done.result.why if isinstance(done.result, save.NotSaved) else None
        self.last_saved = good or self.last_saved
        if self.log is not None:
            self.log.write("save", done.result.step, seconds=done.seconds, stall_seconds=done.stall_seconds,
                           bytes=good.bytes if good else None, problem=why)  # fmt: skip
            if why is not None:
                self.screen.say(f"step {done.result.step}: the checkpoint was not saved: {why}; {self._kept()}")
            elif done.direct_bytes and not self._told_direct:
                self._told_direct = True
                self.screen.say(
                    f"step {done.result.step}: host memory has no room for a copy of {human_bytes(done.direct_bytes)} that are in it: "
                    f"training waited {done.stall_seconds:.1f} s while they were written"
                )
        return done.result

    def _find_next_save(self) -> None:
        """Where it is to be found when to save: one step after a save all ranks know what it cost, and agree."""
        if self.settings.mtbf is None or self.saver is None or self.next_save is not None:
            return
        told = self.control.gather([self.saver.stall_seconds, self.tally.recent_seconds()])
        cost, step = (max(said) for said in zip(*told, strict=True))
        self.next_save = self.step + steps_between(cost, self.settings.mtbf, step, self.settings.steps)

    def save(self, *, wait: bool = True) -> save.Saved | save.NotSaved | None:
        """A checkpoint of this moment; one that fails is told and leaves the one before. Without `wait` it is written
        while the next steps run, and nothing is known of it yet."""
        assert self.saver is not None
        began = time.perf_counter()
        self.saver.wait()
        self._tell_save()
        if self.last_saved is not None and self.last_saved.step == self.step:
            return self.last_saved
        used = self.feed.first - (self.feed.share.step if self.step < self.settings.steps else 0)
        about = {
            "data": {**self.feed.state(used), "digest": self.feed.samples.digest()}, "schedule": self.schedule.to_json(),
            "plan": plans.to_json(self.plan), "versions": versions(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        own, extra = save.own_state(self.job), save.extra(self.job)
        self.saver.begin(self.step, save.pieces(self.job), own, about, extra=extra, wait=wait)
        seconds = time.perf_counter() - began
        self.tally.save_seconds.append(seconds)
        self.next_save = None
        return self._tell_save() if wait else None

    def measured(self) -> Measurement | None:
        """Sum up and write it down."""
        peaks = {"rank": self.ranks.rank, **measure.memory(self.ranks.device)}
        found = measure.summarise(
            self.tally, self.plan, self.ranks, unit=self.unit, per_step=self.per_step,
            by_rank=self.control.gather(peaks), command=self.command, versions=versions(),
        )  # fmt: skip
        if found is not None and self.ranks.is_first:
            self.folder.write(MEASUREMENT, found.to_json())
        return found

    def _give_up(self, bad: Reading) -> None:
        """A number that is none: save, look for the first block, say so."""
        done = self.save() if not self.settings.no_save else None
        self.measured()
        ahead = self.step - bad.step + (1 if self.step < self.settings.steps else 0)
        first = self.feed.first - (ahead + 1) * self.feed.share.step
        what = "loss" if not math.isfinite(bad.loss) else "gradient's norm"
        value = bad.loss if what == "loss" else bad.grad_norm
        where = guard.find_first(self.job, self.feed.at(first), self.control)
        kept = f"saved after step {self.step} in {done.path}" if isinstance(done, save.Saved) else self._kept()
        if self.log is not None:
            self.log.write("not finite", bad.step, what=what, where=where, first_sample=first)
        raise RunFailed(
            f"the {what} of step {bad.step} is {value}: {where}; its update was not applied",
            f"look at samples {first} to {first + self.feed.share.step - 1} of the run's order, or lower --lr; {kept}",
        )
