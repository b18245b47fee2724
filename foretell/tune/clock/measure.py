"""Times by the parent's clock: the kernel's process only runs calls, and says when the device has done them.

    loop     so many calls, each with inputs of its own that no call had before; outputs are held until some were looked at
    time     of a loop, less that of an empty one, by its calls
    pair     candidate and baseline, each in its process, take turns; every loop has new rolls

What a process says of itself is not used, so that a replaced clock or wait changes nothing; a wait that does not wait shows in the
outputs, which come after it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foretell.tune.clock.baselines import Baseline
from foretell.tune.clock.statistics import ShapeResult, SpeedVerdict, judged, ratio, turns
from foretell.tune.verify.draw import Drawer
from foretell.tune.verify.harness import seed_of
from foretell.tune.verify.process import KernelSetting, Raised, packed
from foretell.tune.verify.sides import KernelCall, ModuleSide
from foretell.tune.verify.source import Code
from foretell.tune.verify.types import HarnessOptions
from foretell.tune.verify.wire import RawTensor

PAIRS = 30
L2_TIMES = 4
"""Inputs of a loop are larger than a GPU's second-level cache by this factor."""
EMPTY = 15
SMALLEST_LOOP, LARGEST_LOOP = 8, 256
MOST_BYTES = 8 << 30
LOOP_SECONDS = 2e-3
"""That a loop should take at least: a hundred times what asking for it does."""
EAGER, GRAPH = "eager", "graph"


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """How to measure."""

    pairs: int = PAIRS
    mode: str = EAGER
    """eager with the host's part, or graph: one call captured by the harness, replayed with new inputs."""
    backward: bool = False
    bandwidth: float = 0.0
    """Bytes a second of the device, for the floor; 0: no floor."""
    l2_bytes: int = 60 << 20


class Timed:
    """A module in its process, ready to be timed."""

    def __init__(self, code: Code, setting: KernelSetting, question: KernelCall, timing: TimingOptions, compiled: str | None = None) -> None:
        self.side = ModuleSide(code, setting, watched=False)
        self.timing, self.compiled = timing, compiled
        self.side.settle(question)
        self._content, self._blobs = packed(question.inputs)
        self._given = False
        self.empty = 0.0

    def loop(self, calls: int) -> float:
        """Seconds of a call of a loop of so many, all of them with new inputs."""
        limits = self.side.process.setting.limits
        asked: dict[str, Any] = {
            "rolls": [1 + secrets.randbelow(1 << 20) for _ in range(calls)], "mode": self.timing.mode, "backward": self.timing.backward,
            "compiled": self.compiled,
        }  # fmt: skip
        asked["inputs"] = [] if self._given else self._content
        self.side.process.ask("loop", asked, () if self._given else self._blobs, seconds=limits.start_seconds)
        self._given = True
        self.side.process.ask("go", seconds=limits.start_seconds)
        return self.side.process.seconds if not calls else max(1e-9, (self.side.process.seconds - self.empty) / calls)

    def warm(self, calls: int) -> None:
        """Compile, and learn what an empty loop takes."""
        for _ in range(2):
            self.loop(calls)
        self.empty = median(self.loop(0) for _ in range(EMPTY))
        self.loop(calls)

    def end(self) -> None:
        self.side.end()


def calls_of(question: KernelCall, timing: TimingOptions, seconds: float = 0.0) -> int:
    """Of a loop: so many that their inputs are beyond the cache, that it takes long enough, and that memory holds them."""
    size = max(1, sum(one.nbytes for one in question.inputs if isinstance(one, RawTensor)))
    beyond = -(-L2_TIMES * timing.l2_bytes // size)
    long = int(LOOP_SECONDS / seconds) + 1 if seconds else SMALLEST_LOOP
    return max(2, min(LARGEST_LOOP, max(SMALLEST_LOOP, beyond, long), MOST_BYTES // (4 * size)))


def paired(a: Timed, b: Timed, calls: int, pairs: int) -> tuple[list[float], list[float]]:
    """Times of both, in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for second in turns(pairs):
        found[second].append((b if second else a).loop(calls))
    return found


def shape_result(
    name: str, candidate: Code, baselines: Sequence[Baseline], question: KernelCall, setting: KernelSetting, timing: TimingOptions, *,
    output_bytes: int, doing: Callable[[str], None] = lambda _: None,
) -> ShapeResult:  # fmt: skip
    """The candidate beside each baseline on one shape; the best of them is measured again with the candidate in a clean process."""
    times, ratios, mine = {}, {}, []
    for one in baselines:
        doing(f"{name}: beside {one.name}")
        try:
            left, right = _measured(candidate, one, question, setting, timing)
        except Raised:
            continue  # a baseline that does not run here is none
        times[one.name], ratios[one.name] = median(left), ratio(left, right)
        mine += right
    best = min(ratios, key=lambda known: ratios[known].speedup)
    again = next(one for one in baselines if one.name == best)
    doing(f"{name}: beside {best} again, in clean processes")
    left, right = _measured(candidate, again, question, setting, timing)
    second = ratio(left, right)
    if second.low < ratios[best].low:
        ratios[best] = second
    return ShapeResult(
        name=name, floor_seconds=floor(question, output_bytes, timing), candidate_seconds=median(mine + right), baselines=times, ratios=ratios
    )


def _measured(candidate: Code, one: Baseline, question: KernelCall, setting: KernelSetting, timing: TimingOptions) -> tuple[list[float], list[float]]:
    known = Timed(one.code, setting, question, timing, one.compiled)
    try:
        mine = Timed(candidate, setting, question, timing)
        try:
            calls = calls_of(question, timing)
            known.warm(calls)
            mine.warm(calls)
            calls = calls_of(question, timing, min(known.loop(calls), mine.loop(calls)))
            known.warm(calls)
            mine.warm(calls)
            return paired(known, mine, calls, timing.pairs)
        finally:
            mine.end()
    finally:
        known.end()


def own_question(reference: Code, setting: KernelSetting, asked: HarnessOptions) -> tuple[KernelCall, int]:
    """The task's own inputs with weights drawn anew, and the bytes of its outputs."""
    drawer = Drawer(reference, setting, seed_of(asked))
    try:
        question = drawer.question("timed", drawer.inputs()[1], drawer.redrawn(drawer.made))
        answer = drawer.eager.call(question)
        return question, sum(one.nbytes for one in answer.outputs if one is not None)
    finally:
        drawer.end()


def floor(question: KernelCall, output_bytes: int, timing: TimingOptions) -> float:
    """Seconds to read the floating inputs and write the outputs once; with a backward their gradients too."""
    if not timing.bandwidth:
        return 0.0
    size = sum(one.nbytes for one in question.inputs if isinstance(one, RawTensor) and one.is_float) + output_bytes
    return (2 if timing.backward else 1) * size / timing.bandwidth


def speed(
    candidate: Code, baselines: Sequence[Baseline], questions: Mapping[str, tuple[KernelCall, int]], setting: KernelSetting, timing: TimingOptions, *,
    doing: Callable[[str], None] = lambda _: None,
) -> SpeedVerdict:  # fmt: skip
    """On every shape (name → question, bytes of its outputs), and what the worst of them says."""
    rows = [
        shape_result(name, candidate, baselines, replace(question, wanted=None), setting, timing, output_bytes=size, doing=doing)
        for name, (question, size) in questions.items()
    ]
    return judged(rows)
