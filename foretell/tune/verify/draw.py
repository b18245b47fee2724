"""Drawing from a task: its inputs under new seeds, other weights, and what eager and the fp64 oracle answer to a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretell.errors import ModelError
from foretell.tune.verify import sides
from foretell.tune.verify.compare import EPSILON, Errors, errors, torch_of
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.process import KernelSetting, Lost, Raised
from foretell.tune.verify.sides import Answer, KernelCall, ModuleSide, State
from foretell.tune.verify.source import Code
from foretell.tune.verify.wire import RawTensor

PRIMES = (3, 7, 13, 31, 61, 127, 257, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521)
MOST_ELEMENTS = 1 << 22
"""Of all inputs of a variation together, unless the task's own are larger."""
FORMATS = ("float32", "bfloat16", "float16")
OWN, WEIGHTS, FRESH, SHAPE, FORMAT, STRIDE = "own", "weights", "fresh", "shape", "format", "stride"
GRADIENT, SUBSET, MAGNITUDE, SENSITIVITY = "gradient", "subset", "magnitude", "sensitivity"


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskCase:
    """A question and what is right."""

    kind: str
    question: KernelCall
    eager: Answer
    oracle: Answer
    room: tuple[Errors, ...] = ()
    """Of each output: what the rounding of the inputs alone explains."""
    about: Mapping[str, Any] = field(default_factory=dict)


class Drawer:
    """The reference, twice: as it is and in fp64."""

    def __init__(self, code: Code, setting: KernelSetting, seed: int) -> None:
        self.code, self.random = code, torch.Generator().manual_seed(seed)
        self._sides: list[ModuleSide] = []
        try:
            self.eager, self.oracle = (self._side(setting) for _ in range(2))
            self.arguments, self.own = self.inputs()
            self.made = self.eager.make(self.arguments, None, self.number())
        except (Raised, Lost) as error:
            self.end()
            raise ModelError(f"the reference in {code.path} does not run: {error}", "run the file by itself first") from None
        self.dtype = self._dtype()
        self._wide: dict[State, State] = {}

    def _side(self, setting: KernelSetting) -> ModuleSide:
        self._sides.append(ModuleSide(self.code, setting, watched=False))
        return self._sides[-1]

    def end(self) -> None:
        for side in self._sides:
            side.end()

    def number(self) -> int:
        return int(torch.randint(1 << 31, (), generator=self.random))

    def inputs(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of the constructor, and inputs as the task draws them under a new seed."""
        found = self.eager.process.ask("describe", {"seed": self.number()})
        left = iter(found.blobs)
        inputs = tuple(spec["value"] if "value" in spec else RawTensor.of(spec, next(left)) for spec in found.header["inputs"])
        return tuple(found.header["arguments"]), inputs

    def _dtype(self) -> str:
        formats = [one.dtype for one in (*self.own, *self.made.tensors.values()) if isinstance(one, RawTensor) and one.is_float]
        return formats[0] if formats else "float32"

    # --- answers ------------------------------------------------------------------------------------------------------

    def wide(self, question: KernelCall) -> KernelCall:
        state = self._wide.setdefault(question.state, sides.cast_state(question.state, "float64"))
        return sides.in_dtype(question, "float64", state)

    def answered(self, kind: str, question: KernelCall, *, room: bool = False, **about: Any) -> TaskCase | None:
        """None where the reference does not take it."""
        try:
            if question.wanted is not None:
                question = replace(question, cotangents=self._cotangents(question))
                if not question.cotangents:
                    return None
            eager, oracle = self.eager.call(question), self.oracle.call(self.wide(question))
            found = self._room(question, oracle) if room else ()
        except Raised as error:
            if error.lost:
                raise ModelError(f"the reference in {self.code.path} lost the device: {error}", "run the file by itself first") from None
            return None
        question = replace(question, freed=tuple(one.nbytes for one in eager.outputs if one is not None))
        return TaskCase(kind=kind, question=question, eager=eager, oracle=oracle, room=found, about=about)

    def _cotangents(self, question: KernelCall) -> tuple[RawTensor, ...]:
        plain = self.eager.call(replace(question, cotangents=()))
        return tuple(
            raw_of(torch.randn(one.shape, generator=self.random).to(getattr(torch, one.dtype)))
            for one, fact in zip(plain.outputs, plain.facts, strict=True) if one is not None and fact.get("grad")
        )  # fmt: skip

    def _room(self, question: KernelCall, oracle: Answer) -> tuple[Errors, ...]:
        """How far the oracle moves when the inputs move by their own rounding."""
        wide = self.wide(question)
        moved = tuple(
            raw_of(torch_of(one) * (1 + EPSILON[own.dtype] * self._signs(one.shape))) if isinstance(one, RawTensor) and one.is_float else one
            for one, own in zip(wide.inputs, question.inputs, strict=True)
        )  # fmt: skip
        found = self.oracle.call(replace(wide, inputs=moved))
        rows = []
        for a, b in zip(found.outputs, oracle.outputs, strict=True):
            if a is None or b is None or not a.is_float or a.shape != b.shape:
                rows.append(Errors(0.0, 0.0))
                continue
            left, right = torch_of(a), torch_of(b)
            rows.append(errors(left, right, left.isfinite() & right.isfinite()))
        return tuple(rows)

    def _signs(self, shape: Sequence[int]) -> Tensor:
        return torch.randint(0, 2, tuple(shape), generator=self.random).double() * 2 - 1

    # --- drawing --------------------------------------------------------------------------------------------------------

    def question(self, name: str, inputs: Sequence[Any], state: State, **more: Any) -> KernelCall:
        plain: dict[str, Any] = {"arguments": self.arguments, "dtype": None, "seed": self.number()}
        return KernelCall(name=name, inputs=tuple(inputs), state=state, **{**plain, **more})

    def redrawn(self, state: State) -> State:
        """Weights that are neither 0 nor 1: what is constant is spread, everything else is dealt anew."""
        return State({name: self._redrawn(raw, name in state.parameters) for name, raw in state.tensors.items()}, state.parameters)

    def _redrawn(self, raw: RawTensor, parameter: bool) -> RawTensor:
        if not raw.is_float or not raw.numel:
            return raw
        values = torch_of(raw).double()
        if float(values.std(correction=0)) > 0:
            return raw_of(self.dealt(torch_of(raw), raw.shape))
        level = float(values.flatten()[0])
        spread = torch.rand(raw.shape, generator=self.random, dtype=torch.float64)
        drawn = level * (0.5 + spread) if level else spread - 0.5 if parameter else 0.5 + spread
        return raw_of(drawn.to(getattr(torch, raw.dtype)))

    def dealt(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """As many of the values as the shape has places, drawn with repetition."""
        flat = values.reshape(-1)
        count = torch.Size(shape).numel()
        if not flat.numel() or not count:
            return flat.new_zeros(tuple(shape))
        return flat[torch.randint(flat.numel(), (count,), generator=self.random)].reshape(tuple(shape)).clone()
