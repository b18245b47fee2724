"""One rank's share of a server's step: of tensor parallelism, and of a pipeline's stages. From the trace of the whole model, by rule.

    tensor   a product that is fed whole rows computes its share of columns, what follows is split alike up to the product that is fed
             split rows: that one's results are summed by all ranks, two sums a layer in a usual decoder
             attention: heads; a rank holds at least one head of keys and values, so more ranks than these hold copies
             table and output layer: words; logits are gathered
    stages   blocks in turn, with what every block reads beside its input (rotary angles) computed by each stage

What cannot be split (a norm over what would be, a router) stays whole, and with it the products that lead there. Traces of odd counts
(`lower.serving`) go in and come out: tokens are told apart from heads and sizes by their count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from foretell.errors import UserError
from foretell.lower.serving import ATTEND, ROWS
from foretell.trace.types import INPUT, PARAMETER, TEMPORARY, Op, Program, Ref, Storage, TensorSpec, Trace

Shape = tuple[int, ...]
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "_grouped_mm": 0}
"""Product → where its rows are among its inputs; the weight comes next."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten"})
_PIECES = frozenset({"split", "split_with_sizes", "slice", "chunk"})
_ALONG = frozenset({"native_layer_norm", "_fused_rms_norm", "_softmax", "topk", "sort", "cumsum", "argmax"})
"""Ops over the whole last dimension that leave its size as it is."""
_LINEAR = frozenset({"mul", "masked_fill", "index", "sum", "clone", "index_put_", *_VIEWS, "transpose"})
"""What may be done to results before ranks sum them up: with factors and rows that all ranks know."""


class RankPart(NamedTuple):
    """The dimension of a tensor that ranks share, and a rank's size of it."""

    dim: int
    size: int
    source: str
    """The product that began it, numbers as `*`."""


class _Stays(Exception):
    """A product must stay whole, or be shared by fewer ranks."""

    def __init__(self, source: str, ranks: int = 1) -> None:
        self.source, self.ranks = source, ranks


def tensor_share(trace: Trace, ranks: int) -> Trace:
    """What one of the ranks computes, holds and sends."""
    if ranks == 1:
        return trace
    shared: dict[str, int] = {}
    for _ in range(200):
        try:
            return _Sharer(trace, ranks, shared).run()
        except _Stays as found:
            shared[found.source] = found.ranks
    raise UserError(f"no way to split this model over tp {ranks} was found", "use tp 1, with more replicas or pp")


def heads(trace: Trace) -> tuple[int, int]:
    """Of queries, and of keys and values: the fewest of any layer."""
    found = [(op.inputs[0].spec.shape[1], op.inputs[1].spec.shape[1]) for op in trace.ops() if op.name == ATTEND]
    return min(one for one, _ in found), min(one for _, one in found)


def refusal(trace: Trace, ranks: int) -> UserError | None:
    """Why a model's heads cannot be dealt to so many ranks; None where they can."""
    asks, kept = heads(trace)
    if asks % ranks:
        ways = [number for number in range(1, asks + 1) if asks % number == 0]
        return UserError(f"tp {ranks} does not divide {asks} attention heads", f"tp {', '.join(map(str, ways[:6]))}")
    if kept % ranks and ranks % kept:
        return UserError(f"tp {ranks} neither divides {kept} heads of keys and values nor is a multiple of them", f"tp {math.gcd(ranks, kept)}")
    return None


def short(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@dataclass
class _Sharer:
    """Goes through a step once to see what is split, and writes it down."""

    trace: Trace
    ranks: int
    shared: dict[str, int]
    """Products among fewer ranks than all: 1 stays whole."""
    parts: dict[tuple[int, Shape], RankPart] = field(default_factory=dict)
    weights: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Parameter → dimension as it is stored, and a rank's size of it."""
    turned: set[int] = field(default_factory=set)
    partial: dict[int, Op] = field(default_factory=dict)
    """Storages whose numbers ranks still have to sum up."""
    sums: dict[int, list[Ref]] = field(default_factory=dict)
    """Op → what must be summed up before it."""
    gathers: dict[int, tuple[Ref, Ref]] = field(default_factory=dict)
    """The output layer → all logits, and a rank's."""
    stored: dict[int, Shape] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    """Parameters."""
    words: int = -1
    more: int = 0

    def __post_init__(self) -> None:
        self.fixed = {number for number, one in self.trace.storages.items() if one.role == PARAMETER}

    def run(self) -> Trace:
        refused = refusal(self.trace, self.ranks)
        if refused is not None:
            raise refused
        self.words = min((n for n in self.trace.resident if self.trace.storages[n].role == INPUT), default=-1)
        for op in self.trace.ops():
            self._see(op)
        return self._written()

    # ------------------------------------------------------------------ what is split

    def _part(self, ref: Ref) -> RankPart | None:
        return self.parts.get((ref.storage, ref.spec.shape))

    def _see(self, op: Op) -> None:
        name = short(op.name)
        for ref in op.inputs:
            if ref.storage in self.partial and name not in _LINEAR:
                self.sums.setdefault(id(op), []).append(ref)
                del self.partial[ref.storage]
        if op.inputs and op.inputs[0].storage in self.fixed and name in ("t", "transpose"):
            self.stored.setdefault(op.inputs[0].storage, op.inputs[0].spec.shape)
            self.turned.add(op.inputs[0].storage)
            return
        for ref in op.inputs:
            if ref.storage in self.fixed and ref.storage not in self.turned:
                self.stored.setdefault(ref.storage, ref.spec.shape)
        if op.name == ATTEND:
            return self._attend(op)
        if name in PRODUCTS and op.inputs[PRODUCTS[name] + 1].storage in self.fixed:
            return self._product(op, PRODUCTS[name])
        if name == "embedding" and op.inputs[1].storage == self.words:
            table = op.inputs[0]
            self.weights[table.storage] = (0, -(-table.spec.shape[0] // self.ranks))
            self.partial[op.outputs[0].storage] = op
            return None
        if name in _LINEAR and any(ref.storage in self.partial for ref in op.inputs):
            for ref in op.outputs:
                self.partial[ref.storage] = op
        split = [(ref, part) for ref in op.inputs if (part := self._part(ref)) is not None]
        if split and op.outputs:
            self._follow(op, name, split)
        return None

    def _product(self, op: Op, at: int) -> None:
        rows, weight, result = op.inputs[at], op.inputs[at + 1], op.outputs[0]
        last = len(weight.spec.shape) - 1
        given = self._part(rows)
        if given is not None:
            if given.dim != len(rows.spec.shape) - 1:
                raise _Stays(given.source)
            self._share(weight, last - 1, given.size, given.source)
            self.partial[result.storage] = op
            return
        source = f"{_starred(op.module)} {'x'.join(map(str, weight.spec.shape))}"
        wide = weight.spec.shape[last]
        if rows.spec.shape[0] == ROWS and result.spec.shape[-1] == wide:  # the output layer
            self._share(weight, last, -(-wide // self.ranks), source)
            self.gathers[id(op)] = (result, Ref(result.storage, TensorSpec((*result.spec.shape[:-1], -(-wide // self.ranks)), result.spec.dtype)))
            return
        ranks = self.shared.get(source, self.ranks)
        if ranks == 1:
            return
        if wide % ranks:
            raise _Stays(source)
        self._share(weight, last, wide // ranks, source)
        for bias in op.inputs[:at]:
            self.weights[bias.storage] = (0, wide // ranks)
        self._set(result, RankPart(len(result.spec.shape) - 1, wide // ranks, source))

    def _share(self, weight: Ref, dim: int, size: int, source: str) -> None:
        """A dimension of a weight as a product sees it."""
        last = len(weight.spec.shape) - 1
        stored = (last if dim == last - 1 else last - 1) if weight.storage in self.turned else dim
        if self.weights.setdefault(weight.storage, (stored, size)) != (stored, size):
            raise _Stays(source)

    def _set(self, ref: Ref, part: RankPart) -> None:
        self.parts[ref.storage, ref.spec.shape] = part

    def _attend(self, op: Op) -> None:
        asks, *kept = map(self._part, op.inputs)
        for part in (asks, *kept):
            if part is not None and (part.dim != 1 or asks is None):
                raise _Stays(part.source)
        if asks is None:
            return
        if any(part is None for part in kept) and op.inputs[1].spec.shape[1] > 1:
            raise _Stays(asks.source)
        self._set(op.outputs[0], RankPart(1, asks.size, asks.source))

    def _follow(self, op: Op, name: str, split: Sequence[tuple[Ref, RankPart]]) -> None:
        first, part = split[0]
        for result in op.outputs:
            found = self._after(name, first.spec.shape, part, result.spec.shape, [ref.spec.shape for ref in op.inputs])
            if found is None:
                if result.spec.numel > 1 and (name not in _ALONG or part.dim == len(first.spec.shape) - 1):
                    raise _Stays(part.source)
                continue
            self._set(result, found)
        found = self._part(op.outputs[0])
        if name in _VIEWS or name in _PIECES or name in ("transpose", "select", "permute", "index") or found is None:
            return
        for ref in op.inputs:
            self._meets(ref, op.outputs[0].spec.shape, found)

    def _meets(self, ref: Ref, result: Shape, part: RankPart) -> None:
        """Another input of an op whose result is split must be split alike, or have no such dimension."""
        place = part.dim - (len(result) - len(ref.spec.shape))
        if place < 0 or ref.spec.shape[place] == 1 or ref.spec.shape[place] != result[part.dim]:
            return
        other = self._part(ref)
        if other is not None:
            if (other.dim, other.size) != (place, part.size):
                raise _Stays(part.source)
        elif ref.storage in self.fixed:
            self.weights[ref.storage] = (place, part.size)
        elif self.trace.storages[ref.storage].nbytes < ref.spec.nbytes:  # one row, spread over all
            self._set(ref, RankPart(place, part.size, part.source))
        else:
            raise _Stays(part.source)

    def _after(self, name: str, shape: Shape, part: RankPart, result: Shape, others: Sequence[Shape]) -> RankPart | None:
        """Where a split dimension is in an op's result; None where it is not."""
        dim, size, source = part
        if name in _VIEWS:
            return self._viewed(shape, part, result)
        if name in ("transpose", "permute"):
            moved = [place for place in range(len(shape)) if shape[place] != result[place]]
            if not moved or len(moved) != 2:
                return RankPart(dim, size, source) if not moved else None
            return RankPart(moved[1] if dim == moved[0] else moved[0] if dim == moved[1] else dim, size, source)
        if name == "select":
            gone = next((i for i in range(len(shape)) if i != dim and (*shape[:i], *shape[i + 1 :]) == result), None)
            return None if gone is None else RankPart(dim - (gone < dim), size, source)
        if name in _ALONG and dim == len(shape) - 1:
            raise _Stays(source)
        place = dim + len(result) - len(shape)
        if place < 0 or place >= len(result):
            return None
        if result[place] == shape[dim]:
            return RankPart(place, size, source)
        if name in _PIECES and len(result) == len(shape):
            if size * result[place] % shape[dim]:
                raise _Stays(source)
            return RankPart(place, size * result[place] // shape[dim], source)
        if name == "cat" and len(result) == len(shape) and result[place] == sum(one[place] for one in others):
            return RankPart(place, size * result[place] // shape[dim], source)
        return None

    def _viewed(self, shape: Shape, part: RankPart, result: Shape) -> RankPart | None:
        """Through a view: the dimension with as many rows before it."""
        dim, size, source = part
        before, seen = math.prod(shape[:dim]), 1
        for place, wide in enumerate(result):
            if seen == before and wide > 1:
                if size * wide % shape[dim] == 0:
                    return RankPart(place, size * wide // shape[dim], source)
                if wide < shape[dim]:  # heads, fewer than ranks
                    ranks = shape[dim] // size
                    raise _Stays(source, wide if ranks % wide == 0 and wide < ranks else 1)
                return None
            seen *= wide
        return None

    # ------------------------------------------------------------------ written down

    def _written(self) -> Trace:
        storages, ratio = dict(self.trace.storages), dict[int, float]()
        for number, (dim, size) in self.weights.items():
            if number in self.fixed:
                ratio[number] = size / self.stored[number][dim]
        for (number, shape), part in self.parts.items():
            if number not in ratio and number not in self.fixed:
                ratio[number] = part.size / shape[part.dim]
        storages = {n: one._replace(nbytes=round(one.nbytes * ratio[n])) if n in ratio else one for n, one in storages.items()}
        self.turned = set()
        self.more = max(storages) + 1
        programs = {name: Program(name, tuple(self._rewritten(program.ops, storages))) for name, program in self.trace.programs.items()}
        return replace(self.trace, programs=programs, storages=storages, meta={**self.trace.meta, "tp": self.ranks})

    def _rewritten(self, ops: Sequence[Op], storages: dict[int, Storage]) -> Iterator[Op]:
        attrs = ("axis:tp", f"ranks:{self.ranks}")
        for op in ops:
            name = short(op.name)
            turns = bool(op.inputs) and op.inputs[0].storage in self.fixed and name in ("t", "transpose")
            for ref in self.sums.get(id(op), ()):
                yield Op("foretell.all_reduce", (ref,), (ref,), op.module, op.phase, 0, attrs=attrs)
            inputs = tuple(self._of(ref, turned=ref.storage in self.turned and not turns) for ref in op.inputs)
            outputs = tuple(self._of(ref, turned=turns or ref.storage in self.turned) for ref in op.outputs)
            if turns:
                self.turned.add(op.inputs[0].storage)
            elif name == "embedding":
                self.turned.discard(op.inputs[0].storage)
            if id(op) in self.gathers:
                whole, part = self.gathers[id(op)]
                mine = Ref(self.more, part.spec)
                storages[self.more] = Storage(mine.spec.nbytes, TEMPORARY, op.module)
                self.more += 1
                flops = self._flops(op, inputs, (mine,))
                yield Op(op.name, inputs, (mine,), op.module, op.phase, flops, (mine.storage,), op.frees, op.attrs)
                yield Op("foretell.all_gather", (mine,), (whole,), op.module, op.phase, 0, op.allocates, (mine.storage,), attrs)
                continue
            flops = self._flops(op, inputs, outputs)
            yield Op(op.name, inputs, outputs, op.module, op.phase, flops, op.allocates, op.frees, op.attrs)

    def _of(self, ref: Ref, *, turned: bool) -> Ref:
        found: tuple[int, int] | RankPart | None = self._part(ref)
        if found is None and ref.storage in self.weights:
            dim, size = self.weights[ref.storage]
            last = len(ref.spec.shape) - 1
            found = ((last if dim == last - 1 else last - 1) if turned and dim >= last - 1 else dim), size
        if found is None:
            return ref
        shape = list(ref.spec.shape)
        shape[found[0]] = found[1]
        return Ref(ref.storage, TensorSpec(tuple(shape), ref.spec.dtype))

    def _flops(self, op: Op, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> int | None:
        if not op.flops:
            return op.flops
        name = short(op.name)
        if name in PRODUCTS:
            at = PRODUCTS[name]
            old, new = (math.prod(refs[at + 1].spec.shape) for refs in (op.inputs, inputs))
        else:
            old, new = (max(ref.spec.numel for ref in refs) for refs in ((*op.inputs, *op.outputs), (*inputs, *outputs)))
        return op.flops * new // old


# ---------------------------------------------------------------------- blocks, and stages of them


class Blocks(NamedTuple):
    """A step's ops: before its blocks, of each, after them."""

    before: tuple[Op, ...]
    each: tuple[tuple[Op, ...], ...]
    after: tuple[Op, ...]


def blocks_of(trace: Trace) -> Blocks:
    """By the modules that attend; all ops after the last block where only one program is."""
    (program,) = (one for one in trace.programs.values() if any(op.name == ATTEND for op in one.ops))
    path = next(op.module for op in program.ops if op.name == ATTEND)
    found = re.match(r"(.*?\.?)(\d+)(?:\.|$)", path)
    if found is None:
        raise UserError(f"the model's blocks have no numbers: {path} attends", "use pp 1")
    pattern = re.compile(re.escape(found[1]) + r"(\d+)(?:\.|$)")
    known = {path: int(match[1]) if (match := pattern.match(path)) else -1 for path in {op.module for op in program.ops}}
    numbers = [known[op.module] for op in program.ops]
    starts: dict[int, int] = {}
    for place, number in enumerate(numbers):
        if number >= 0:
            starts.setdefault(number, place)
    end = max(place for place, number in enumerate(numbers) if number >= 0) + 1
    bounds = [*sorted(starts.values()), end]
    each = tuple(program.ops[first:last] for first, last in pairwise(bounds))
    return Blocks(program.ops[: bounds[0]], each, program.ops[end:])


def stage_share(trace: Trace, first: int, last: int) -> Trace:
    """The step of a stage that has the blocks from `first` to before `last`."""
    blocks = blocks_of(trace)
    if first == 0 and last == len(blocks.each):
        return trace
    words = min(n for n in trace.resident if trace.storages[n].role == INPUT)
    ops = list(blocks.before if first == 0 else _without_words(blocks.before, words))
    ops += [op for number in range(first, last) for op in blocks.each[number]]
    ops += blocks.after if last == len(blocks.each) else [op for op in blocks.after if op.name == "foretell.model_end"]
    known = {number for op in ops for number in op.allocates}
    used = {ref.storage for op in ops for ref in (*op.inputs, *op.outputs)}
    given = tuple(sorted(used - known - set(trace.resident)))  # what the stage before sends
    mine = tuple(number for number in trace.resident if number in used or trace.storages[number].role == INPUT)
    there = known | set(given)
    ops = [replace(op, frees=tuple(number for number in op.frees if number in there)) if op.frees else op for op in ops]
    (name,) = (name for name, one in trace.programs.items() if any(op.name == ATTEND for op in one.ops))
    programs = {**trace.programs, name: Program(name, tuple(ops))}
    return replace(trace, programs=programs, resident=(*mine, *given), meta={**trace.meta, "stage": (first, last)})


def _without_words(ops: Sequence[Op], words: int) -> Iterator[Op]:
    """What comes before the blocks and does not hang on the tokens themselves."""
    hang = {words}
    for op in ops:
        if any(ref.storage in hang for ref in op.inputs):
            hang.update(ref.storage for ref in op.outputs)
        else:
            yield op


def sent_bytes(trace: Trace) -> int:
    """That a stage gives to the next, of the traced step: the largest of what the blocks after the first begin with."""
    blocks = blocks_of(trace)
    if len(blocks.each) < 2:
        return 0
    made = {number for op in (*blocks.before, *blocks.each[0]) for number in op.allocates}
    fixed = {number for op in blocks.before for number in op.allocates}
    read = {ref.storage: ref.spec.nbytes for op in blocks.each[1] for ref in op.inputs if ref.storage in made - fixed}
    return sum(read.values())


# ---------------------------------------------------------------------- a short model that stands for a deep one


def sampled(trace: Trace) -> list[tuple[float, Trace]]:
    """Traces with few blocks whose seconds, times these factors and added up, are those of all: equal blocks are added once each."""
    blocks = blocks_of(trace)
    kinds: dict[object, list[int]] = {}
    for number, ops in enumerate(blocks.each):
        alike = tuple((op.name, tuple(ref.spec for ref in op.inputs), tuple(ref.spec for ref in op.outputs), op.attrs) for op in ops)
        kinds.setdefault(alike, []).append(number)
    if len(kinds) * 2 >= len(blocks.each):
        return [(1.0, trace)]
    once = [same[0] for same in kinds.values()]
    found = [(1.0, _with_blocks(trace, blocks, once))]
    for same in kinds.values():
        if len(same) > 1:
            more = _with_blocks(trace, blocks, [*once, same[1]])
            found = [(found[0][0] - (len(same) - 1), found[0][1]), *found[1:], (float(len(same) - 1), more)]
    return found


def _with_blocks(trace: Trace, blocks: Blocks, chosen: Sequence[int]) -> Trace:
    parts: list[Sequence[Op]] = [*blocks.each, blocks.after]
    named: dict[int, int] = {}
    last, ops = -1, list(blocks.before)
    for number in (*sorted(chosen), len(blocks.each)):
        if number != last + 1:  # what the block before it would have given comes of the last that is there
            given, wanted = _handed(parts, last + 1), _handed(parts, number)
            named = dict(zip(wanted, (named.get(one, one) for one in given), strict=False))
        ops += [_renamed(op, named) for op in parts[number]] if named else parts[number]
        last = number
    (name,) = (name for name, one in trace.programs.items() if any(op.name == ATTEND for op in one.ops))
    used = {ref.storage for op in ops for ref in (*op.inputs, *op.outputs)} | {number for op in ops for number in op.allocates}
    storages = {number: one for number, one in trace.storages.items() if number in used}
    resident = tuple(number for number in trace.resident if number in used)
    return replace(trace, programs={**trace.programs, name: Program(name, tuple(ops))}, storages=storages, resident=resident)


def _handed(parts: Sequence[Sequence[Op]], number: int) -> list[int]:
    """What a block, or what comes after the last, reads of the block before it, in the order it does."""
    made = {one for op in parts[number - 1] for one in op.allocates} if number else set()
    return list(dict.fromkeys(ref.storage for op in parts[number] for ref in op.inputs if ref.storage in made))


def _renamed(op: Op, named: Mapping[int, int]) -> Op:
    def refs(some: Sequence[Ref]) -> tuple[Ref, ...]:
        return tuple(ref._replace(storage=named[ref.storage]) if ref.storage in named else ref for ref in some)

    return replace(op, inputs=refs(op.inputs), outputs=refs(op.outputs), frees=tuple(named.get(number, number) for number in op.frees))
