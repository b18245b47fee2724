"""Store what repeats in a trace once: the ops of one layer, a count, and how every number moves from layer to layer.

    ops        a b c  a b c  a b c  d          equal up to storage ids and the integers in the module path
    blocks     [a b c] × 3, strides   [d] × 1

A slot is one integer of an op. In repetition i it is `base + stride · i`: the stride of a weight's storage is
the number of weights in a layer, of an activation in backward it is negative, of a shared mask it is zero.
`unfold(fold(trace)) == trace` holds exactly; a stretch of which one slot is not affine is not folded.
Plain data and no torch: a stored trace is read without it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, repeat
from operator import ne, sub
from typing import Any, Generic, NamedTuple, TypeVar

from foretell.trace.record.collection import no_collection
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

Item = TypeVar("Item")
_INTEGER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")


@dataclass(frozen=True, slots=True)
class Block(Generic[Item]):
    """A few items in a row, `count` times; in repetition i every slot has moved by i times its stride.

    Slots of an op: storages of inputs, of outputs, allocates, frees, integers of the module path.
    Slots of a storage: its id, integers of the module path. An integer is its own slot.
    """

    template: tuple[Item, ...]
    count: int = 1
    strides: tuple[tuple[int, ...], ...] = ()
    """One tuple for each item of the template; empty where count is 1."""

    def __len__(self) -> int:
        return len(self.template) * self.count


@dataclass(frozen=True, slots=True)
class FoldedProgram:
    name: str
    blocks: tuple[Block[Op], ...]


@dataclass(frozen=True)
class FoldedTrace:
    """A `Trace` with its repeats stored once."""

    programs: Mapping[str, FoldedProgram]
    schedule: Mapping[str, tuple[tuple[str, int], ...]]
    storages: tuple[Block[tuple[int, Storage]], ...]
    resident: tuple[Block[int], ...]
    meta: Mapping[str, object]


class Pattern(NamedTuple):
    """All of an op but its slots. Two ops of one pattern have the same number of slots."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    path: tuple[str, ...]
    """The module path around its integers: one piece more than integers."""
    phase: str
    flops: int | None
    allocates: int
    frees: int
    attrs: tuple[int | float | str | bool, ...]
    exactly: str = ""
    """`attrs` as text: 1, 1.0 and True are equal and not the same."""


StoragePattern = tuple[tuple[str, ...], Storage]
"""All of a storage but its slots: the module path around its integers, and the storage without a module."""


@no_collection()
def fold(trace: Trace) -> FoldedTrace:
    """Find what repeats in a trace."""
    return FoldedTrace(
        programs={
            key: FoldedProgram(each.name, _blocks(each.ops, [split_op(op) for op in each.ops]))
            for key, each in trace.programs.items()
        },
        schedule=trace.schedule,
        storages=_blocks([*trace.storages.items()], [split_storage(*pair) for pair in trace.storages.items()]),
        resident=fold_integers(trace.resident),
        meta=trace.meta,
    )


@no_collection()
def unfold(folded: FoldedTrace) -> Trace:
    """The trace that was folded, every field of it."""
    return Trace(
        programs={
            key: Program(each.name, tuple(op for block in each.blocks for op in _ops(block)))
            for key, each in folded.programs.items()
        },
        schedule=folded.schedule,
        storages=dict(pair for block in folded.storages for pair in _storages(block)),
        resident=unfold_integers(folded.resident),
        meta=folded.meta,
    )


# --- ops -------------------------------------------------------------------------------------------------------------


def split_op(op: Op) -> tuple[Pattern, tuple[int, ...]]:
    """An op as its pattern and its slots."""
    path, numbers = split_path(op.module)
    storages, inputs = zip(*op.inputs, strict=True) if op.inputs else ((), ())
    written, outputs = zip(*op.outputs, strict=True) if op.outputs else ((), ())
    pattern = Pattern(
        op.name, inputs, outputs, path, op.phase, op.flops, len(op.allocates), len(op.frees), op.attrs,
        repr(op.attrs) if op.attrs else "",
    )  # fmt: skip
    return pattern, (*storages, *written, *op.allocates, *op.frees, *numbers)


def _ops(block: Block[Op]) -> Sequence[Op]:
    """All repetitions: each op of the template becomes a column, and the columns are laid out side by side."""
    if block.count == 1:
        return block.template
    count, width = block.count, len(block.template)
    laid: list[Any] = [None] * (count * width)
    known: dict[tuple[int, int, TensorSpec], list[Ref]] = {}

    def refs(these: tuple[Ref, ...], strides: Iterator[int]) -> Iterable[tuple[Ref, ...]]:
        columns = []
        for ref in these:
            stride = next(strides)
            key = (ref.storage, stride, ref.spec)
            if key not in known:
                pairs = zip(_column(ref.storage, stride, count), repeat(ref.spec))
                known[key] = list(map(_make_ref, pairs))
            columns.append(known[key])
        return zip(*columns, strict=True) if columns else repeat((), count)

    for position, (op, moves) in enumerate(zip(block.template, block.strides, strict=True)):
        strides = iter(moves)
        laid[position::width] = map(
            Op, repeat(op.name, count), refs(op.inputs, strides), refs(op.outputs, strides),
            _paths(op.module, len(op.inputs) + len(op.outputs) + len(op.allocates) + len(op.frees), moves, count),
            repeat(op.phase), repeat(op.flops),
            _rows(op.allocates, strides, count), _rows(op.frees, strides, count), repeat(op.attrs),
        )  # fmt: skip
    return laid


_make_ref = partial(tuple.__new__, Ref)


def _column(base: int, stride: int, count: int) -> Iterable[int]:
    return range(base, base + stride * count, stride) if stride else repeat(base, count)


def _rows(bases: Sequence[int], strides: Iterator[int], count: int) -> Iterable[tuple[int, ...]]:
    columns = [_column(base, next(strides), count) for base in bases]
    return zip(*columns, strict=True) if columns else repeat((), count)


# --- module paths ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def split_path(module: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """`blocks.7.norm1` → (`blocks.`, `.norm`, ``), (7, 1)."""
    pieces = _INTEGER.split(module)
    return tuple(pieces[::2]), tuple(map(int, pieces[1::2]))


def join_path(path: Sequence[str], numbers: Iterable[int]) -> str:
    return path[0] + "".join(f"{number}{piece}" for number, piece in zip(numbers, path[1:], strict=True))


def _paths(module: str, skip: int, strides: tuple[int, ...], count: int) -> Iterable[str]:
    """Module paths of all repetitions; the strides of their integers are those after the first `skip`."""
    return _moved_paths(module, strides[skip:], count) if any(strides[skip:]) else repeat(module, count)


@lru_cache(maxsize=4096)
def _moved_paths(module: str, strides: tuple[int, ...], count: int) -> list[str]:
    path, numbers = split_path(module)
    return [join_path(path, row) for row in _rows(numbers, iter(strides), count)]


# --- storages, integers ----------------------------------------------------------------------------------------------


def split_storage(number: int, storage: Storage) -> tuple[StoragePattern, tuple[int, ...]]:
    """A storage as its pattern and its slots."""
    path, numbers = split_path(storage.module)
    return (path, storage._replace(module="")), (number, *numbers)


def _storages(block: Block[tuple[int, Storage]]) -> Sequence[tuple[int, Storage]]:
    if block.count == 1:
        return block.template
    count, width = block.count, len(block.template)
    laid: list[Any] = [None] * (count * width)
    for position, ((number, one), strides) in enumerate(zip(block.template, block.strides, strict=True)):
        columns: dict[str, Iterable[Any]] = {name: repeat(value, count) for name, value in one._asdict().items()}
        columns["module"] = _paths(one.module, 1, strides, count)
        copies = map(Storage, *columns.values())
        laid[position::width] = zip(_column(number, strides[0], count), copies, strict=True)
    return laid


def fold_integers(numbers: Sequence[int]) -> tuple[Block[int], ...]:
    """A list of integers as blocks; what repeats is the step from one to the next."""
    steps = map(sub, numbers, (*numbers[:1], *numbers))
    return _blocks(numbers, [(step, (number,)) for step, number in zip(steps, numbers, strict=True)])


def unfold_integers(blocks: Iterable[Block[int]]) -> tuple[int, ...]:
    numbers: list[int] = []
    for block in blocks:
        strides = [stride for (stride,) in block.strides] or [0] * len(block.template)
        for row in range(block.count):
            numbers.extend(base + stride * row for base, stride in zip(block.template, strides, strict=True))
    return tuple(numbers)


# --- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(items: Sequence[Item], parts: list[tuple[Any, tuple[int, ...]]]) -> tuple[Block[Item], ...]:
    """Items as blocks, given the pattern and the slots of each."""
    known: dict[Any, int] = {}
    signs = [known.setdefault(pattern, len(known)) for pattern, _ in parts]
    slots = [each for _, each in parts]
    blocks: list[Block[Item]] = []
    done = 0
    for start, width, count in find_runs(signs, slots):
        if done < start:
            blocks.append(Block(tuple(items[done:start])))
        middle = start + width
        strides = tuple(tuple(map(sub, slots[place + width], slots[place])) for place in range(start, middle))
        blocks.append(Block(tuple(items[start:middle]), count, strides))
        done = start + width * count
    if done < len(items):
        blocks.append(Block(tuple(items[done:])))
    return tuple(blocks)


# --- finding runs ----------------------------------------------------------------------------------------------------

_WORTH = 4
"""Items a run must save."""
_GRAMS = (2, 8, 32, 128)
"""Lengths of the pieces whose next occurrence suggests a period; short ones for short runs."""
_MULTIPLES = (1, 2, 3, 4)
"""Where signs repeat and slots are not affine, they may be at every second layer."""
_EFFORT = 64
"""How often the slots may be looked at, all in all: a bound for lists that repeat in very many ways."""
_FREE = re.compile(rb"\0+")


class _RepeatRun(NamedTuple):
    """Items `start` to `end` repeat with this period, affine throughout; sorts by what it saves, most first."""

    lost: int
    start: int
    end: int
    period: int
    most: int
    """Repetitions it may be used for: two of any kind are affine."""


def _run(start: int, end: int, period: int, most: int) -> _RepeatRun:
    return _RepeatRun(-(min((end - start) // period, most) - 1) * period, start, end, period, most)


def find_runs(signs: Sequence[int], slots: Sequence[tuple[int, ...]]) -> list[tuple[int, int, int]]:
    """(start, period, count) of the repeats worth folding, disjoint and in order.

    Items repeat where their signs do; a run is one only where the slots are affine. Those that save most come
    first, and what they cover is cut from the others.
    """
    heap = [run for run in _candidates(signs, slots) if -run.lost >= _WORTH]
    heapify(heap)
    taken = bytearray(len(signs))
    found = []
    while heap:
        run = heappop(heap)
        count = min((run.end - run.start) // run.period, run.most)
        stop = run.start + count * run.period
        if taken.find(1, run.start, stop) < 0:
            taken[run.start : stop] = b"\1" * (stop - run.start)
            found.append((run.start, run.period, count))
            rest = [(stop, run.end)]
        else:
            rest = [gap.span() for gap in _FREE.finditer(taken, run.start, run.end)]
        for start, end in rest:
            part = _run(start, end, run.period, run.most)
            if -part.lost >= _WORTH:
                heappush(heap, part)
    return sorted(found)


def _candidates(signs: Sequence[int], slots: Sequence[tuple[int, ...]]) -> Iterator[_RepeatRun]:
    flat = [number for each in slots for number in each]
    offsets = [0, *accumulate(map(len, slots))]
    effort = _EFFORT * (len(flat) + len(signs))
    for period, places in _periods(signs):
        done = 0
        for place in places:
            if place < done:
                continue
            start, end = _stretch(signs, place, period, done)
            done = end - period + 1
            if end - start < 2 * period:
                continue
            yield _run(start, end, period, 2)
            for times in _MULTIPLES:
                if end - start < 3 * times * period or effort < 0:
                    break
                effort -= offsets[end] - offsets[start] + end - start
                runs = list(_affine(flat, offsets, start, end, times * period))
                yield from runs
                if 2 * sum(run.end - run.start for run in runs) > end - start:
                    break


def _periods(signs: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Periods that may be, each with the places that suggest it, the most often suggested first."""
    places: dict[int, set[int]] = {}
    grams, length = list(signs), 1
    while length < _GRAMS[-1]:
        pairs: dict[tuple[int, int], int] = {}
        grams = [pairs.setdefault(pair, len(pairs)) for pair in zip(grams, grams[length:], strict=False)]
        length *= 2
        if length in _GRAMS:
            nearest: dict[int, int] = {}
            for place in range(len(grams) - 1, -1, -1):
                after = nearest.get(grams[place])
                if after is not None:
                    places.setdefault(after - place, set()).add(place)
                nearest[grams[place]] = place
    return sorted(((period, sorted(found)) for period, found in places.items()), key=lambda pair: -len(pair[1]))


def _stretch(signs: Sequence[int], place: int, period: int, low: int) -> tuple[int, int]:
    """The longest [start, end) around `place`, from `low` on, in which signs repeat with this period."""
    start = place
    while start > low and signs[start - 1] == signs[start - 1 + period]:
        start -= 1
    end, step = place, 64
    while step:
        if end + step + period <= len(signs) and signs[end : end + step] == signs[end + period : end + step + period]:
            end += step
            step *= 2
        else:
            step //= 2
    return start, end + period


def _affine(flat: list[int], offsets: list[int], start: int, end: int, period: int) -> Iterator[_RepeatRun]:
    """The stretches of [start, end) in which each slot makes the same step from every period to the next."""
    first, size = offsets[start], offsets[start + period] - offsets[start]
    part = flat[first : offsets[end]]
    steps = list(map(sub, part[size:], part))
    broken = bytes(map(ne, steps[size:], steps))
    enough = bytes(size)
    last = broken.find(enough)
    while last >= 0:
        stop = broken.find(1, last)
        stop = len(broken) if stop < 0 else stop
        begin = bisect_left(offsets, first + last, start, end)
        finish = min(bisect_right(offsets, first + stop, start, end + 1) - 1 + 2 * period, end)
        if finish - begin >= 3 * period:
            yield _run(begin, finish, period, finish)
        last = broken.find(enough, stop + 1)
