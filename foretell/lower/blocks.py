"""One step in which every block has its own residency, put together from whole traces of each.

    keep        │ head │ F0 │ F1 │ F2 │ tail │ B2 │ B1 │ B0 │ head' │
    recompute   │ head │ F0 │ F1 │ F2 │ tail │ B2 │ B1 │ B0 │ head' │
    asked for         ▲ keep ▲ recompute …   each stretch of ops comes from the trace of its block's mode

Apart from the ops that recompute, and views, the traces run the same ops. So a storage of one trace has a twin in
the others, found by the op that makes it. A tensor that crosses from one block to the next dies with whoever held it
last, so where two stretches both free it the later one counts; where none does, it dies where it dies in the trace it
was born in (autocast's copies of weights go at the end of forward, unless a block that keeps them needs them).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from foretell.lower.fsdp.sharded import block_of
from foretell.trace.types import Op, Program, Ref, Storage, Trace

KEEP = "keep"
_SILENT = frozenset({"aten.detach.default", "foretell.begin"})
"""Ops that one trace may have and another lack; none of them makes a storage."""


class TraceMismatch(Exception):
    """The traces do not run the same ops, so that no mixture of them can be vouched for."""


def compose(traces: Mapping[str, Trace], modes: Mapping[str, str]) -> Trace:
    """The step with `modes` (block → mode, others keep) from traces that have every block in one mode."""
    plain = traces[KEEP]
    blocks = blocks_of(plain)
    chosen = {block: modes.get(block, KEEP) for block in blocks}
    if not blocks or set(chosen.values()) == {KEEP}:
        return plain
    if len(set(chosen.values())) == 1:
        return traces[chosen[blocks[0]]]
    used = {mode: traces[mode] for mode in dict.fromkeys((KEEP, *chosen.values()))}
    storages = dict(plain.storages)
    fresh = itertools.count(max(storages, default=-1) + 1)
    names = {mode: _Names(plain, trace, storages, fresh) for mode, trace in used.items()}
    programs = dict(plain.programs)
    for name in plain.programs:
        if name in ("micro_first", "micro_next"):
            pieces = {mode: _stretches(trace.programs[name].ops, blocks) for mode, trace in used.items()}
            programs[name] = Program(name, _mixed(pieces, chosen, names))
    return replace(plain, programs=programs, storages=storages, meta={**plain.meta, "residency": chosen})


def blocks_of(trace: Trace) -> tuple[str, ...]:
    found = trace.meta.get("blocks", ())
    assert isinstance(found, Sequence)
    return tuple(found)


Stretch = tuple[str, list[Op]]


def _stretches(ops: Sequence[Op], blocks: Sequence[str]) -> list[Stretch]:
    """Runs of ops of one block (or of none), forward and backward apart; loose ops go with the run around them."""
    found: list[Stretch] = []
    late = False
    for op, block in zip(ops, block_of(ops, blocks), strict=True):
        begins = op.phase in ("backward", "recompute") and not late
        if begins or not found or found[-1][0] != block:
            found.append((block, []))
            late = late or begins
        found[-1][1].append(op)
    return found


def _mixed(
    pieces: Mapping[str, list[Stretch]], chosen: Mapping[str, str], names: Mapping[str, _Names]
) -> tuple[Op, ...]:
    plain = pieces[KEEP]
    if any([block for block, _ in other] != [block for block, _ in plain] for other in pieces.values()):
        raise TraceMismatch("blocks do not run in the same order in every mode")
    for mode, other in pieces.items():
        for (_, mine), (_, theirs) in zip(plain, other, strict=True):
            names[mode].learn(mine, theirs)
    done: list[Op] = []
    places: dict[tuple[int, int], int] = {}
    origin: dict[int, str] = {}
    for position, (block, _) in enumerate(plain):
        mode = chosen.get(block, KEEP)
        ops = [names[mode].renamed(op) for op in pieces[mode][position][1]]
        for place, op in zip(_places(ops), ops, strict=True):
            places[position, place] = len(done)
            origin.update((number, mode) for number in op.allocates)
            done.append(op)
    deaths = {mode: names[mode].deaths(other) for mode, other in pieces.items()}
    found = {number: deaths[mode][number] for number, mode in origin.items() if number in deaths[mode]}
    staying = {number for number, mode in origin.items() if number not in deaths[mode]}
    usual = {number: places.get(place, -1) for number, place in found.items()}
    return _once(done, usual, staying, _held([block for block, _ in plain], places, done, chosen))


def _held(
    blocks: Sequence[str], places: Mapping[tuple[int, int], int], ops: Sequence[Op], chosen: Mapping[str, str]
) -> dict[int, int]:
    """Storage that several blocks read → the end of the last backward that computes one of them again from it.

    A checkpoint holds the inputs of its block. Of what a single block reads its own trace says when it goes.
    """
    readers: dict[int, dict[str, int]] = {}
    ends: dict[int, int] = {}
    for (position, _), place in places.items():
        ends[position] = max(place, ends.get(position, 0))
    start = 0
    for position, block in enumerate(blocks):
        stretch = ops[start : ends[position] + 1]
        own = {number for op in stretch for number in op.allocates}
        for op in stretch if block else ():
            for ref in op.inputs:
                if ref.storage not in own:
                    readers.setdefault(ref.storage, {})[block] = ends[position]
        start = ends[position] + 1
    return {
        number: max(end for block, end in found.items() if chosen[block] != KEEP)
        for number, found in readers.items()
        if len(found) > 1 and any(chosen[block] != KEEP for block in found)
    }


class _Names:
    """What the storages of one trace are called in the mixture: as their twin in the plain trace, or anew."""

    def __init__(self, plain: Trace, trace: Trace, storages: dict[int, Storage], fresh: Iterator[int]) -> None:
        if len(plain.resident) != len(trace.resident):
            raise TraceMismatch("the traces do not begin with the same tensors")
        self.known = dict(zip(trace.resident, plain.resident, strict=True))
        self.old, self.storages, self.fresh = trace.storages, storages, fresh

    def learn(self, mine: Sequence[Op], theirs: Sequence[Op]) -> None:
        for one, two in zip(_telling(mine), _telling(theirs), strict=False):
            if one.name != two.name or len(one.allocates) != len(two.allocates):
                raise TraceMismatch(f"{two.name} in {two.module or 'the model'} where the plain step has {one.name}")
            for plain, other in zip(one.allocates, two.allocates, strict=True):
                self.known.setdefault(other, plain)

    def renamed(self, op: Op) -> Op:
        name = self._name
        return Op(
            op.name, tuple([Ref(name(ref.storage), ref.spec) for ref in op.inputs]),
            tuple([Ref(name(ref.storage), ref.spec) for ref in op.outputs]), op.module, op.phase, op.flops,
            tuple(map(name, op.allocates)), tuple(map(name, op.frees)), op.attrs,
        )  # fmt: skip

    def deaths(self, stretches: Sequence[Stretch]) -> dict[int, tuple[int, int]]:
        """Storage → stretch, and which op of those that every trace has, after which it dies."""
        return {
            self._name(number): (position, place)
            for position, (_, ops) in enumerate(stretches)
            for place, op in zip(_places(ops), ops, strict=True)
            for number in op.frees
        }

    def _name(self, number: int) -> int:
        found = self.known.get(number)
        if found is None:
            found = self.known[number] = next(self.fresh)
            self.storages[found] = self.old[number]
        return found


def _telling(ops: Sequence[Op]) -> Iterator[Op]:
    return (op for op in ops if _tells(op))


def _tells(op: Op) -> bool:
    empty = op.name == "aten.empty.memory_format" and all(not ref.spec.numel for ref in op.outputs)  # a checkpoint's
    return op.phase != "recompute" and op.name not in _SILENT and not empty


def _places(ops: Sequence[Op]) -> list[int]:
    """Of every op of a stretch: how many ops that every trace has came up to here."""
    found: list[int] = []
    for op in ops:
        found.append((found[-1] if found else 0) + _tells(op))
    return found


def _once(
    ops: list[Op], usual: Mapping[int, int], staying: set[int], held: Mapping[int, int]
) -> tuple[Op, ...]:
    """Every storage dies once: where it was last let go; if nowhere, where it usually does; `staying` ones do not."""
    last: dict[int, int] = {}
    used: dict[int, int] = {}
    for position, op in enumerate(ops):
        for number in op.frees:
            last[number] = position
        for number in op.allocates:
            used[number] = position
        for ref in (*op.inputs, *op.outputs):
            used[ref.storage] = position
    for number, position in usual.items():
        last.setdefault(number, position)
    dying: dict[int, list[int]] = {}
    for number, position in last.items():
        if number not in staying:
            dying.setdefault(max(position, used.get(number, position), held.get(number, 0)), []).append(number)
    return tuple(_dying(op, dying.get(position, ())) for position, op in enumerate(ops))


def _dying(op: Op, numbers: Sequence[int]) -> Op:
    """The op that frees these, in the order in which it did where it did."""
    kept = [number for number in op.frees if number in numbers]
    frees = (*kept, *(number for number in numbers if number not in kept))
    return op if frees == op.frees else replace(op, frees=frees)
