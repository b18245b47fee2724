"""The step after the first, as the script takes it: what one step leaves to the next is there.

    end of the first step ── again: what comes before the next forward (EMA, zero_grad), a micro-batch ── again_next ── update_again
                             gradients die where the script lets go of them; its variables hold what they held

Where that step does not come (the script ends, raises, takes too long), the first one stands for it, and the answer says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from foretell.trace import types
from foretell.trace.record.recorder import RecordedOp, Recorder

AGAIN, AGAIN_NEXT, UPDATE_AGAIN = PROGRAMS = ("again", "again_next", "update_again")
BETWEEN = "between"
"""The phase of what is done before the next forward: part of the update, where numbers are read as anywhere else."""
LEAST_SECONDS = 20.0
"""That the way to the second step may take, or three times as long as the first one took."""


class Second:
    """What is known of the second step while the script takes it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.begun = self.done = False
        self.held = False
        """Whether gradients are there in a forward: they are zeroed late, or kept."""
        self.started = time.monotonic()
        self._until = 0.0
        self._cut: int | None = None
        self._until_row = 0
        self._gradients: dict[int, int] = {}
        """Parameter → storage of its gradient in the first step."""
        self._moved: dict[int, int] = {}

    def begin(self, model: nn.Module) -> None:
        self.begun = True
        now = time.monotonic()
        self._until = now + max(LEAST_SECONDS, 3 * (now - self.started))
        self._gradients = dict(self._of(model))

    def late(self) -> bool:
        return time.monotonic() > self._until

    def _of(self, model: nn.Module) -> Iterator[tuple[int, int]]:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                yield id(parameter), self.recorder.storage_id(parameter.grad)

    def zero_grad(self) -> RecordedOp:
        """What letting go of every gradient is, as an op of its own."""
        row = RecordedOp("foretell.begin", "", "update")
        row.frees = list(dict.fromkeys(self._gradients.values()))
        return row

    # ------------------------------------------------------------------ before the forward

    def without_gradients(self, module: nn.Module) -> bool:
        """A model that learns is called for its numbers: an evaluation, which is no part of a step. Whether it is the first such call."""
        rows = self.recorder._rows
        if rows is None or self._cut is not None or not any(one.requires_grad for one in module.parameters()):
            return False
        self._cut = len(rows)
        return True

    def returned(self) -> None:
        """An outermost call is over: what comes before the next one may be the next batch."""
        if self._cut is not None and self.recorder._rows is not None:
            self._until_row = len(self.recorder._rows)

    def forward(self, model: nn.Module) -> None:
        """The micro-batch begins: what was an evaluation goes, but for what it let go of."""
        rows, cut = self.recorder._rows, self._cut
        if rows is not None and cut is not None and cut > 0:
            gone, rows[cut : self._until_row] = rows[cut : self._until_row], []
            born = {number for row in gone for number in row.allocates}
            rows[cut - 1].frees += [number for row in gone for number in row.frees if number not in born]
            self.recorder._last = rows[-1]
        self._cut = None
        self.held = any(one.grad is not None for one in model.parameters())

    def backward(self, model: nn.Module) -> None:
        """Gradients of this step take the place of the first one's."""
        for parameter, number in self._of(model):
            before = self._gradients.get(parameter)
            if before is not None and before != number:
                self._moved[number] = before

    def keeps(self) -> bool:
        """Whether gradients stay where they are from step to step, and are zeroed there."""
        return self.done and self.held and not self._moved

    # ------------------------------------------------------------------ afterwards

    def finish(self) -> bool:
        """Give gradients one number in all steps, or forget a step that was not whole; whether it is there."""
        programs = self.recorder.programs
        if not self.done:
            for name in PROGRAMS:
                programs.pop(name, None)
            return False
        for name in PROGRAMS:
            for row in programs.get(name, ()):
                row.phase = "update" if row.phase == BETWEEN else row.phase
                row.inputs = tuple(ref._replace(storage=self._moved.get(ref.storage, ref.storage)) for ref in row.inputs)
                row.outputs = tuple(ref._replace(storage=self._moved.get(ref.storage, ref.storage)) for ref in row.outputs)
                row.allocates = [self._moved.get(number, number) for number in row.allocates]
                row.frees = [self._moved.get(number, number) for number in row.frees]
        return True


def scheduled(trace: types.Trace, accumulate: int) -> types.Trace:
    """Steady steps as the second one was."""
    steady: list[tuple[str, int]] = [(AGAIN, 1), (AGAIN_NEXT, accumulate - 1), (UPDATE_AGAIN, 1)]
    first = tuple(one for one in trace.schedule["first_step"] if one[0] != "zero_grad")
    run = tuple((name, times) for name, times in steady if times > 0 and name in trace.programs)
    return replace(trace, schedule={**trace.schedule, "first_step": first, "steady_step": run})


def plain(trace: types.Trace) -> types.Trace:
    """The first step only, whose gradients go when the update is over: what plans are made of."""
    if AGAIN not in trace.programs:
        return trace
    programs = {name: one for name, one in trace.programs.items() if name not in PROGRAMS}
    accumulate = _accumulate(trace.meta)
    micro = tuple((name, times) for name, times in (("micro_first", 1), ("micro_next", accumulate - 1)) if times > 0)
    runs = {f"{kind}_step": (*micro, (update, 1), ("zero_grad", 1)) for kind, update in (("first", "update_first"), ("steady", "update"))}
    return replace(trace, programs=programs, schedule={**trace.schedule, **runs})


def first_of(trace: types.Trace, recipe: Mapping[str, Any]) -> types.Trace:
    """A step of one micro-batch, which others are derived from, by the recipe that was asked for."""
    trace = plain(trace)
    programs = {name: one for name, one in trace.programs.items() if name != "micro_next"}
    runs = {name: tuple(one for one in run if one[0] != "micro_next") for name, run in trace.schedule.items()}
    return replace(trace, programs=programs, schedule=runs, meta={**trace.meta, "recipe": dict(recipe)})


def _accumulate(meta: Mapping[str, Any]) -> int:
    return int(meta["recipe"]["accumulate"])
