"""A question put to a module, and what came back, on whichever side it runs: eager reference, fp64 oracle, candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretell.tune.verify.compare import torch_of
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.process import KernelProcess, KernelSetting, Lost, packed, unpacked
from foretell.tune.verify.source import Code
from foretell.tune.verify.wire import BYTES, RawTensor

GUARD = 256
"""Elements before and after a guarded tensor."""


@dataclass(frozen=True, eq=False)
class State:
    """Parameters and buffers of a module, by name and in order."""

    tensors: Mapping[str, RawTensor]
    parameters: frozenset[str]

    @property
    def mutable(self) -> bool:
        """Whether a call may change it."""
        return len(self.parameters) < len(self.tensors)


@dataclass(frozen=True)
class Wanted:
    """Gradients that are asked for: inputs by place, parameters by name."""

    inputs: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelCall:
    """One call."""

    name: str
    arguments: tuple[Any, ...]
    """Of the constructor."""
    dtype: str | None
    """The module is cast to; None leaves it as it is made."""
    state: State
    inputs: tuple[Any, ...]
    """`RawTensor`s and plain values."""
    wanted: Wanted | None = None
    cotangents: tuple[RawTensor, ...] = ()
    """None: a forward whose outputs have gradients, and no backward."""
    grad_mode: bool = False
    seed: int | None = None
    freed: tuple[int, ...] = ()
    """Bytes of blocks that are filled with a number and freed before the call: what is not written shows as it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one call gave."""

    outputs: tuple[RawTensor | None, ...]
    gradients: tuple[RawTensor | None, ...]
    after: tuple[bytes, ...]
    """Storages of the inputs after the call."""
    facts: Sequence[Mapping[str, Any]]
    late: Sequence[str | None]
    launches: Sequence[Mapping[str, Any]] = field(default=())


class ModuleSide:
    """A module of a file in a process of its own; it is made again only where another one is asked for."""

    def __init__(self, code: Code, setting: KernelSetting, *, watched: bool) -> None:
        self.process = KernelProcess(setting)
        self.code, self.calls = code, 0
        self._made: tuple[Any, ...] | None = None
        self._state: State | None = None
        limits = setting.limits
        try:
            self.process.ask("load", {"text": code.text, "name": code.name, "watched": watched}, seconds=limits.start_seconds)
        except BaseException:
            self.process.end()
            raise

    def make(self, arguments: Sequence[Any], dtype: str | None, seed: int = 0) -> State:
        """A new module, and its state as it was made."""
        self._made, self._state = (tuple(map(repr, arguments)), dtype), None
        content = {"class": self.code.kind, "arguments": list(arguments), "dtype": dtype, "seed": seed}
        found = self.process.ask("make", content, seconds=self.process.setting.limits.start_seconds)
        return state_of(found.header["state"], found.blobs)

    def forget(self) -> None:
        """The module was trained: the next question makes a new one."""
        self._made = self._state = None

    def state(self) -> State:
        found = self.process.ask("state")
        return state_of(found.header["state"], found.blobs)

    def settle(self, question: KernelCall) -> None:
        """The module that the question is about, with its state."""
        if self._made != (tuple(map(repr, question.arguments)), question.dtype):
            self.make(question.arguments, question.dtype)
        if self._state is not question.state or question.state.mutable:
            specs = [{**raw.header(), "name": name} for name, raw in question.state.tensors.items()]
            self.process.ask("set_state", {"state": specs}, [raw.data for raw in question.state.tensors.values()])
            self._state = question.state

    def call(self, question: KernelCall, what: str = "call", **how: Any) -> Answer:
        self.settle(question)
        content, blobs = content_of(question)
        self.calls += 1
        limits = self.process.setting.limits
        seconds = limits.seconds if what == "call" else limits.start_seconds  # kernels may be compiled
        found = self.process.ask(what, {**content, **how, "freed": list(question.freed)}, blobs, seconds)
        return answer_of(found.header, found.blobs)

    def ops(self, question: KernelCall) -> list[str]:
        self.settle(question)
        content, blobs = content_of(question)
        return [str(one) for one in self.process.ask("ops", content, blobs).header["ops"]]

    def graph(self, question: KernelCall) -> dict[str, Any]:
        """aten ops of a forward, with what goes in and out of each."""
        self.settle(question)
        content, blobs = content_of(question)
        return dict(self.process.ask("graph", content, blobs).header["graph"])

    def profile(self, question: KernelCall) -> list[dict[str, Any]]:
        """Kernels of a forward, or ops on a CPU, with the time that the kernel's own process says they take."""
        self.settle(question)
        content, blobs = content_of(question)
        return [dict(one) for one in self.process.ask("profile", content, blobs, self.process.setting.limits.start_seconds).header["profile"]]

    def again(self) -> list[tuple[RawTensor | None, ...]]:
        found = self.process.ask("again")
        return rows_of(found.header["calls"], found.blobs)

    def noted(self) -> dict[str, Any]:
        return self.process.ask("noted").header

    def end(self) -> None:
        self.process.end()

    def __enter__(self) -> ModuleSide:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def content_of(question: KernelCall) -> tuple[dict[str, Any], list[bytes]]:
    specs, blobs = packed(question.inputs)
    content: dict[str, Any] = {"inputs": specs, "seed": question.seed, "grad_mode": question.grad_mode}
    if question.wanted is not None:
        grads, more = packed(question.cotangents)
        wanted = {"inputs": list(question.wanted.inputs), "parameters": list(question.wanted.parameters)}
        content |= {"grad": wanted, "cotangents": grads, "backward": bool(question.cotangents)}
        blobs += more
    return content, blobs


def answer_of(header: Mapping[str, Any], blobs: Sequence[bytes]) -> Answer:
    if "raised" in header:
        return Answer(outputs=(), gradients=(), after=(), facts=(), late=(), launches=tuple(header["launches"]))
    try:
        outputs, gradients, count = header["outputs"], header["gradients"], int(header["inputs_after"])
        tensors = unpacked([*outputs, *gradients], blobs)
        after = tuple(blobs[len(blobs) - count :]) if count else ()
        facts = header["facts"]["outputs"]
        return Answer(
            outputs=tensors[: len(outputs)], gradients=tensors[len(outputs) :], after=after, facts=facts, late=header["late"],
            launches=tuple(header.get("launches", ())),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise Lost("protocol", f"an answer that lacks {error}") from None


def rows_of(rows: Sequence[Sequence[Mapping[str, Any] | None]], blobs: Sequence[bytes]) -> list[tuple[RawTensor | None, ...]]:
    flat = unpacked([one for row in rows for one in row], blobs)
    found, start = [], 0
    for row in rows:
        found.append(flat[start : start + len(row)])
        start += len(row)
    return found


def state_of(specs: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> State:
    tensors = unpacked(specs, blobs)
    named = {str(spec["name"]): raw for spec, raw in zip(specs, tensors, strict=True) if raw is not None}
    return State(named, frozenset(str(spec["name"]) for spec in specs if spec["parameter"]))


# ---------------------------------------------------------------- the same tensor in other ways


def cast(raw: RawTensor, dtype: str) -> RawTensor:
    """Floats in another format; anything else as it is."""
    return raw_of(torch_of(raw).to(getattr(torch, dtype))) if raw.is_float else raw


def cast_state(state: State, dtype: str) -> State:
    return State({name: cast(raw, dtype) for name, raw in state.tensors.items()}, state.parameters)


def in_dtype(question: KernelCall, dtype: str, state: State) -> KernelCall:
    """The question in another format throughout; `state` is its state in that one."""
    inputs = tuple(cast(one, dtype) if isinstance(one, RawTensor) else one for one in question.inputs)
    return replace(question, dtype=dtype, inputs=inputs, state=state, cotangents=tuple(cast(one, dtype) for one in question.cotangents))


def guarded(raw: RawTensor) -> RawTensor:
    """The same values with NaN, or the largest integers, before and after them in the storage."""
    width = BYTES[raw.dtype]
    one = torch.full((1,), float("nan"), dtype=getattr(torch, raw.dtype)) if raw.is_float else None
    pattern = one.view(torch.uint8).numpy().tobytes() if one is not None else b"\x7f" * width if raw.dtype != "bool" else b"\x01"
    band = pattern * GUARD
    return RawTensor(raw.dtype, raw.shape, raw.stride, raw.offset + GUARD, band + raw.data + band)


def in_guards(question: KernelCall) -> KernelCall:
    return replace(question, inputs=tuple(guarded(one) if isinstance(one, RawTensor) else one for one in question.inputs))
