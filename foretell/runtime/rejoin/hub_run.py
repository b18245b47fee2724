"""The process that joins replicas and keeps what lasts of the run: weights, outer momentum, how far each slot is, log and checkpoints.

It steps no model. It has one for the names of what it saves, and to evaluate the weights that a round begins from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from foretell.checkpoint.format import Damaged
from foretell.decode import json_of
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.parallel.sync.hub import MOST_TOLD, Hub, HubRound
from foretell.runtime.parallel.sync.peer import HubCut
from foretell.runtime.process.launch import tell_launcher
from foretell.runtime.process.signals import STEPS
from foretell.runtime.train import save
from foretell.runtime.train.folder import note_fault
from foretell.runtime.train.loop import FIRST_SAVE_STEPS, TrainingRun
from foretell.runtime.train.take import Staged

USED = "used"
"""In a checkpoint: steps of each slot that are in its weights."""
PORT, ROUND, ABSENT = "hub_port", "round", "absent"
"""Words to the supervisor: where replicas find the hub; a round has ended; who was left out, and has not been heard of since."""
LEAVE_SECONDS = 10.0
"""In which replicas are to hear that the run is over."""


class HubRun(TrainingRun):
    """In the place of a loop over steps: rounds of others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.plan.sync is not None and self.ranks.replica is not None
        self.count = self.ranks.replica.count
        self.used = [0] * self.count
        self._absent: set[int] = set()

    def take_up(self, saved: save.SavedCheckpoint, staged: Staged) -> None:
        """Weights, momentum, and how far each slot is."""
        super().take_up(saved, staged)
        self.used = used_of(saved, self.count)

    def about(self) -> dict[str, Any]:
        return {**super().about(), **about_of(self.plan, self.used)}

    def take_steps(self) -> bool:
        sync, outer, first = self.plan.sync, self.job.outer, self.step
        assert sync is not None and outer is not None and isinstance(outer.mean, HubCut)
        self.origin = self.step, self.feed.first
        if self.settings.mtbf is not None:
            self.next_save = first + FIRST_SAVE_STEPS
        hub = Hub(sync=sync, quorum=sync.quorum, grace_seconds=sync.grace, expected=self.count, steps=self.settings.steps)
        hub.take(outer.begin, outer.momentum, outer.mean.cut, step=self.step, used=dict(enumerate(self.used)))
        address = hub.start(closes=False)
        tell_launcher({PORT: address[1]})
        try:
            while not hub.over and not self.signals.asked:
                self._wait_for_copies()
                if (ended := hub.turn()) is not None:
                    hub.rounds[-1] = replace(ended, told={})  # it was told once, and is not needed any more
                    self._ended(ended)
                if hub.absent != self._absent:
                    self._absent = set(hub.absent)
                    tell_launcher({ABSENT: sorted(self._absent)})
            deadline = time.monotonic() + LEAVE_SECONDS
            while hub.over and not hub.empty and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            hub.close()
        self._show()
        if self.step == self.settings.steps:
            self._tell_behind()
        return self.step < self.settings.steps

    def _ended(self, ended: HubRound) -> None:
        """Written down, told, and evaluated or saved where it is their turn."""
        before, self.step = self.step, ended.step
        self.used = [ended.used.get(slot, 0) for slot in range(self.count)]
        self.signals.phase = STEPS  # from here on there is something to save
        self.progress.stepped(self.step)
        told = readings_of(ended.told[ended.replicas[0]], before)
        self._note(told)
        self.feed.first = self.first_sample(self.step)
        missing = [slot for slot in range(self.count) if slot not in ended.replicas]
        said = {
            "replicas": list(ended.replicas), "alive": len(ended.replicas), "joined": list(ended.joined),
            "left_out": list(ended.left_out), "missing": missing, "steps": ended.steps,
        }  # fmt: skip
        if self.log is not None:
            more = {"differed": ended.differed, "seconds": ended.seconds, "hash": f"{ended.hash & (2**64 - 1):016x}"}
            self.log.write("round", self.step, round=ended.number, **more, **said)
        if missing:
            again = [self._not_in(slot, ended.step - before) for slot in missing]
            note_fault(self.folder.path, "round", round=ended.number, step=self.step, **said, trained_next=again)
        tell_launcher({ROUND: ended.number, "step": self.step, **said})
        self.slowed.step(self.tally.last_seconds, saving=self.saver is not None and self.saver.writing)
        self.tell_save()
        self._find_next_save()
        if self.step < self.settings.steps:
            self._due_since(before)

    def _not_in(self, slot: int, steps: int) -> dict[str, Any]:
        """What a slot's replica does next: the steps that others have just had joined and it has not."""
        done = self.used[slot]
        return {"replica": slot, "own_steps": [done + 1, done + steps], "first_sample": self.first_sample(done)}

    def _tell_behind(self) -> None:
        """Steps that some slots never came to, since others went on without them."""
        behind = {slot: self.step - done for slot, done in enumerate(self.used) if done < self.step}
        if not behind:
            return
        note_fault(self.folder.path, "end", step=self.step, used=self.used, not_trained={str(slot): steps for slot, steps in behind.items()})
        which = ", ".join(f"the last {steps} steps of replica {slot}" for slot, steps in behind.items())
        self.screen.say(f"not trained on: the samples of {which}, for rounds that ended without it")

    def _due_since(self, before: int) -> None:
        """Evaluation and checkpoint, where a step since then was their turn."""
        settings = self.settings

        def came(every: int) -> bool:
            return every > 0 and self.step // every > before // every

        saves = not settings.no_save and (came(settings.save_every) or (self.next_save is not None and self.step >= self.next_save))
        if not came(settings.eval_every) and not saves:
            return
        self._show()
        if came(settings.eval_every):
            self.evaluate()
        if saves:
            self.save(wait=False)

    def _show(self) -> None:
        """Give the model the weights that the next round begins from."""
        assert self.job.outer is not None
        self.job.outer.take_over(self.job.outer.begin, self.job.outer.momentum)
        self.job.outer.began = self.step


def about_of(plan: Plan, used: list[int]) -> dict[str, Any]:
    """What a checkpoint of one process says of the replicas, which have none of their own."""
    return {USED: used, "plan": plans.to_json(plan.with_(mesh=Mesh()))}


def used_of(saved: save.SavedCheckpoint, count: int) -> list[int]:
    """How far each slot was; raises where a checkpoint is of another number of replicas."""
    found = saved.about.get(USED)
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= saved.step for one in found):
        raise Damaged(f"{saved.path} does not say which samples of each replica are in its weights", "use an older checkpoint")
    if len(found) != count:
        raise UserError(f"{saved.path} was saved by {len(found)} replicas that come and go, and the plan has {count}",
                        "resume with as many; some of them may be away: sync.quorum")  # fmt: skip
    return found


def readings_of(told: bytes, before: int) -> list[StepReading]:
    """What a replica said of its steps; one that says it otherwise is not believed, and nothing of its steps is written down."""
    names = {one.name for one in fields(StepReading)} - {"step", "loss_scale"}
    try:
        rows = json_of(told) if told else []
        good = [row for row in rows if _is_reading(row, names)]
        return [StepReading(step=before + place, **{name: row[name] for name in names}) for place, row in enumerate(good, 1)]
    except (ValueError, TypeError):
        return []


def _is_reading(row: Any, names: set[str]) -> bool:
    return isinstance(row, Mapping) and all(isinstance(row.get(name), int | float) or (name == "grad_norm" and row[name] is None) for name in names)


def said_of(readings: list[StepReading]) -> bytes:
    """The other way round; nothing of rounds that are too long to be told step by step."""
    found = json.dumps([{one.name: getattr(reading, one.name) for one in fields(reading)} for reading in readings]).encode()
    return found if len(found) <= MOST_TOLD else b""
