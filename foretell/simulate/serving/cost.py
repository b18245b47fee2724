"""Seconds and bytes of a server's steps, by the one path: lowered for a step's shape, priced, laid on streams, replayed.

A run has as many shapes as steps. Those that are asked for are therefore put together: what a step takes besides attention, by its
tokens and by the rows that sample, lies between few counts of either that are predicted whole; attention is priced for the step
itself, at contexts a twentieth apart.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.fsdp.sharded import COLLECTIVES
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
from foretell.lower.serving_ranks import sampled
from foretell.price.host import steady
from foretell.price.kernels.shapes import Shape
from foretell.price.machine import machine
from foretell.price.speeds import Options, Speeds, alone, profile_for
from foretell.price.time import Machine, op_prices
from foretell.simulate.parts import PlanCost
from foretell.simulate.plan import predict_step
from foretell.simulate.time.step import plan_time
from foretell.trace.recipe import Recipe
from foretell.trace.types import PARAMETER, Trace

COUNTS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
"""Of tokens, that steps are predicted whole for."""
APART = 1.05
"""Contexts between which attention is priced."""
PIECES: tuple[int, ...] = tuple(sorted({1, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 1024, 64), *range(1024, 16385, 512)}))
"""Tokens of a prompt, of which attention is priced."""
BESIDE = 12
"""Contexts on either side of one that are priced with it."""


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
    speeds: Speeds | None = None
    """Of another engine's rank, with its messages; None: this engine, alone."""
    step_of: Callable[[Trace, StepShape, int], Trace] = served_step
    kv_dtype: str = ""
    """Of keys and values in pages; empty: the model's own."""
    quick: bool = False
    """Steps besides attention from few of the model's blocks, where these are alike (lower.serving_ranks)."""
    memo: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    """Seconds of pieces with few blocks, of all that share it; by `kind` they are told apart."""
    kind: tuple[object, ...] = ()
    known: Machine = field(init=False)
    layers: Counter[Layer] = field(init=False)
    """Attention of a kind → how many layers have it."""
    pieces: list[tuple[float, Trace]] = field(default_factory=list)
    """Factor, and what stands for so many of the model's blocks."""
    _bases: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _besides: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _attention: dict[tuple[str, int], dict[int, tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = machine(self.cluster.device, profile_for(self.cluster, self.options.profile_of))
        if found is None:
            name = self.cluster.device.name
            raise UserError(f"nothing is known of the speed of {name}", "a device of `foretell hardware`, or foretell probe there")
        self.known, self.layers = found, Counter(layers_of_attention(self.trace))
        self.pieces = sampled(self.trace) if self.quick else [(1.0, self.trace)]

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

    def seconds(self, shape: StepShape, padded: tuple[int, int] | None = None) -> float:
        """Of a step, put together; `padded`: tokens and rows with logits that it computes, where these are more than it has."""
        device, host = self.besides(*(padded or (shape.tokens, max(1, shape.samples))))
        device += self.attended(shape)
        return device if self.graphs else max(device, host)

    # ------------------------------------------------------------------ besides attention

    def besides(self, tokens: int, rows: int) -> tuple[float, float]:
        """Device and host seconds of a step besides attention: of its tokens with one row, and of its rows beside these."""
        key = (tokens, rows)
        found = self._besides.get(key)
        if found is None:
            found = _line(COUNTS, tokens, lambda count: self._base(count, 1))
            if rows > 1:
                more = _line(COUNTS, rows, lambda count: self._rows(count))
                found = found[0] + more[0], found[1] + more[1]
            self._besides[key] = found
        return found

    def _rows(self, count: int) -> tuple[float, float]:
        one, all_of_them = self._base(count, 1), self._base(count, count)
        return all_of_them[0] - one[0], all_of_them[1] - one[1]

    def _base(self, tokens: int, rows: int) -> tuple[float, float]:
        if (tokens, rows) not in self._bases:
            shape = StepShape(tokens, tokens, (), rows)
            speeds = self.speeds or alone(self.known)
            device = -self.attended(shape)
            host = 0.0
            for number, (factor, piece) in enumerate(self.pieces):
                key = (*self.kind, number if len(self.pieces) > 1 else -len(self.layers), shape)
                if not self.kind or key not in self.memo:
                    self.memo[key] = self._timed(piece, shape, speeds)
                one, asked = self.memo[key]
                device, host = device + factor * one, host + factor * asked
            self._bases[tokens, rows] = (device, host)
        return self._bases[tokens, rows]

    def _timed(self, piece: Trace, shape: StepShape, speeds: Speeds) -> tuple[float, float]:
        """Device seconds with messages, as `whole` has them but without bytes; and the host's."""
        step = self.step_of(piece, shape, self.cached)
        if self.graphs and self.kind:  # nothing waits for the host: one op after another
            prices = op_prices(step, speeds.machine, speeds.reprice)
            ops = [op for name, _ in steady(step) for op in step.programs[name].ops]
            return sum(speeds.comm_time(op) if op.name in COLLECTIVES else prices[id(op)][1] for op in ops), 0.0
        time, _ = plan_time(step, speeds)
        return time.device_seconds + time.exposed_communication_seconds, time.host_seconds

    # ------------------------------------------------------------------ attention

    def attended(self, shape: StepShape) -> float:
        found = 0.0
        if shape.generating:
            found += self._near(PAGED, shape.generating, shape.attended / shape.generating)
        for start, count in shape.chunks:
            found += self._piece(count, start + count)
        return found

    def _piece(self, count: int, tokens: int) -> float:
        """Of a piece of a prompt: between the two sizes of pieces around it."""
        place = bisect.bisect_left(PIECES, count)
        if place < len(PIECES) and PIECES[place] == count:
            return self._near(FLASH, count, tokens)
        place = min(max(place, 1), len(PIECES) - 1)
        left, right = PIECES[place - 1], PIECES[place]
        low = self._near(FLASH, left, tokens)
        high = self._near(FLASH, right, max(tokens, right))
        return low + (high - low) * (count - left) / (right - left)

    def _near(self, name: str, count: int, tokens: float) -> float:
        """Attention of all layers, between the two contexts around one."""
        table = self._attention.get((name, count))
        if table is None:
            table = self._attention[name, count] = {}
        place = bisect.bisect_right(CONTEXTS, tokens) - 1
        found = table.get(place)
        if found is None:
            first = max(0, place - BESIDE) if name == FLASH else place
            contexts = CONTEXTS[first : place + (BESIDE if name == FLASH else 0) + 2]
            seconds = self._priced(name, count, contexts)
            for number, (low, high) in enumerate(pairwise(seconds)):
                table[first + number] = low, (high - low) / (contexts[number + 1] - contexts[number])
            found = table[place]
        return found[0] + found[1] * (tokens - CONTEXTS[place])

    def _priced(self, name: str, count: int, contexts: Sequence[int]) -> list[float]:
        """Of all layers, at each of some contexts: together, since kernels' laws are asked for many at once in the time of few."""
        around = self.known.in_step.get("compute" if name == FLASH else "memory", 1.0)
        found = [0.0] * len(contexts)
        for layer, many in self.layers.items():
            shapes = []
            for tokens in contexts:
                one = generating(layer, count, tokens, self.kv_dtype) if name == PAGED else prompting(layer, max(0, tokens - count), count)
                shapes.append(Shape(one.name, (one.query, one.key, one.value), (one.result,), one.attrs))
            seconds = self.known.ops.seconds(shapes)
            for number, shape in enumerate(shapes):
                found[number] += many * seconds[shape] * around
        return found


def _contexts() -> list[int]:
    found = [1]
    while found[-1] < 1e8:
        found.append(int(found[-1] * APART + 1))
    return found


CONTEXTS = _contexts()
"""Tokens that are attended to, of which attention is priced."""


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
