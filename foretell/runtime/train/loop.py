"""The training loop of one rank: steps, evaluations and saves, and what is left of them when a step fails.

The host stays one step ahead of the device: a step is asked for, the next one's samples are prepared, and only then is
the step before read and written down.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.checkpoint.format import TensorMeta
from foretell.checkpoint.interval import SlowedSteps, steps_between
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.data.samples import Feed
from foretell.runtime.observe import machine_load as load
from foretell.runtime.observe import measure
from foretell.runtime.observe.joules import Joules
from foretell.runtime.observe.measure import Measurement, StepReading, Tally
from foretell.runtime.observe.process_state import delayed
from foretell.runtime.parallel.apply import Job
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.parallel.sync import rounds
from foretell.runtime.process import launch
from foretell.runtime.process.control import Control
from foretell.runtime.process.progress import DATA, END, EVALUATION, SAVE, STEP, Progress
from foretell.runtime.process.progress import LOG as LOGGING
from foretell.runtime.process.signals import STEPS, Signals
from foretell.runtime.train import log, save
from foretell.runtime.train.faults import bad, growth, halve, salvage
from foretell.runtime.train.folder import MEASUREMENT, Folder, RunSettings
from foretell.runtime.train.memory import PREFIX, MemoryCheckpoints, order
from foretell.runtime.train.numbers import guard
from foretell.runtime.train.numbers.bad import BadSteps
from foretell.runtime.train.numbers.scaler import overflow_words, overflowed
from foretell.runtime.train.outcome import DONE, STOPPED, RunOutcome, RunScreen
from foretell.runtime.train.prepare import applies
from foretell.runtime.train.rng import seed_all, step_seed
from foretell.runtime.train.schedule import Schedule, resumed
from foretell.runtime.train.take import Staged, saved_mesh, stage, take
from foretell.trace.record.step import Batch
from foretell.trace.store.cache import versions

TELL_SECONDS = 0.1
"""The line on the screen is written anew at most this often."""
MEMORY_SECONDS = 1.0
"""Peaks of memory are asked for at most this often: it takes the host some 0.1 ms."""
FIRST_SAVE_STEPS = 5
"""Where the interval is to be found, the first save comes after so many steps: it is measured, and shows that it works."""
BAD_STEPS = "bad_steps"
"""In a checkpoint: which steps were passed over of late, and what the others were like."""


@dataclass(kw_only=True)
class TrainingRun:
    """A run under way on this rank."""

    plan: Plan
    settings: RunSettings
    ranks: Ranks
    folder: Folder
    control: Control
    screen: RunScreen
    command: str
    job: Job
    feed: Feed
    held: Feed | None
    unit: str
    per_step: int
    known: Mapping[str, TensorMeta]
    """Parameters of the whole model."""
    saver: save.Saver | None
    memory: MemoryCheckpoints | None = None
    """What saves to the memory of hosts besides."""

    def __post_init__(self) -> None:
        self.schedule = self.settings.schedule_for(self.plan)
        self.peak = measure.peak_flops(self.ranks.device, self.plan.precision)
        self.clock = measure.clock_of(self.ranks.device)
        self.pace = measure.PredictedPace()
        self.tally, self.joules = Tally(), Joules(self.ranks.device)
        self.load = load.LoadMeter(os.getppid() if launch.is_rank() else None, gpus=self.ranks.device.type == "cuda")
        self._delayed, self._busy = delayed(), False
        self.step = 0
        """Updates done."""
        self.log: log.RunLog | None = None
        self.signals, self.progress = Signals(), Progress()
        self._savers = [] if self.saver is None else [self.saver] if self.memory is None else [self.saver, self.memory.saver]
        self.bad: StepReading | None = None
        self.bad_steps = BadSteps(self.settings.bad_steps, self.settings.spike)
        self.overflows = 0
        """Steps without an update since their scaled gradients overflowed."""
        self.aside = False
        self.last_saved: save.SavedCheckpoint | None = None
        self.slowed = SlowedSteps()
        self.growth: growth.GrowthWatch | None = None
        self.next_save: int | None = None
        """Where the interval is to be found: the step of the next save, the same on every rank."""
        self.origin: tuple[int, int] | None = None
        """Updates that were done, and samples used up, before the first step of this process."""
        self.between: save.Between | None = None
        """Where there are other ranks: what to save if their code or this one's fails in the middle of a step."""
        self.loose: list[str] = []
        """Tensors that were not finite when the run began, and so may be in its checkpoints."""
        self._source = ""
        """Where the checkpoint is from that the run went on with, in words; empty for the disk."""
        self._told = self._asked_memory = 0.0
        self._told_disk, self._save_words = False, log.SaveWords()
        self._memory: dict[str, int | None] = {}

    # ------------------------------------------------------------ start and end

    def resume(self) -> None:
        """Take up the newest checkpoint that is as it was written; without any the run begins at its start."""
        names = self.control.first(lambda: [path.name for path in save.candidates(self.folder.checkpoints)])
        found, complaint = self.newest(names if self.memory is None else order(names, self.memory.names(self.screen.say)))
        if found is not None:
            self._take(*found)
            return
        if complaint:
            raise UserError(f"no checkpoint of {self.folder.path} can be used: {complaint}", "start a new run with another --out")
        if self.ranks.is_first:
            self.screen.say("there is no checkpoint to resume from: the run begins at its start")

    def newest(self, names: Sequence[str]) -> tuple[tuple[save.SavedCheckpoint, Staged] | None, str]:
        """The first of these checkpoints that is as it was written, or what is wrong with the first; all ranks ask for the same."""
        complaint = ""
        for name in names:
            path, self._source = self.folder.checkpoints / name, ""
            if self.memory is not None and name.startswith(PREFIX):
                path, self._source = self.memory.path(name), self.memory.complete(name)
            staged, why = self.control.together(lambda path=path: self._staged(path))  # type: ignore[misc]
            complaints = [said for said in self.control.gather(why) if said]
            if not complaints and staged is not None:
                return staged, ""
            complaint = complaint or complaints[0]
            if self.ranks.is_first:
                self.screen.say(f"the checkpoint {name} is not used: {complaints[0]}")
        return None, complaint

    def _staged(self, path: Path) -> tuple[tuple[save.SavedCheckpoint, Staged] | None, str]:
        """What this rank needs of a checkpoint, or what is damaged of it. Nothing of the run is changed by that."""
        try:
            saved = save.look(path)
            if save.data_of(saved, self.feed.samples.count)["digest"] != self.feed.samples.digest():
                raise UserError(f"the data is not what {path} learned from", "give the same --data, unchanged, or start a new run")
            return (saved, stage(save.Reader(saved), self.job, self.known)), ""
        except save.Damaged as error:
            return None, error.problem

    def take_up(self, saved: save.SavedCheckpoint, staged: Staged) -> None:
        """Weights, optimizer and place in the data as they were saved."""
        take(staged, self.job)
        self.feed.seek(saved.about["data"])
        self.step, self.last_saved = saved.step, None if self._source else saved
        self.loose = sorted(map(str, saved.about.get(save.NONFINITE) or ()))
        if self.saver is not None:
            self.saver.good.add(saved.path)

    def _take(self, saved: save.SavedCheckpoint, staged: Staged) -> None:
        self.take_up(saved, staged)
        self.bad_steps.load(saved.about.get(BAD_STEPS))
        if self.ranks.is_first:
            before = saved_mesh(saved)
            how = self._source + ("" if before == self.plan.mesh else f", saved on {before.world} ranks")
            self.screen.say(f"resumed after step {self.step}{how}")
            before_it = Schedule.from_json(saved.about.get("schedule"))
            for line in resumed(before_it, self.schedule, step=self.step, steps=self.settings.steps):
                self.screen.say(line)

    def all_steps(self, signals: Signals) -> RunOutcome:
        self.signals = signals
        since = self.step if self.step else None
        if self.last_saved is None and self.saver is not None:
            self.loose = sorted({name for names in self.control.gather(save.nonfinite(self.job)) for name in names})
        if self.ranks.is_first:
            more = log.adapters(self.settings.log, self.folder.path, self.settings.to_json(), last_step=since)
            self.log = log.RunLog(self.folder.path, more, last_step=self.step, tell=self.screen.say)
            self.log.write("resume" if since else "start", self.step, time=time.time(), command=self.command)
        try:
            stopped = self.take_steps()
            while self.bad is not None and bad.passed_over(self):
                stopped = self.take_steps()
            if self.bad is not None:
                bad.give_up(self)
            if not stopped:
                rounds.compare(self.job, self.control)
                self.evaluate()
            saved = self.save() if not self.settings.no_save else None
            self._look_at_disk(last=True)
            if self.overflows and self.ranks.is_first:
                self.screen.say(overflow_words(self.overflows))
            self.progress.at(END)
            measured = self.measured()
            asked = next(filter(None, self.control.gather(self.signals.asked)), "")
            if isinstance(saved, save.NotSaved):
                raise guard.RunFailed(f"the last checkpoint was not saved: {saved.why}", self.kept())
            held_out = self.tally.eval_loss
            if held_out is not None and not math.isfinite(held_out):
                raise guard.RunFailed(f"the held-out loss after step {self.step} is {held_out}", f"look at the held-out samples; {self.kept()}")
            asked = asked or growth.told(self)
        except (Exception, SystemExit) as error:
            if not isinstance(error, guard.RunFailed):
                if self.ranks.world == 1 or self.ranks.device.type == "cpu":
                    with contextlib.suppress(Exception):  # a device that is gone
                        self._note(self.clock.read(all=True))
                self.salvage(error)
            raise
        finally:
            if self.log is not None:
                self.log.close()
            if self.aside:
                gc.unfreeze()
        return RunOutcome(
            status=STOPPED if stopped else DONE, signal=asked, step=self.step, folder=self.folder.path,
            measurement=measured, saved=saved, compares=applies(self.plan, self.ranks),
        )  # fmt: skip

    def salvage(self, error: BaseException) -> None:
        """A step failed: what was trained before it is saved, where this rank can do that alone."""
        if self.ranks.world == 1 and self.saver is not None and not self.job.changing and self.origin and self.step > self.origin[0]:
            salvage.alone(self, error)

    @property
    def can_salvage(self) -> bool:
        return self.between is not None and not self.job.changing and self.origin is not None and self.step > self.origin[0]

    def kept(self) -> str:
        """Which checkpoint there is, in words."""
        kept = self.last_saved
        return f"the one of step {kept.step} is kept in {kept.path}" if kept else "make room and start again"

    # ------------------------------------------------------------ steps

    def take_steps(self) -> bool:
        """Steps until the last one, a signal or a bad number; whether a signal stopped them."""
        settings, first = self.settings, self.step
        if self.origin is None:
            self.origin = self.step, self.feed.first
            self.bad_steps.watch(self.job.skips, self.ranks.device)
        if self.ranks.world > 1 and self.saver is not None and self.ranks.device.type == "cpu" and self.job.moved is None and self.job.outer is None:
            self.between = save.Between.of(self.job)
        rounds.begin(self.job, self.control)
        self.growth = growth.GrowthWatch(self.job)
        if settings.mtbf is not None and self.next_save is None:
            self.next_save = first + FIRST_SAVE_STEPS
        batches = self._fetched() if self.step < settings.steps else []
        while self.step < settings.steps:
            for group in self.job.optimizer.param_groups:
                group["lr"] = self.schedule.at(self.step)
            self.seed(self.step)
            self.clock.begin()
            self._wait_for_copies(self.job.updates_early)
            loss = halve.gradients(self, batches)
            self.clock.middle()
            self._wait_for_copies()
            self.signals.phase = STEPS  # from here on there is something to save
            self.bad_steps.expect(self.step + 1, loss, self.job.skips)
            result = self.job.update(loss)
            self.step += 1
            rounds.join(self.job, self.step, self.log, last=self.step == settings.steps)
            self.progress.stepped(self.step)
            self.clock.end(self.step, result.loss, result.grad_norm, result.loss_scale)
            if self.step < settings.steps:
                batches = self._fetched()
            self.progress.at(LOGGING)
            self._note(self.clock.read())
            self._look_at_disk()
            self.slowed.step(self.tally.last_seconds, saving=self.saver is not None and self.saver.writing)
            self.tell_save()
            self._find_next_save()
            if self.step == first + 2:
                gc.collect()
                self.aside = self.aside or measure.set_aside()
                for saver in self._savers if settings.save_every or settings.mtbf else self._savers[1:]:
                    saver.warm(save.pieces(self.job), save.own_state(self.job))
            if self.step >= first + measure.SKIP_MOST:
                self.joules.mark(self.step)
            stop = self.control.should_stop(self.step, bool(self.signals.asked) or self.growth.changed(), self.tally.last_seconds)
            if stop or self.bad is not None:
                break
            self._due()
        self._note(self.clock.read(all=True))
        self.control.finish()
        return self.step < settings.steps and self.bad is None

    @property
    def began(self) -> bool:
        """Whether steps are under way."""
        return self.origin is not None

    def first_sample(self, step: int) -> int:
        """Number of the first sample that is used after so many updates."""
        assert self.origin is not None
        return self.origin[1] + (step - self.origin[0]) * self.feed.share.step

    def go_to(self, step: int, first: int) -> None:
        """After so many updates the run goes on with that sample."""
        self.step, self.origin = step, (step, first)
        self.feed.go_to(first)
        self.progress.stepped(step)
        self.clock.pause()
        self.joules.pause()

    def seed(self, step: int, data_rank: int | None = None) -> None:
        """What is drawn in a step; as another data rank would, where one is named."""
        rank = self.ranks.data_rank if data_rank is None else data_rank
        seed, device, exact = self.settings.seed, self.ranks.device, self.job.runner.exact
        seed_all(step_seed(seed, rank, step), device)
        if exact is not None:
            exact.seed = lambda number: seed_all(step_seed(seed, exact.leaf(rank, number), step), device)

    def _look_at_disk(self, *, last: bool = False) -> None:
        """Warn once if the disk is slower than the plan took it to be; at the end say how fast it was."""
        if self.job.moved is None or not self.ranks.is_first or self._told_disk:
            return
        if (said := log.disk_words(self.job.moved.store.shelf, self.plan.predicted, last=last)) is not None:
            self._told_disk = True
            self.screen.say(said)

    def _wait_for_copies(self, due: bool = True) -> None:
        """Weights may change once a save under way has copied them."""
        for saver in self._savers if due else ():
            self.progress.at(SAVE)
            saver.before_update()
        self.progress.at(STEP)

    def _fetched(self) -> list[Batch]:
        self.progress.at(DATA)
        began = time.perf_counter()
        batches = self.feed.next()
        self.tally.data_seconds.append(time.perf_counter() - began)
        return batches

    def _due(self) -> None:
        """Evaluation and checkpoint, where it is their turn."""
        evaluates = self.settings.eval_every and self.step % self.settings.eval_every == 0
        saves = self.settings.save_every and self.step % self.settings.save_every == 0
        saves = not self.settings.no_save and (saves or (self.next_save is not None and self.step >= self.next_save))
        remembers = self.memory is not None and not saves and self.memory.due(self.step)
        if self.step == self.settings.steps or not (evaluates or saves or remembers):
            return
        self._note(self.clock.read(all=True))
        if self.bad is not None:
            return
        if evaluates:
            self.evaluate()
        if saves:
            self.save(wait=False)
        if remembers and self.memory is not None:
            self.progress.at(SAVE)
            self.memory.save(self)
        self.clock.pause()
        self.joules.pause()

    def _note(self, readings: list[StepReading]) -> None:
        for reading in readings:
            if overflowed(reading):
                self.overflows += 1
            elif self.bad is None and self.bad_steps.judged(reading):
                self.bad = reading
            if self.bad is None or not self.bad_steps.allowed:
                self.tally.add(reading)
            if self.log is not None:
                self._tell(reading)
        rounds.refuse(self.job, self.bad)

    def _tell(self, reading: StepReading) -> None:
        """Write the step down and, now and then, show it."""
        assert self.log is not None
        now = time.monotonic()
        if now - self._asked_memory > MEMORY_SECONDS:
            self._memory, self._asked_memory = measure.memory(self.ranks.device), now
        share = measure.mfu(self.plan, reading.seconds, self.peak)
        self.log.write(
            "step", reading.step, loss=reading.loss, grad_norm=reading.grad_norm, loss_scale=reading.loss_scale,
            lr=self.schedule.at(reading.step - 1),
            seconds=reading.seconds, backward_seconds=reading.backward_seconds, update_seconds=reading.update_seconds,
            mfu=share, **self._memory,
        )  # fmt: skip
        predicted = self.plan.predicted.get("step_seconds") if applies(self.plan, self.ranks) else None
        if (slow := self.pace.look(self.tally, predicted)) is not None:
            launch.tell_launcher({launch.SLOWER: slow})
        if now - self._told < TELL_SECONDS and reading.step < self.settings.steps:
            return
        self._told = now
        if self.load.look():
            self._busy = bool(load.words(self.load.glance(), self._delay_share()))
        seconds = self.tally.recent_seconds() or reading.seconds
        peak = self._memory.get("allocated_bytes")
        text = log.line(
            reading, self.settings.steps, rate=self.per_step / seconds, unit=self.unit,
            mfu=measure.mfu(self.plan, seconds, self.peak),
            memory_bytes=peak if peak is not None else self._memory.get("host_bytes"),
            predicted_seconds=predicted, measured_seconds=seconds, busy=self._busy,
        )  # fmt: skip
        self.screen.step(text, reading.step)

    # ------------------------------------------------------------ evaluate, save, measure

    def evaluate(self) -> None:
        """Mean loss over held-out samples, the same ones every time."""
        if self.held is None:
            return
        self.progress.at(EVALUATION)
        began = time.perf_counter()
        share = self.held.share
        rounds = min(self.settings.eval_batches, max(1, (self.held.samples.count or share.step) // share.step))
        parts = (None,) if self.ranks.replica is None else range(self.ranks.replica.count)  # a hub has nobody who evaluates the others'
        losses = [float(self.job.evaluate(self.held.at(turn * share.step, part))) for turn in range(rounds) for part in parts]
        self.tally.eval_loss = sum(losses) / len(losses)
        self.tally.eval_seconds.append(time.perf_counter() - began)
        if self.log is not None:
            self.log.write("eval", self.step, loss=self.tally.eval_loss, seconds=self.tally.eval_seconds[-1])
            self.screen.say(f"step {self.step}: held-out loss {self.tally.eval_loss:.4f}")

    def tell_save(self) -> save.SavedCheckpoint | save.NotSaved | None:
        """How the last save went, as soon as that is known."""
        if self.memory is not None:
            self.memory.tell(self)
        done = self.saver.poll() if self.saver is not None else None
        if done is None:
            return None
        good = done.result if isinstance(done.result, save.SavedCheckpoint) else None
        why = done.result.why if isinstance(done.result, save.NotSaved) else None
        self.last_saved = good or self.last_saved
        if self.log is not None:
            self.log.write("save", done.result.step, seconds=done.seconds, stall_seconds=done.stall_seconds,
                           bytes=good.bytes if good else None, problem=why, **log.slowest_rank(done))  # fmt: skip
            if why is not None:
                self.screen.say(f"step {done.result.step}: the checkpoint was not saved: {why}; {self.kept()}")
            for line in self._save_words.of(done) if why is None else ():
                self.screen.say(f"step {done.result.step}: {line}")
        return done.result

    def _find_next_save(self) -> None:
        """Where it is to be found when to save: one step after a save all ranks know what it cost, and agree."""
        if self.settings.mtbf is None or self.saver is None or self.next_save is not None:
            return
        told = self.control.gather([self.saver.stall_seconds + self.slowed.seconds, self.tally.recent_seconds()])
        cost, step = (max(said) for said in zip(*told, strict=True))
        self.next_save = self.step + steps_between(cost, self.settings.mtbf, step, self.settings.steps)

    def save(self, *, wait: bool = True) -> save.SavedCheckpoint | save.NotSaved | None:
        """A checkpoint of this moment; one that fails is told and leaves the one before. Without `wait` it is written
        while the next steps run, and nothing is known of it yet."""
        assert self.saver is not None
        self.progress.at(SAVE)
        began = time.perf_counter()
        self.saver.wait()
        self.tell_save()
        if self.last_saved is not None and self.last_saved.step == self.step:
            return self.last_saved
        own, extra = save.own_state(self.job), save.extra(self.job)
        self.saver.begin(self.step, save.pieces(self.job), own, self.about(), extra=extra, wait=wait)
        seconds = time.perf_counter() - began
        self.tally.save_seconds.append(seconds)
        self.next_save = None
        return self.tell_save() if wait else None

    def about(self) -> dict[str, Any]:
        """What a checkpoint of this moment says besides its tensors."""
        return {
            "data": {**self.feed.state(self.first_sample(self.step)), "digest": self.feed.samples.digest()},
            "schedule": self.schedule.to_json(), "scaler": self.job.scaler.state() if self.job.scaler is not None else None,
            save.NONFINITE: self.loose, BAD_STEPS: self.bad_steps.state(), "plan": plans.to_json(self.plan), "versions": versions(),
            "base": self.job.base, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip

    def measured(self) -> Measurement | None:
        """Sum up and write it down."""
        peaks = {"rank": self.ranks.rank, **measure.memory(self.ranks.device), "joules_per_step": self.joules.per_step()}
        peaks["delayed"] = self._delay_share()
        self.joules.close()
        found = measure.summarise(
            self.tally, self.plan, self.ranks, unit=self.unit, per_step=self.per_step,
            by_rank=self.control.gather(peaks), command=self.command, versions=versions(),
            load=self.load.read() if self.ranks.is_first else None,
        )  # fmt: skip
        if found is not None and self.ranks.is_first:
            try:
                self.folder.write(MEASUREMENT, found.to_json())
            except OSError as error:
                self.screen.say(f"{self.folder.path / MEASUREMENT} cannot be written: {error.strerror or error}")
        return found

    def _delay_share(self) -> float:
        """Share of the time that this thread was ready to run and had no core."""
        return min(1.0, (delayed() - self._delayed) / max(1e-9, time.monotonic() - self.tally.since))
