"""Seconds and bytes of a server's steps, by the one path: lowered for a step's shape, priced, laid on streams, replayed.

A run has as many shapes as steps. Those that are asked for are therefore put together: what a step takes besides attention, by its
tokens and by the rows that sample, lies between few counts of either that are predicted whole; attention is priced for the step
itself, at contexts a twentieth apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.serving import (
    FLASH,
    PAGED,
    Layer,
    StepShape,
    generating,
    kv_bytes,
    layers_of_attention,
    prompting,
    served_step,
)
from foretell.price.kernels.shapes import Shape
from foretell.price.machine import machine
from foretell.price.speeds import Options, alone, profile_for
from foretell.price.time import Machine
from foretell.simulate.parts import PlanCost
from foretell.simulate.plan import predict_step
from foretell.simulate.time.step import plan_time
from foretell.trace.recipe import Recipe
from foretell.trace.types import PARAMETER, Trace

COUNTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
"""Of tokens, that steps are predicted whole for."""
APART = 1.05
"""Contexts between which attention is priced."""


@dataclass
class StepCosts:
    """What steps of one model on one device take."""

    trace: Trace
    """Of an odd number of tokens (lower.serving)."""
    recipe: Recipe
    cluster: Cluster
    options: Options
    cached: int
    """Tokens that there are pages for."""
    graphs: bool = False
    """The host's launches are replayed: a step waits for the device alone."""
    known: Machine = field(init=False)
    layers: list[Layer] = field(init=False)
    _bases: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _attention: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _steps: dict[StepShape, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = machine(self.cluster.device, profile_for(self.cluster, self.options.profile_of))
        if found is None:
            name = self.cluster.device.name
            raise UserError(f"nothing is known of the speed of {name}", "a device of `foretell hardware`, or foretell probe there")
        self.known, self.layers = found, layers_of_attention(self.trace)

    @property
    def weights_bytes(self) -> int:
        return sum(one.nbytes for number in self.trace.resident if (one := self.trace.storages[number]).role == PARAMETER)

    @property
    def token_bytes(self) -> int:
        """Of keys and values, all layers."""
        return kv_bytes(self.trace)

    def whole(self, shape: StepShape) -> PlanCost:
        """A step predicted whole: bytes and seconds."""
        return predict_step(served_step(self.trace, shape, self.cached), self.recipe, self.cluster, self.options)

    def seconds(self, shape: StepShape) -> float:
        """Of a step, put together."""
        if shape not in self._steps:
            if len(self._steps) > 200_000:
                self._steps.clear()
            device, host = self._between(shape.tokens, max(1, shape.samples))
            device += self._attended(shape)
            self._steps[shape] = device if self.graphs else max(device, host)
        return self._steps[shape]

    # ------------------------------------------------------------------ besides attention

    def _between(self, tokens: int, rows: int) -> tuple[float, float]:
        """Device and host seconds of a step besides attention: of its tokens with one row, and of its rows beside these."""
        body = _line(COUNTS, tokens, lambda count: self._base(count, 1))
        if rows == 1:
            return body
        more = _line(COUNTS, rows, lambda count: self._rows(count))
        return body[0] + more[0], body[1] + more[1]

    def _rows(self, count: int) -> tuple[float, float]:
        one, all_of_them = self._base(count, 1), self._base(count, count)
        return all_of_them[0] - one[0], all_of_them[1] - one[1]

    def _base(self, tokens: int, rows: int) -> tuple[float, float]:
        if (tokens, rows) not in self._bases:
            shape = StepShape(tokens, tokens, (), rows)
            time, _ = plan_time(served_step(self.trace, shape, self.cached), alone(self.known))  # as `whole`, without bytes
            self._bases[tokens, rows] = (time.device_seconds - self._attended(shape), time.host_seconds)
        return self._bases[tokens, rows]

    # ------------------------------------------------------------------ attention

    def _attended(self, shape: StepShape) -> float:
        found = 0.0
        if shape.generating:
            found += self._near(PAGED, shape.generating, shape.attended / shape.generating)
        for start, count in shape.chunks:
            found += self._near(FLASH, count, start + count)
        return found

    def _near(self, name: str, count: int, tokens: float) -> float:
        """Attention of all layers, between the two contexts around one."""
        below = 1
        while below * APART + 1 <= tokens:
            below = int(below * APART + 1)
        above = int(below * APART + 1)
        low, high = self._priced(name, count, max(below, 1)), self._priced(name, count, above)
        return low + (high - low) * max(0.0, tokens - below) / (above - below)

    def _priced(self, name: str, count: int, tokens: int) -> float:
        key = (name, count, tokens)
        if key not in self._attention:
            specs = [generating(layer, count, tokens) if name == PAGED else prompting(layer, max(0, tokens - count), count) for layer in self.layers]
            shapes = [Shape(one.name, (one.query, one.key, one.value), (one.result,), one.attrs) for one in specs]
            seconds = self.known.ops.seconds(shapes)
            around = self.known.in_step.get("compute" if name == FLASH else "memory", 1.0)
            self._attention[key] = sum(seconds[one] for one in shapes) * around
        return self._attention[key]


def _line(counts: Sequence[int], at: int, known: Callable[[int], tuple[float, float]]) -> tuple[float, float]:
    """Between the two counts around one; beyond the last as between the last two."""
    place = bisect.bisect_left(counts, at)
    if place < len(counts) and counts[place] == at:
        return known(at)
    place = min(place, len(counts) - 1)
    left, right = counts[place - 1], counts[place]
    low, high = known(left), known(right)
    share = (at - left) / (right - left)
    return low[0] + (high[0] - low[0]) * share, low[1] + (high[1] - low[1]) * share
