"""One pass through a flow with given choices: places of all values, what they cost, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.plan.tensor.exchange import way
from foretell.plan.tensor.products import WEIGHTED
from foretell.plan.tensor.rules import base_name, decide, writes
from foretell.plan.tensor.types import (
    PARTIAL,
    Operand,
    Place,
    Refine,
    Refuse,
    Result,
    Setting,
    Shard,
    between,
    divided,
    edges,
    operands,
)
from foretell.plan.tensor.weights import collapsed, layer_use, lookup_tables, parameter_keys, refs_of
from foretell.trace.flow.calls import Call, Flow, FlowValue, SliceKey, ValueRef
from foretell.units import DTYPE_BYTES

Span = tuple[int, int] | None
"""Which part of a parameter's split dimension a value is made of: start and length; None where that is not known."""
Origins = Mapping[str, Span]
NO_TOKENS = "a table that every rank needs whole"


@dataclass
class Choices:
    """What is decided so far; changes from pass to pass."""

    starts: dict[str, Shard] = field(default_factory=dict)
    """Layers that begin a split region, and lookup tables."""
    follows: dict[str, Shard] = field(default_factory=dict)
    """Parameters that are split because what they meet is."""
    banned: dict[str, str] = field(default_factory=dict)
    """Parameter → why it stays whole."""
    wishes: dict[str, str] = field(default_factory=dict)
    """Parameter → why its split dimension was divided into segments, where a number did not divide."""
    rows: frozenset[str] = frozenset()
    """With `fixed`, matrices that may follow."""
    fixed: bool = False
    """No other starts than those that are there."""

    def places(self) -> dict[str, Shard]:
        return {**self.starts, **self.follows}

    def ban(self, key: str, reason: str) -> None:
        """Undo a choice, and those that were made after it and because of it."""
        if key in self.starts and not self.fixed:
            for later in list(self.starts)[list(self.starts).index(key) + 1 :]:
                del self.starts[later]
        self.starts.pop(key, None)
        self.follows.clear()
        self.banned.setdefault(key, reason)


@dataclass
class Leg:
    """What a pass that went through has found."""

    stream: set[int] = field(default_factory=set)
    """Dimensions along which activations between regions are split."""
    loss: bool = False
    exchanges: list[tuple[str, str, int, str]] = field(default_factory=list)
    """Kind, phase, bytes and module of every exchange between the ranks."""


class WritesOver(Exception):
    """A call writes over activations of which every rank has a part, and has no rule for it."""


class Again(Exception):
    """A choice has changed: follow the flow from the start."""


class Pass:
    def __init__(self, flow: Flow, setting: Setting, choices: Choices) -> None:
        self.flow, self.setting, self.choices = flow, setting, choices
        self.places: dict[int, Place] = {}
        self.origins: dict[int, Origins] = {}
        self.keys = parameter_keys(flow)
        self.seen: set[str] = set()
        self.made: dict[int, Call] = {}
        self.roots = {value: value for value in flow.parameters}
        self.data = set(flow.inputs)
        self.tables = lookup_tables(flow, self.keys)
        self.leg = Leg()
        self.ways: set[tuple[int, Place, bool]] = set()
        for value in flow.parameters:
            self._place_parameter(value)

    def _place_parameter(self, value: int) -> None:
        key = self.keys[value]
        place = self.choices.places().get(key)
        self.places[value] = place
        self.origins[value] = {key: (0, place.size)} if place else {}

    def run(self) -> Leg:
        for call in self.flow.calls:
            refs = list(refs_of(call.args, call.kwargs))
            if any(value in self.data for value in refs):
                self.data.update(call.outputs)
            if base_name(call.name)[0] in WEIGHTED and not self.choices.fixed:
                self._maybe_start(call)
            self.seen.update(self.keys[value] for value in refs if value in self.keys)
            self._follow(call, refs)
            for output in call.outputs:
                self.made[output] = call
            self._root(call, refs)
        return self.leg

    # ------------------------------------------------------------ one call

    def _follow(self, call: Call, refs: list[int]) -> None:
        if all(self.places.get(value) is None for value in refs):
            for output in call.outputs:
                self.places[output], self.origins[output] = None, {}
            return
        given, kwargs, slots = self._bound(call)
        found = list(operands(given, kwargs))
        try:
            result = decide(call.name, given, kwargs, self.setting)
            self._convert(call, result, found, slots)
        except Refuse as refusal:
            if not self._only_stream(found):
                self._undo(call, found, slots, refusal)
                raise Again from None
            if writes(call.name) and found[0].place is not None:
                where = f"{base_name(call.name)[0]} in {collapsed(call.module) or 'the model'}"
                raise WritesOver(f"{where} writes over them: {refusal.reason}") from None
            result = Result(None)
            self._convert(call, result, found, slots)
        self._outputs(call, result, found, slots)

    def _undo(self, call: Call, found: list[Operand], slots: list[int], refusal: Refuse) -> None:
        """Divide a layer into other segments where that may help, else undo a choice."""
        if isinstance(refusal, Refine) and self._refine(call, slots[refusal.slot], found[refusal.slot], refusal):
            return
        self._fail(call, found, slots, refusal)

    def _bound(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any], list[int]]:
        slots: list[int] = []
        given = tuple(self._operand(value, slots) for value in call.args)
        return given, {key: self._operand(value, slots) for key, value in call.kwargs.items()}, slots

    def _operand(self, value: Any, slots: list[int]) -> Any:
        if isinstance(value, ValueRef):
            slots.append(value.value)
            known = self.flow.values[value.value]
            return Operand(len(slots) - 1, known.shape, self.places.get(value.value), known.dtype == "bool")
        if isinstance(value, SliceKey):
            return value
        return tuple(self._operand(item, slots) for item in value) if isinstance(value, tuple) else value

    def _only_stream(self, found: list[Operand]) -> bool:
        return all(not isinstance(x.place, Shard) or x.place.stream for x in found)

    def _convert(self, call: Call, result: Result, found: list[Operand], slots: list[int]) -> None:
        """Check that every operand may be brought to where the rule wants it, and count what that costs."""
        shares = any(place is not None for place in result.places(1))
        for x in found:
            want = result.want.get(x.slot)
            value = slots[x.slot]
            if x.slot in result.unread:
                continue
            if x.place is None and isinstance(want, Shard) and not want.stream:
                self._split_whole(call, x, value, want)
            elif x.place != want and self._layered(x.place):
                raise Refuse(f"{base_name(call.name)[0]} needs it whole")
            elif x.place != want and self._layered(want):
                raise Refuse("meets activations that are not split like it")
            self._count(call, value, x.place, want, shares)
        self._count_special(call, result, [self.flow.values[slots[x.slot]] for x in found])

    def _count_special(self, call: Call, result: Result, found: list[FlowValue]) -> None:
        if result.special == "embedding":
            output = self.flow.values[call.outputs[0]]
            forward, backward = way(PARTIAL, result.places(1)[0], False)
            size = _elements(output.shape) * DTYPE_BYTES[output.dtype]
            self.leg.exchanges.append((forward, "forward", size, call.module))
            if backward:
                self.leg.exchanges.append((backward, "backward", size, call.module))
        elif result.special == "cross_entropy_classes":
            self.leg.loss = True
            size = _elements(found[1].shape) * max(4, DTYPE_BYTES[found[0].dtype])
            self.leg.exchanges.append(("all-reduce", "forward", size, call.module))
            self.leg.exchanges.append(("all-reduce", "forward", 2 * size, call.module))
        elif result.special == "cross_entropy_rows":
            self.leg.exchanges.append(("all-reduce", "forward", DTYPE_BYTES[found[0].dtype], call.module))

    def _layered(self, place: Place) -> bool:
        return isinstance(place, Shard) and not place.stream

    def _split_whole(self, call: Call, x: Operand, value: int, want: Shard) -> None:
        """A whole tensor meets a split one: a parameter follows, a constant is sliced, an activation must not be."""
        root = self.roots.get(value)
        if root is None:
            if value in self.data and self.flow.values[value].grad:
                raise Refuse("meets activations that are not split like it")
            return
        key = self.keys[root]
        allowed = not self.choices.fixed or key in self.choices.rows or len(x.shape) == 1
        if allowed and key not in self.choices.banned and key not in self.choices.places():
            divided(want.segments, self.setting.ranks)
            place = want if root == value else self._through(root, value, want)
            if place is not None:
                self.choices.follows[key] = place
                raise Again
        if len(x.shape) >= 2:
            raise Refuse(f"{key} is whole and cannot follow")

    def _count(self, call: Call, value: int, have: Place, want: Place, shares: bool) -> None:
        info = self.flow.values[value]
        if (value, want, shares) in self.ways:
            return
        self.ways.add((value, want, shares))
        forward, backward = way(have, want, shares)
        size = _elements(info.shape) * DTYPE_BYTES[info.dtype]
        if forward:
            self.leg.exchanges.append((forward, "forward", size, call.module))
        if backward and info.grad:
            self.leg.exchanges.append((backward, "backward", size, call.module))

    def _outputs(self, call: Call, result: Result, found: list[Operand], slots: list[int]) -> None:
        layered = [x for x in found if self._layered(x.place)]
        origins: dict[str, Span] = {}
        for x in layered:
            for key, span in self.origins.get(slots[x.slot], {}).items():
                origins[key] = span if origins.get(key, span) == span else None
        for index, (output, place) in enumerate(zip(call.outputs, result.places(len(call.outputs)), strict=False)):
            self.places[output] = place
            if isinstance(place, Shard) and place.stream and len(self.flow.values[output].shape) == 3:
                self.leg.stream.add(place.dim)
            self.origins[output] = origins if self._layered(place) else {}
            if result.along and result.spans and layered:
                start, length = result.spans[index if index < len(result.spans) else -1]
                self.origins[output] = {key: _within(span, start, length, layered[0]) for key, span in origins.items()}

    # ------------------------------------------------------------ choices

    def _maybe_start(self, call: Call) -> None:
        """A layer, fed by what is whole or of the stream, may begin a split region."""
        name = base_name(call.name)[0]
        for position, ref in enumerate(call.args):
            value = ref.value if isinstance(ref, ValueRef) else -1
            use = layer_use(name, position, len(self.flow.values[value].shape)) if value >= 0 else None
            root = self.roots.get(value)
            if use is None or root is None or self.places.get(value) is not None:
                continue
            key = self.keys[root]
            others = [v for v in refs_of(call.args, call.kwargs) if v != value and v not in self.keys]
            settled = key in self.choices.banned or key in self.choices.places()
            if settled or any(self._layered(self.places.get(v)) for v in others):
                continue
            if name == "embedding":
                self._start_table(key, root, others)
            else:
                self._start_layer(key, root, value, use.out)

    def _start_table(self, key: str, root: int, ids: list[int]) -> None:
        rows, columns = self.flow.values[root].shape
        if any(value in self.data for value in ids):
            if rows < columns and not self._tied(root):
                self.choices.banned[key] = NO_TOKENS
            elif rows % self.setting.ranks:
                self.choices.banned[key] = f"its {rows} rows do not divide by {self.setting.ranks}"
            else:
                self._start(key, Shard(0, (rows,)))
        elif columns % self.setting.ranks:
            self.choices.banned[key] = f"its {columns} columns do not divide by {self.setting.ranks}"
        else:
            self._start(key, Shard(1, (columns,)))

    def _tied(self, root: int) -> bool:
        uses = [call for call in self.flow.calls if root in refs_of(call.args, call.kwargs)]
        return any(base_name(call.name)[0] != "embedding" for call in uses)

    def _start_layer(self, key: str, root: int, value: int, dim: int) -> None:
        size = self.flow.values[value].shape[dim]
        if size % self.setting.ranks:
            self.choices.banned[key] = f"its {size} outputs do not divide by {self.setting.ranks}"
            return
        if root == value:
            self._start(key, Shard(dim, (size,)))
            return
        place = self._through(root, value, Shard(dim, (size,)))
        if place is None:
            self.choices.banned[key] = "it is used through views that have no rule"
        else:
            self._start(key, place)

    def _start(self, key: str, place: Shard) -> None:
        self.choices.starts[key] = place
        if key in self.seen:
            raise Again
        for value, other in self.keys.items():
            if other == key:
                self._place_parameter(value)
        for value, root in self.roots.items():
            if self.keys[root] == key and value != root:
                raise Again

    def _through(self, root: int, value: int, want: Shard) -> Shard | None:
        """Which split of a parameter makes a view of it split as wanted."""
        chain: list[Call] = []
        at = value
        while at != root:
            call = self.made[at]
            chain.insert(0, call)
            at = next(v for v in refs_of(call.args, call.kwargs) if self.roots.get(v) == root)
        shape = self.flow.values[root].shape
        for dim in range(len(shape)):
            if shape[dim] % self.setting.ranks:
                continue
            if shape[dim] == want.size and self._landing(chain, root, value, Shard(dim, want.segments)) == want:
                return Shard(dim, want.segments)
            found = self._landing(chain, root, value, Shard(dim, (shape[dim],)))
            if isinstance(found, Refine) and sum(found.segments) == shape[dim]:
                finer = Shard(dim, found.segments)
                if self._landing(chain, root, value, finer) == want:
                    return finer
        return None

    def _landing(self, chain: list[Call], root: int, value: int, place: Shard) -> Place | Refine:
        """How a view of a parameter lies if the parameter lies so."""
        places: dict[int, Place] = {root: place}
        before = self.places
        try:
            for call in chain:
                self.places = {**before, **places}
                given, kwargs, _ = self._bound(call)
                result = decide(call.name, given, kwargs, self.setting)
                places.update(zip(call.outputs, result.places(len(call.outputs)), strict=False))
        except Refine as wish:
            return wish
        except Refuse:
            return None
        finally:
            self.places = before
        return places[value]

    def _root(self, call: Call, refs: list[int]) -> None:
        """Values that are made of one parameter and of nothing else that is learned."""
        learned = [value for value in refs if value in self.roots or self.flow.values[value].grad]
        if len(learned) == 1 and learned[0] in self.roots and base_name(call.name)[0] not in WEIGHTED:
            for output in call.outputs:
                self.roots[output] = self.roots[learned[0]]

    # ------------------------------------------------------------ what cannot be

    def _refine(self, call: Call, value: int, x: Operand, wish: Refine) -> bool:
        """Divide the layers that a value comes from into the segments a call needs; whether that changed anything."""
        changed = False
        size = x.place.size if isinstance(x.place, Shard) else 0
        for key, span in self.origins.get(value, {}).items():
            place = self.choices.starts.get(key)
            if span is None or place is None or self.choices.fixed or size == 0:
                continue
            start, length = span
            if any(cut * length % size for cut in edges(wish.segments)):
                continue
            cuts = {start + cut * length // size for cut in edges(wish.segments)}
            segments = between([*edges(place.segments), *cuts])
            if segments != place.segments and all(segment % self.setting.ranks == 0 for segment in segments):
                self.choices.starts[key] = replace(place, segments=segments)
                if wish.number is not None:
                    self.choices.wishes.setdefault(key, self._told(call, wish))
                self.choices.follows.clear()
                changed = True
        return changed

    def _fail(self, call: Call, found: list[Operand], slots: list[int], refusal: Refuse) -> None:
        """Undo a choice that led here: one behind the operand without which the call works, else the earliest."""
        layered = [x for x in found if self._layered(x.place)]
        guilty = layered
        if len({frozenset(self.origins.get(slots[x.slot], {})) for x in layered}) > 1:
            for x in sorted(layered, key=lambda x: _elements(x.shape)):
                if self._works_without(call, x):
                    guilty = [x]
                    break
        keys = {key for x in guilty for key in self.origins.get(slots[x.slot], {})}
        if not keys:
            raise AssertionError(f"{call.name} in {call.module} fails and nothing led there: {refusal.reason}")
        key = next((key for key in self.choices.starts if key in keys), min(keys))
        told = self.choices.wishes.get(key) or self._told(call, refusal)
        self.choices.ban(key, NO_TOKENS if key in self.tables else told)

    def _works_without(self, call: Call, x: Operand) -> bool:
        given, kwargs, slots = self._bound(call)
        value = slots[x.slot]
        place, self.places[value] = self.places[value], None
        try:
            given, kwargs, slots = self._bound(call)
            result = decide(call.name, given, kwargs, self.setting)
            return all(
                not self._layered(y.place) or y.place == result.want.get(y.slot) for y in operands(given, kwargs)
            )
        except Refuse:
            return False
        finally:
            self.places[value] = place

    def _told(self, call: Call, refusal: Refuse) -> str:
        where = collapsed(call.module) or "the model"
        for path in (call.module, call.module.rpartition(".")[0]):
            for name, number in self.flow.numbers.get(path, {}).items():
                if refusal.number is not None and number == refusal.number:
                    return f"{number} heads do not divide by {self.setting.ranks} ({where}.{name})"
        parts = (
            f", of {'+'.join(map(str, refusal.segments))}"
            if isinstance(refusal, Refine) and refusal.number is None
            else ""
        )
        return f"{refusal.reason}{parts} ({base_name(call.name)[0]} in {where})"


def _within(span: Span, start: int, length: int, x: Operand) -> Span:
    """A piece of a span, given as a piece of the dimension that stands for it."""
    assert isinstance(x.place, Shard)
    if span is None or start * span[1] % x.place.size or length * span[1] % x.place.size:
        return None
    return span[0] + start * span[1] // x.place.size, length * span[1] // x.place.size


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
