"""What the host spends on a step: Python, autograd and the dispatcher, op by op.

A small eager model waits for its host, so these seconds are the step. They are learned from reference steps that are
known to wait for the host (the small models of the zoo): a weighted sum of what the trace counts, all weights at
least zero, pulled towards plain starting values so that few references are enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from foretell.hardware.profile import OpRow
from foretell.price.kernels.features import FREE
from foretell.price.kernels.irregular import called, kind_of, matrices
from foretell.price.kernels.shapes import Shape, short, state_of
from foretell.trace.fold.merged import MERGED, about
from foretell.trace.inductor.blocks import ENTER, LEAVE
from foretell.trace.inductor.cuda_graphs import REPLAY, REPLAYED
from foretell.trace.types import NO_GRAD, Op, Storage, TensorSpec, Trace

COUNTS = (
    "call", "forward", "backward", "recompute", "update", "view", "backward_view", "module", "listed", "parameter", "program",
    "plain", "plain_view",
)  # fmt: skip
"""What is counted in a trace: seconds of the calls themselves; launches by phase; ops that launch nothing; modules
entered; tensors in lists; parameters; programs; launches, and ops that launch nothing, of which autograd keeps no record."""
START: Mapping[str, float] = {
    "call": 0.8, "forward": 12e-6, "backward": 9e-6, "recompute": 18e-6, "update": 8e-6, "view": 8e-6,
    "backward_view": 4e-6, "module": 30e-6, "listed": 0.5e-6, "parameter": 8e-6, "program": 100e-6,
    "plain": 6e-6, "plain_view": 4e-6,
}  # fmt: skip
"""Where learning starts from, in seconds each; `call` is a share of the measured call."""
BESIDE: Mapping[str, float] = {
    "call": 0.0, "forward": 3e-6, "backward": 3e-6, "recompute": 5e-6, "update": 1e-6, "view": 3e-6, "backward_view": 1.5e-6,
    "module": 8e-6, "listed": 0.3e-6, "parameter": 1e-6, "program": 30e-6, "plain": 1.5e-6, "plain_view": 2e-6,
}  # fmt: skip
"""The same where the host computes itself: a bare call is part of the op's own seconds there."""
PULL = 0.6
"""How strongly weights are held at their start; relative to one reference step."""
COMPILED: Mapping[str, float] = {"fused": 21e-6, "library": 11e-6, "graph": 150e-6, "piece": 0.5e-3}
"""Compiled code on a host of START's speed: launching a generated kernel, a library's (besides its call), entering a
graph of one block; guards, autograd and arguments around each piece of a compiled model, in forward and again in backward; from
compiled steps on an H200 that wait for their host, and carried over to other hosts by their speed."""
GRAPH: Mapping[str, float] = {"replay": 600e-6, "kernel": 1.5e-6}
"""Replaying a CUDA graph: the call, and each kernel in it; on a host of START's speed."""

WATCHED = 28e-6
"""Each op of a block that is recomputed selectively: PyTorch asks Python whether to keep its result, in forward and
again when it is recomputed; from eager plans on an H200, on a host of START's speed."""

AGAIN = 11e-6
"""Each op that is computed again without a compiler, besides: what it saves passes through hooks in Python; from eager
plans of nine models on an H200, whose blocks all took 32 to 42 us an op, on a host of START's speed."""

_ENTERING = ("forward", "recompute")
"""Phases in which Python enters modules."""
_PICKS = ("index", "_index_put")
RECURRENT = ("_cudnn_rnn", "_cudnn_rnn_backward")
MOST_TURNING = 0.2
"""Share of a step in recurrent launches up to which it says something of other ops."""
LEAST_A_MATRIX = 5e-6
"""Host seconds for each matrix below which all of them are asked for at once."""
MOST_TURNS = 60
"""A device's queue holds about a thousand launches: longer ones make the host wait."""


@dataclass(frozen=True)
class HostModel:
    """Seconds of the host for each op of a step."""

    weights: Mapping[str, float]
    calls: Mapping[str, float]
    """Op name → seconds of a bare call below autograd; "" for names never measured."""
    references: int = 0
    error: float = 0.0
    """Median relative error of the reference steps, each held out."""
    turns: Mapping[str, float] = field(default_factory=dict)
    """Recurrent op → seconds for each step of each layer besides, decomposition → for each matrix: it launches a kernel or
    more for each."""
    waits: Mapping[str, bool] = field(default_factory=dict)
    """Rare op → whether the host was seen to wait for it. What it then spends on the call is in the op's own seconds."""

    @property
    def slowness(self) -> float:
        """How this host compares with one of START's speed."""
        phases = ("forward", "backward", "view")
        return sum(self.weights[name] for name in phases) / sum(START[name] for name in phases)

    def issues(self, ops: Iterable[Op], *, compiled: bool = False, watched: Sequence[str] = ()) -> Iterator[float]:
        """Host seconds until each op is on its way; `compiled`: from inside a compiled graph, but for the update;
        `watched`: blocks that are recomputed selectively, without a compiler."""
        prefixes = tuple(f"{block}." for block in watched)
        where: str | None = None
        replaying = marked = False
        for op in ops:
            if op.name in (ENTER, LEAVE):
                marked = op.name == ENTER
                yield self.slowness * COMPILED["graph"] if marked else 0.0
                continue
            if op.name == REPLAY:
                replaying = True
                yield self.slowness * (GRAPH["replay"] + GRAPH["kernel"] * float(op.attrs[0]))
                continue
            if replaying:
                replaying = op.name != REPLAYED
                yield 0.0
                continue
            if op.name == MERGED:
                where = op.module if op.phase in _ENTERING else where
                yield about(op).host_seconds
                continue
            inside = marked or (compiled and op.phase != "update")
            entered = not inside and op.phase in _ENTERING and op.module != where
            if op.phase in _ENTERING:
                where = op.module
            seen = prefixes and op.phase == "forward" and f"{op.module}.".startswith(prefixes) and not _around(op)
            asked = 2 * self.slowness * WATCHED if seen else 0.0
            yield self.issue(op, compiled=inside) + (self.weights["module"] if entered else 0.0) + asked

    def issue(self, op: Op, *, compiled: bool = False) -> float:
        """Host seconds of the op itself; what entering its module takes is in `issues`."""
        name = self.name_of(op)
        if op.name.startswith(("foretell.begin", "foretell.model_end", "profiler.")):
            return 0.0
        if op.name == "foretell.fused":
            return self.slowness * COMPILED["fused"]
        if compiled:
            return 0.0 if name in FREE else self.call(name) + self.turning(op) + self.slowness * COMPILED["library"]
        again = self.slowness * AGAIN if op.phase == "recompute" else 0.0
        if name in FREE:
            return self.weights[_view(op)] + again
        listed = len(op.inputs) * self.weights["listed"] if name.startswith(("_foreach", "_fused")) else 0.0
        return self.weights["call"] * self.call(name) + self.weights[_phase(op)] + again + listed + self.turning(op)

    def turning(self, op: Op) -> float:
        """Seconds of a recurrent op's own launches, or of those of a decomposition of many matrices."""
        name = short(op.name)
        if name not in self.turns or self.waits.get(name):
            return 0.0
        inputs = tuple([ref.spec for ref in op.inputs])
        if name in RECURRENT:
            return self.turns[name] * turns_of(inputs, [ref.spec for ref in op.outputs])
        return self.turns[name] * (matrices(name, Shape(op.name, inputs, (), ())) - 1)

    def name_of(self, op: Op) -> str:
        """The name that calls are known by."""
        name = short(op.name)
        return called(name, Shape(op.name, tuple([ref.spec for ref in op.inputs]), (), ())) if name.startswith(_PICKS) else name

    def call(self, name: str) -> float:
        if self.waits.get(name):
            return 0.0
        name = name.partition(":")[0]
        return self.calls.get(name) or self.calls.get(name.removesuffix("_")) or self.calls.get("", 10e-6)

    def around(self, trace: Trace, programs: int) -> float:
        """Host seconds of a step that belong to no op: walking over parameters, entering autograd."""
        return parameters_of(trace) * self.weights["parameter"] + programs * self.weights["program"]

    def entering(self, trace: Trace, program: str) -> float:
        """Host seconds of going into and out of a compiled model, besides its ops: it is one piece more than it breaks in. A piece
        that is recorded is replayed in forward and in backward; the replays of the first are ops."""
        about = trace.meta.get("compiled") if wholly_compiled(trace) else trace.meta.get(ENTERED)
        if not isinstance(about, Mapping):
            return 0.0
        phases = {op.phase for op in trace.programs[program].ops}
        ways, broken = len(phases & {"forward", "backward"}), int(about.get("breaks", 0))
        return self.slowness * ways * (broken * GRAPH["replay"] if about.get("cuda_graphs") else (1 + broken) * COMPILED["piece"])

    def handing(self, op: Op) -> float:
        """Host seconds besides asking for an op that it does by itself: a number is handed to Python where nothing else is made."""
        return self.weights["plain_view"] if not op.outputs else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "weights": {name: float(f"{value:.4g}") for name, value in self.weights.items()},
            "calls": {name: float(f"{value:.3g}") for name, value in self.calls.items()},
            "references": self.references, "error": round(self.error, 4),
            "turns": {name: float(f"{value:.3g}") for name, value in self.turns.items()}, "waits": dict(self.waits),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostModel:
        known = data["weights"]
        older = {"recompute": known["forward"], "module": 0.0, "plain": known["forward"], "plain_view": known.get("view", START["view"])}
        weights = {name: data["weights"].get(name, older.get(name, START[name])) for name in COUNTS}
        return cls(weights, dict(data["calls"]), data["references"], data["error"], dict(data.get("turns", {})), dict(data.get("waits", {})))


def _around(op: Op) -> bool:
    """What FSDP2 does before and after a block, outside of what is recomputed."""
    return op.name.startswith("foretell.") and all(attr.startswith("axis:dp_") for attr in map(str, op.attrs) if attr.startswith("axis:"))


def _phase(op: Op) -> str:
    return op.phase if op.phase in ("backward", "recompute", "update") else "plain" if NO_GRAD in op.attrs else "forward"


def _view(op: Op) -> str:
    return "backward_view" if op.phase == "backward" else "plain_view" if NO_GRAD in op.attrs else "view"


def in_host_memory(storages: Mapping[int, Storage]) -> frozenset[int]:
    """Storages that are in host memory though the model is on a device: an optimizer's counts of steps."""
    return frozenset(number for number, storage in storages.items() if storage.host)


def beside_device(op: Op, here: Set[int]) -> bool:
    """Whether the host does an op by itself, on what is `here`: no stream runs it and nobody waits for the device."""
    refs = (*op.inputs, *op.outputs)
    return bool(refs) and all(ref.storage in here for ref in refs)


ENTERED = "entered"
"""What a trace of merged ops says of the compiled model they stand for, as `compiled` does of one that is compiled."""


def wholly_compiled(trace: Trace) -> bool:
    """Whether all but the update is compiled; compiled blocks are marked in the trace instead."""
    about = trace.meta.get("compiled")
    return isinstance(about, Mapping) and not about.get("blocks")


def watched_blocks(trace: Trace) -> tuple[str, ...]:
    """Blocks of an eager step that are recomputed selectively."""
    if "compiled" in trace.meta:
        return ()
    modes, recipe, blocks = (trace.meta.get(name) for name in ("residency", "recipe", "blocks"))
    if isinstance(modes, Mapping):
        return tuple(block for block, mode in modes.items() if mode == "selective")
    every = isinstance(recipe, Mapping) and recipe.get("recompute") == "selective"
    return tuple(blocks) if every and isinstance(blocks, (list, tuple)) else ()


def turns_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Steps × layers of a recurrent op (`_cudnn_rnn` and its backward): the state has layers, batch and width."""
    layers, batch, _ = state_of(inputs, outputs).shape
    return layers * max(1, math.prod(inputs[0].shape[:-1]) // batch)


def parameters_of(trace: Trace) -> int:
    return sum(1 for number in trace.resident if trace.storages[number].role == "parameter")


def counts(trace: Trace, calls: Mapping[str, float]) -> dict[str, float]:
    """What a steady step of this trace asks of the host."""
    model = HostModel(dict.fromkeys(COUNTS, 0.0), calls)
    found = dict.fromkeys(COUNTS, 0.0)
    for name, times in steady(trace):
        found["program"] += times
        where: str | None = None
        for op in trace.programs[name].ops:
            if op.phase in _ENTERING:
                found["module"] += times * (op.module != where)
                where = op.module
            if op.name.startswith(("foretell.begin", "foretell.model_end", "profiler.")):
                continue
            called = short(op.name)
            if called in FREE:
                found[_view(op)] += times
                continue
            found["call"] += times * model.call(called)
            found[_phase(op)] += times
            if called.startswith(("_foreach", "_fused")):
                found["listed"] += times * len(op.inputs)
    found["parameter"] = float(parameters_of(trace))
    return found


def steady(trace: Trace) -> Sequence[tuple[str, int]]:
    """The programs of a step in the middle of training, or of one inference."""
    return trace.schedule.get("steady_step") or trace.schedule["evaluation"]


def call_seconds(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    """(op name, host seconds of a bare call) → seconds per name: the quicker quarter, since noise only adds."""
    by_name: dict[str, list[float]] = {}
    for name, seconds in rows:
        if seconds:  # none: it waited, and what the call took is part of the op's own
            by_name.setdefault(short(name), []).append(seconds)
    found = {name: sorted(values)[len(values) // 4] for name, values in by_name.items() if name not in RECURRENT}
    middle = sorted(found.values())
    return {"": middle[len(middle) // 2] if middle else 10e-6, **found}


def waiting(rows: Iterable[OpRow]) -> dict[str, bool]:
    """Rare op → whether the host waited for a GPU in most of its rows: such a row has no seconds of the call alone."""
    by_name: dict[str, list[bool]] = {}
    for row in rows:
        shape = Shape(row.name, row.inputs, row.outputs, row.attrs)
        name = short(row.name)
        if kind_of(name, shape):
            by_name.setdefault(called(name, shape), []).append(not row.host_seconds)
    return {name: 2 * sum(seen) > len(seen) for name, seen in sorted(by_name.items())}


def turn_seconds(rows: Iterable[OpRow]) -> dict[str, float]:
    """Host seconds of one step of one layer, for each recurrent op: the quicker quarter of rows short enough that the
    host never waited for room in the device's queue."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        name = short(row.name)
        if name in RECURRENT and 0 < (turns := turns_of(row.inputs, row.outputs)) <= MOST_TURNS:
            by_name.setdefault(name, []).append(row.host_seconds / turns)
    return {name: sorted(values)[len(values) // 4] for name, values in by_name.items()}


def matrix_seconds(rows: Iterable[OpRow], calls: Mapping[str, float]) -> dict[str, float]:
    """Host seconds of one more matrix, for each decomposition that asks for kernels one by one: the middle of rows short
    enough that the host never waited for room in the device's queue."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        name = short(row.name)
        count = matrices(name, Shape(row.name, row.inputs, row.outputs, row.attrs))
        if row.host_seconds and count > 1:
            by_name.setdefault(name, []).append((row.host_seconds - calls.get(name, 0.0)) / (count - 1))
    middle = {name: sorted(values)[(len(values) - 1) // 2] for name, values in by_name.items()}
    return {name: value for name, value in middle.items() if value > LEAST_A_MATRIX}


def _turning(trace: Trace, model: HostModel) -> float:
    return sum(times * sum(model.turning(op) for op in trace.programs[name].ops) for name, times in steady(trace))


def _again(trace: Trace) -> float:
    """Seconds that are known to be spent on computing again, on a host of START's speed."""
    return AGAIN * sum(times * sum(op.phase == "recompute" for op in trace.programs[name].ops) for name, times in steady(trace))


def learn(
    references: Sequence[tuple[Trace, float]], calls: Mapping[str, float], turns: Mapping[str, float] | None = None,
    waits: Mapping[str, bool] | None = None,
) -> HostModel:
    """Weights from steps that wait for the host: (trace, measured seconds of a step)."""
    turns, waits = turns or {}, waits or {}
    start = HostModel(dict(START), calls, turns=turns, waits=waits)
    spent = [(trace, measured, _turning(trace, start)) for trace, measured in references]
    kept = [
        (counts(trace, calls), measured - own - _again(trace)) for trace, measured, own in spent if own < MOST_TURNING * measured
    ]
    if not kept:
        return start
    rows = [[found[name] for name in COUNTS] for found, _ in kept]
    seconds = [left for _, left in kept]
    weights = solve(rows, seconds)
    errors = []
    for held in range(len(rows)):
        rest = solve(rows[:held] + rows[held + 1 :], seconds[:held] + seconds[held + 1 :]) if len(rows) > 1 else weights
        errors.append(abs(sum(a * w for a, w in zip(rows[held], rest, strict=True)) / seconds[held] - 1))
    return HostModel(dict(zip(COUNTS, weights, strict=True)), calls, len(rows), sorted(errors)[len(errors) // 2], turns, waits)


def solve(
    rows: list[list[float]], seconds: list[float], whole: list[float] | None = None, begin: Mapping[str, float] = START
) -> list[float]:
    """Weights ≥ 0 of least error relative to `whole` (else to the seconds themselves), held near where they begin: coordinate
    descent on the normal equations."""
    import numpy as np

    start, size = np.array([begin[name] for name in COUNTS]), np.array(whole or seconds)
    a = np.array(rows) / size[:, None]
    scale = np.sqrt((a * a).mean(axis=0)) + 1e-12
    pull = PULL * scale * len(rows) ** 0.5
    square = a.T @ a + np.diag(pull**2)
    right = a.T @ (np.array(seconds) / size) + pull**2 * start
    weights = start.copy()
    for _ in range(400):
        for j in range(len(weights)):
            weights[j] = max(0.0, weights[j] + (right[j] - square[j] @ weights) / square[j, j])
    return [float(value) for value in weights]
