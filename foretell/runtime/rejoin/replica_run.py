"""A replica that may come and go: rounds of its slot's own samples, from weights that it gets and checks.

Nothing of it lasts but what it gives at the end of a round. It begins with the moments of a new optimizer whenever it takes the weights of
others: when it comes, and when a round has ended without it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from torch import nn

from foretell.errors import UserError
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.parallel.sync.frames import Gone
from foretell.runtime.parallel.sync.outer import Outer
from foretell.runtime.parallel.sync.peer import HubMean, LeftBehind
from foretell.runtime.process import whose_error
from foretell.runtime.process.launch import tell_launcher
from foretell.runtime.process.signals import STEPS, Signals
from foretell.runtime.rejoin.hub_run import about_of, said_of
from foretell.runtime.train import folder as folders
from foretell.runtime.train import save
from foretell.runtime.train.loop import TrainingRun
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.outcome import DONE, STOPPED, RunOutcome
from foretell.runtime.train.rng import seed_all, step_seed

WHY = "why"
"""Word to the supervisor: what this replica fails of."""
SAVES = "SIGUSR2"
"""Sent to one replica where the hub is gone."""
WAIT_SECONDS = 15.0
"""For that signal."""


class ReplicaRun(TrainingRun):
    """In the place of a whole run: rounds, until the hub says that it is over."""

    def all_steps(self, signals: Signals) -> RunOutcome:
        self.signals = signals
        signals.check()
        signals.phase = STEPS
        outer = self.job.outer
        assert outer is not None and isinstance(outer.mean, HubMean)
        mean, saved = outer.mean, None
        try:
            self._refuse_statistics()
            self._rounds(outer, mean)
        except Gone:  # the hub closed, or was lost
            saved = self._left_alone(outer, mean)
            if not signals.asked:
                raise RunFailed("the process that joins replicas is gone", died=True) from None
        except Exception as error:
            tell_launcher({WHY: whose_error.words(error) if not isinstance(error, UserError) else error.problem})
            raise
        finally:
            mean.close()
        return RunOutcome(status=STOPPED if signals.asked else DONE, signal=signals.asked, step=mean.step, folder=self.folder.path,
                          measurement=None, saved=saved)  # fmt: skip

    def _refuse_statistics(self) -> None:
        for part in self.job.parts:
            for name, module in part.named_modules():
                if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                    raise UserError(f"{name} keeps statistics of its samples, and a replica that comes would not have them",
                                    "a plan without sync.quorum, or a norm without running statistics")  # fmt: skip

    def _rounds(self, outer: Outer, mean: HubMean) -> None:
        self._join(outer, mean)
        while mean.steps and not self.signals.asked:
            readings = self._steps(mean)
            if self.signals.asked:
                break
            mean.told = said_of(readings)
            try:
                outer.end_round(mean.step + mean.steps)
            except LeftBehind:
                self._join(outer, mean)
                continue
            outer.take_done()
            _check(outer, mean)
        if self.signals.asked == SAVES and not mean.hub_lives:
            raise Gone("the hub is gone")

    def _join(self, outer: Outer, mean: HubMean) -> None:
        """Take the weights of the others, and nothing else."""
        outer.take_over(*mean.join(outer.begin))
        self.job.optimizer.state.clear()
        self.clock.pause()
        _check(outer, mean)

    def _steps(self, mean: HubMean) -> list[StepReading]:
        """Of a round: the rate is that of the run's step, the samples are the next ones of this slot."""
        slot, first = self.ranks.data_rank, mean.used * self.feed.share.step
        if self.feed.first != first:
            self.feed.go_to(first)
        readings: list[StepReading] = []
        for place in range(mean.steps):
            step = mean.step + place
            batches = self.feed.next()
            for group in self.job.optimizer.param_groups:
                group["lr"] = self.schedule.at(step)
            seed_all(step_seed(self.settings.seed, slot, mean.used + place), self.ranks.device)
            self.clock.begin()
            loss = self.job.backward(batches)
            self.clock.middle()
            result = self.job.update(loss)
            self.clock.end(step + 1, result.loss, result.grad_norm, result.loss_scale)
            self.progress.stepped(step + 1)
            readings += self._finite(self.clock.read(all=place == mean.steps - 1))
            if self.signals.asked:
                break
        return readings

    def _finite(self, readings: list[StepReading]) -> list[StepReading]:
        for one in readings:
            if not math.isfinite(one.loss) or not math.isfinite(one.grad_norm or 0.0):
                what = "loss" if not math.isfinite(one.loss) else "gradient norm"
                told = f"the {what} of step {one.step} is not a number on replica {self.ranks.data_rank}"
                raise UserError(told, "look at its samples, or lower --lr")
        return readings

    # ------------------------------------------------------------ without a hub

    def _left_alone(self, outer: Outer, mean: HubMean) -> save.SavedCheckpoint | None:
        """Save what the round began from where this replica is asked to, by whoever has seen that the hub is gone."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.signals.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.signals.asked != SAVES or self.saver is None or not mean.everyone:
            return None
        self.everyone = mean.everyone
        lock = folders.claim(self.folder.path, resume=True, say=self.screen.say, lost=lambda _: None)
        try:
            outer.take_over(outer.begin, outer.momentum)
            for cut in mean.cuts.values():  # what rounding cut off here is not the hub's, which is lost
                cut.zero_()
            self.job.optimizer.state.clear()
            self.step, self.origin = mean.step, (0, 0)
            outer.began = self.step
            found = self.save()
        finally:
            lock.release()
        return found if isinstance(found, save.SavedCheckpoint) else None

    def about(self) -> dict[str, Any]:
        return {**super().about(), **about_of(self.plan, self.everyone)}


def _check(outer: Outer, mean: HubMean) -> None:
    """The weights that the next round begins from are those of all others, to the bit."""
    if outer.hash() != mean.hash:
        raise UserError("the weights after the round are not those of the others", "check the memory of this machine")
