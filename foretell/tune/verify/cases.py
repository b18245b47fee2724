"""Questions drawn from a task, with the answers of eager and of the fp64 oracle. The seeds are the parent's and leave it nowhere.

What a task's own inputs do not vary is varied: sizes (odd, one, none), formats, strides, magnitudes, weights, each input alone.
A variation that the reference itself refuses is not part of the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretell.errors import ModelError
from foretell.tune.verify import variations
from foretell.tune.verify.compare import torch_of
from foretell.tune.verify.draw import (
    FORMAT,
    FRESH,
    GRADIENT,
    MAGNITUDE,
    OWN,
    SENSITIVITY,
    SHAPE,
    STRIDE,
    SUBSET,
    WEIGHTS,
    Drawer,
    TaskCase,
)
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.inside.loops import rolled_raw
from foretell.tune.verify.process import KernelSetting, Lost, Raised, packed
from foretell.tune.verify.sides import KernelCall, State, Wanted, cast
from foretell.tune.verify.source import Code
from foretell.tune.verify.wire import RawTensor

MOST_SUBSETS = 6
LOOP_CALLS, LOOKED_AT = 8, 3
STEPS = 50


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopCases:
    """Ordinary calls one after the other, of which some are looked at after."""

    base: KernelCall
    rolls: tuple[int, ...]
    looked_at: Mapping[int, TaskCase]
    """Place → what is right there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """Losses of a small model around the reference."""

    question: KernelCall
    content: Mapping[str, Any]
    blobs: tuple[bytes, ...]
    eager: tuple[float, ...]
    oracle: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """Everything that is asked about a task."""

    task: str
    random: bool
    """The reference draws: no value can be compared."""
    by_kind: Mapping[str, tuple[TaskCase, ...]]
    ops: tuple[str, ...]
    threads: int
    """Of the reference's process after all that."""
    loop: LoopCases | None = None
    training: Training | None = None
    dull: str = ""
    """Why the task tells nothing, if so."""
    notes: tuple[str, ...] = ()

    def of(self, *kinds: str) -> Iterator[TaskCase]:
        for kind in kinds:
            yield from self.by_kind.get(kind, ())


def prepare(code: Code, setting: KernelSetting, *, seed: int, gradients: bool = True) -> Cases:
    """All cases of a task. Raises `ModelError` where the reference does not run."""
    drawer = Drawer(code, setting, seed)
    try:
        return _prepared(drawer, gradients)
    except Lost as error:
        raise ModelError(f"the reference in {code.path} gave no answer: {error}", "run the file by itself first") from None
    finally:
        drawer.end()


def _prepared(drawer: Drawer, gradients: bool) -> Cases:
    own = drawer.answered(OWN, drawer.question("the task's own inputs", drawer.own, drawer.made))
    if own is None:
        raise ModelError(f"the reference in {drawer.code.path} raises on its own inputs", "run the file by itself first")
    state = drawer.redrawn(drawer.made)
    found: dict[str, list[TaskCase | None]] = {OWN: [own]}
    found[WEIGHTS] = [drawer.answered(WEIGHTS, drawer.question("other weights", drawer.own, state))] if state.tensors else []
    fresh = [drawer.inputs()[1] for _ in range(3)]
    found[FRESH] = [drawer.answered(FRESH, drawer.question(f"fresh inputs {n}", one, state)) for n, one in enumerate(fresh, 1)]
    random = _draws(drawer, own.question)
    if not random:
        found[SHAPE] = list(variations.shapes(drawer, state))
        found[FORMAT] = list(variations.formats(drawer, state))
        found[STRIDE] = list(variations.strides(drawer, state))
        found[MAGNITUDE] = list(variations.magnitudes(drawer, state))
        found[SENSITIVITY] = list(variations.one_by_one(drawer, state))
    if gradients:
        found[GRADIENT], found[SUBSET] = _gradients(drawer, fresh[0], state)
    cases = {kind: tuple(one for one in some if one is not None) for kind, some in found.items()}
    dull = "" if random else dullness(cases)
    return Cases(
        task=drawer.code.name, random=random, by_kind=cases, dull=dull, ops=tuple(drawer.eager.ops(own.question)),
        loop=None if random else _loop(drawer, fresh[1], state), training=_training(drawer, state) if gradients and not random else None,
        threads=drawer.eager.process.threads(),
    )  # fmt: skip


def _loop(drawer: Drawer, inputs: Sequence[Any], state: State) -> LoopCases:
    rolls = tuple(1 + int(torch.randint(1 << 16, (), generator=drawer.random)) for _ in range(LOOP_CALLS))
    places = torch.randperm(LOOP_CALLS, generator=drawer.random)[:LOOKED_AT].tolist()
    base = drawer.question("an ordinary loop", inputs, state)
    found = {}
    for place in places:
        rolled = tuple(rolled_raw(one, rolls[place]) if isinstance(one, RawTensor) else one for one in inputs)
        case = drawer.answered("loop", drawer.question(f"call {place} of a loop", rolled, state))
        if case is not None:
            found[place] = case
    return LoopCases(base=base, rolls=rolls, looked_at=found)


def _training(drawer: Drawer, state: State) -> Training | None:
    """The same steps around eager and around the oracle; None where nothing can be learned."""
    batches = [drawer.inputs()[1] for _ in range(3)]
    question = drawer.question("training", batches[0], state)
    like = [one for one in drawer.eager.call(question).outputs if one is not None and one.is_float]
    targets = tuple(raw_of(torch.randn(one.shape, generator=drawer.random).to(getattr(torch, one.dtype))) for one in like)
    plain = {"steps": STEPS, "rate": 0.01, "seed": drawer.number()}
    try:
        sides_of = []
        for side, asked in ((drawer.eager, question), (drawer.oracle, drawer.wide(question))):
            side.settle(asked)
            content, blobs = training_of(batches, targets, plain, asked.dtype)
            header = side.process.ask("train", content, blobs).header
            sides_of.append(tuple(float.fromhex(one) for one in header["losses"]))
            side.forget()
    except Raised:
        return None
    content, blobs = training_of(batches, targets, plain, None)
    return Training(question=question, content=content, blobs=tuple(blobs), eager=sides_of[0], oracle=sides_of[1])


def training_of(
    batches: Sequence[Sequence[Any]], targets: Sequence[RawTensor], plain: Mapping[str, Any], dtype: str | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Batches and targets as a question, in another format where one is given."""
    def as_asked(one: Any) -> Any:
        return cast(one, dtype) if isinstance(one, RawTensor) and dtype is not None else one

    rows = [packed([as_asked(one) for one in batch]) for batch in (*batches, targets)]
    specs, blobs = [specs for specs, _ in rows], [blob for _, some in rows for blob in some]
    return {**plain, "batches": specs[:-1], "targets": specs[-1]}, blobs


def _draws(drawer: Drawer, question: KernelCall) -> bool:
    """Whether another seed gives another answer."""
    first, second = (drawer.eager.call(replace(question, seed=drawer.number())) for _ in range(2))
    return any(a is not None and b is not None and a.data != b.data for a, b in zip(first.outputs, second.outputs, strict=True))


def _gradients(drawer: Drawer, inputs: Sequence[Any], state: State) -> tuple[list[TaskCase | None], list[TaskCase | None]]:
    places = tuple(place for place, one in enumerate(inputs) if isinstance(one, RawTensor) and one.is_float)
    names = tuple(name for name, raw in state.tensors.items() if name in state.parameters and raw.is_float)
    whole = Wanted(places, names)
    if not places and not names:
        return [], []
    all_of = drawer.answered(GRADIENT, drawer.question("gradients", inputs, state, wanted=whole))
    if all_of is None or len(places) + len(names) == 1:
        return [all_of], []
    alone = [Wanted((place,), ()) for place in places] + [Wanted((), (name,)) for name in names]
    subsets = [
        drawer.answered(SUBSET, drawer.question(f"the gradient of {f'input {one.inputs[0]}' if one.inputs else one.parameters[0]} alone",
                                                inputs, state, wanted=one))
        for one in alone[:MOST_SUBSETS]
    ]  # fmt: skip
    return [all_of], subsets


def dullness(cases: Mapping[str, Sequence[TaskCase]]) -> str:
    """Why nothing can be learned of a kernel from this task: whatever goes in, the same comes out."""
    answers = [one.oracle.outputs for kind in (FRESH, MAGNITUDE, SENSITIVITY) for one in cases.get(kind, ())]
    if not answers or any(one is not None and not one.is_float for row in answers for one in row):
        return ""
    spread = max((_spread([row[place] for row in answers]) for place in range(len(answers[0]))), default=1.0)
    return f"whatever its inputs are, its output moves by {spread:.0e} of its size" if spread < 1e-6 else ""


def _spread(some: Sequence[RawTensor | None]) -> float:
    tensors = [torch_of(one).double().flatten() for one in some if one is not None and one.numel]
    tensors = [one[one.isfinite()] for one in tensors]
    values = torch.cat(tensors) if tensors else torch.zeros(0)
    if not values.numel():
        return 0.0
    same = {one.numel() for one in tensors}
    if len(same) == 1 and len(tensors) > 1:  # place by place: a constant vector is as dull as a constant
        values = torch.stack(tensors)
        return float((values - values[:1]).abs().max() / values.abs().max().clamp_min(1e-300))
    return float((values.max() - values.min()) / values.abs().max().clamp_min(1e-300))
