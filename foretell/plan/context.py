"""How the positions of a sample are shared by ranks: where that begins, what it costs, and what stands in the way.

The tensors of the batch from which the model takes its positions are split; everything computed from them is split
alike as long as each position is treated by itself. The model's code sees whole shapes throughout, so positions it
counts itself are those of the whole sample. Attention needs the keys and values of all positions: these are gathered.
A call inside the blocks that needs more than that is a reason to refuse. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from foretell.errors import UserError
from foretell.plan.tensor.derive import Exchange
from foretell.plan.tensor.exchange import GATHER, REDUCE, SCATTER
from foretell.plan.tensor.rules import base_name, decide, writes
from foretell.plan.tensor.types import Operand, Partial, Place, Refuse, Result, Setting, Shard, SliceKey, operands
from foretell.plan.tensor.weights import refs_of
from foretell.trace.flow.calls import Call, Flow, ValueRef
from foretell.units import DTYPE_BYTES

ATTENTION = "scaled_dot_product_attention"
ALONG = 1
"""Positions are the second dimension of what a batch holds, after the samples."""


@dataclass(frozen=True, kw_only=True)
class ContextSplit:
    """How a model's positions are shared."""

    ranks: int
    positions: int
    """Of one sample, all ranks together; the longest, where it has several sequences."""
    leaves: tuple[int, ...]
    """Which tensors of the batch are split, counted in its order."""
    attentions: int
    """Calls of attention that run on parts."""
    collectives: tuple[Exchange, ...] = ()
    gathered: Mapping[str, int] = field(default_factory=dict)
    """Where activations are needed whole outside the blocks, and how many bytes of them."""

    def report(self) -> tuple[str, ...]:
        """What is done, for people, one line each."""
        lines = [f"{self.positions} positions over {self.ranks} ranks, {self.positions // self.ranks} each"]
        lines.append(f"keys and values of {self.attentions} attentions are gathered, {self.bytes_gathered:,} bytes")
        lines += [f"whole on every rank: {where}, {size:,} bytes" for where, size in self.gathered.items()]
        return tuple(lines)

    @property
    def bytes_gathered(self) -> int:
        return sum(one.nbytes for one in self.collectives if one.kind == GATHER and one.phase == "forward")


def share(flow: Flow, ranks: int) -> ContextSplit:
    """Follow a flow whose positions are shared by so many ranks; raises a `UserError` that says why they cannot be."""
    leaves = _leaves(flow)
    if not leaves:
        raise UserError(
            "cp shares the positions of a sample, and no tensor of the batch is looked up or projected position by position",
            "use cp 1 and other axes of the mesh",
        )
    inputs = sorted(flow.inputs)
    for value in leaves:
        positions = flow.values[value].shape[ALONG]
        if positions % ranks:
            raise UserError(
                f"{positions} positions do not divide by cp {ranks}",
                f"use a sequence of {positions // ranks * ranks or ranks}, or another cp",
            )
    follow = _Follow(flow, Setting(ranks, sequence=False, context=True), leaves)
    follow.run()
    return ContextSplit(
        ranks=ranks, positions=max(flow.values[value].shape[ALONG] for value in leaves),
        leaves=tuple(inputs.index(value) for value in leaves), attentions=follow.attentions,
        collectives=tuple(follow.collectives), gathered=follow.gathered,
    )  # fmt: skip


def _leaves(flow: Flow) -> list[int]:
    """Tensors of the batch that a table or the first layer is given, position by position."""
    origin = {value: value for value in flow.inputs}
    found: dict[int, None] = {}
    for call in flow.calls:
        name, refs = base_name(call.name)[0], refs_of(call.args, call.kwargs)
        known = [value for value in refs if value not in flow.parameters]
        first = origin.get(refs[0]) if refs else None
        if name in ("embedding", "linear") and first is not None:
            shape = flow.values[first].shape
            if len(shape) == (2 if name == "embedding" else 3) and flow.values[refs[0]].shape[:2] == shape[:2]:
                found[first] = None
        elif len(refs) == 1 and known and first is not None:
            origin.update(dict.fromkeys(call.outputs, first))
    return list(found)


class _Follow:
    """One way through a flow."""

    def __init__(self, flow: Flow, setting: Setting, leaves: Iterable[int]) -> None:
        self.flow, self.setting = flow, setting
        self.places: dict[int, Place] = {value: Shard(ALONG, (flow.values[value].shape[ALONG],)) for value in leaves}
        self.collectives: list[Exchange] = []
        self.gathered: dict[str, int] = {}
        self.attentions = 0
        self._done: set[tuple[int, Any]] = set()

    def run(self) -> None:
        for call in self.flow.calls:
            self._call(call)
        last = self.flow.calls[-1].outputs[0]
        self._bring(self.flow.calls[-1], last, self.places.get(last), None)
        if not self.attentions:
            raise UserError(
                f"cp shares the positions of a sample, and no call of {ATTENTION} is given a part of them",
                f"write attention with torch.nn.functional.{ATTENTION}, or use cp 1",
            )

    def _call(self, call: Call) -> None:
        values = refs_of(call.args, call.kwargs)
        if not any(self.places.get(value) is not None for value in values):
            return
        slots: list[int] = []
        given = tuple(self._operand(value, slots) for value in call.args)
        named = {key: self._operand(value, slots) for key, value in call.kwargs.items()}
        found = list(operands(given, named))
        try:
            result = decide(call.name, given, named, self.setting)
        except Refuse as refusal:
            self._whole(call, found, slots, refusal)
            result = Result(None)
        name = base_name(call.name)[0]
        self.attentions += name == ATTENTION and result.special == "context_attention"
        for x in found:
            if x.slot not in result.unread:
                self._bring(call, slots[x.slot], x.place, result.want.get(x.slot))
        if result.special == "context_cross_entropy":
            size = DTYPE_BYTES[self.flow.values[call.outputs[0]].dtype]
            self._add(REDUCE, "forward", size, call)
            self._add(REDUCE, "backward", size, call)
        for output, place in zip(call.outputs, result.places(len(call.outputs)), strict=False):
            self.places[output] = place

    def _whole(self, call: Call, found: list[Operand], slots: list[int], refusal: Refuse) -> None:
        """A call that cannot run on parts: inside a block a reason to refuse, elsewhere a cost."""
        name, where = base_name(call.name)[0], call.module or "the model"
        split = [x for x in found if x.place is not None]
        if writes(call.name) and found[0].place is not None:
            raise UserError(
                f"{name} in {where} writes over a tensor of which every rank has a part: {refusal.reason}",
                "use cp 1, or write that part without changing tensors in place",
            )
        moving = [x for x in split if self.flow.values[slots[x.slot]].grad]
        if moving and any(part.isdigit() for part in call.module.split(".")):
            raise UserError(
                f"cp shares the positions of a sample, and {where} needs all of them: {refusal.reason} ({name})",
                "use cp 1 and other axes of the mesh",
            )
        size = sum(self._size(slots[x.slot]) for x in moving)
        if size:
            told = f"{name} in {where} ({refusal.reason})"
            self.gathered[told] = self.gathered.get(told, 0) + size

    def _bring(self, call: Call, value: int, have: Place, want: Place) -> None:
        if have is None or have == want or (value, want) in self._done:
            return
        self._done.add((value, want))
        size, grad = self._size(value), self.flow.values[value].grad
        if isinstance(have, Partial):
            forward, backward = (REDUCE, REDUCE) if want is None else (SCATTER, GATHER)
        else:
            forward, backward = GATHER, SCATTER
        self._add(forward, "forward", size, call)
        if grad:
            self._add(backward, "backward", size, call)

    def _add(self, kind: str, phase: str, size: int, call: Call) -> None:
        self.collectives.append(Exchange(kind=kind, phase=phase, nbytes=size, module=call.module))

    def _size(self, value: int) -> int:
        info = self.flow.values[value]
        return prod(info.shape) * DTYPE_BYTES[info.dtype]

    def _operand(self, value: Any, slots: list[int]) -> Any:
        if isinstance(value, ValueRef):
            info = self.flow.values[value.value]
            slots.append(value.value)
            return Operand(len(slots) - 1, info.shape, self.places.get(value.value), info.dtype == "bool")
        if isinstance(value, tuple) and not isinstance(value, SliceKey):
            return tuple(self._operand(item, slots) for item in value)
        return value
