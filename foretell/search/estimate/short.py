"""The step of a short stack of blocks, put together from the pieces of a model: an ordinary trace, to be lowered like any.

    before │ block │ block │ … │ after, loss, after' │ … │ block' │ block' │ before' │ update
             each from the piece of its kind and residency, on parameters of its own

What one piece makes and the next one reads (the stream between blocks, its gradient) is matched by size, in order. The
update is the model's own, of what these blocks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from foretell.lower.expert import EXPERTS
from foretell.lower.fsdp.units import FsdpSharding, Storages, unit_of, units_of
from foretell.lower.steps import FIRST
from foretell.search.block_costs.expert import replace_first
from foretell.search.block_costs.ops import AFTER, BEFORE, Material, Weights
from foretell.search.estimate.coarse import Coarse
from foretell.simulate.memory.memory import FITTED, fitted_ops
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

Key = str | int
ROOT = "root"
_MAKING = ("aten.zeros.", "aten.zeros_like.")
_MADE = "aten.zeros_like.default"
_OWNED = (types.PARAMETER, types.BUFFER, types.GRADIENT, types.OPTIMIZER)
_FIXED = (types.PARAMETER, types.BUFFER, types.INPUT)


LINK = -1
"""A block of no kind: it hands on what it is given. It stands for all that other ranks have at its place."""


class Item(NamedTuple):
    """A block of a short stack."""

    kind: int
    mode: str
    name: str
    """Path of its module."""


# ---------------------------------------------------------------------- what the whole model says


@dataclass(frozen=True)
class _UpdateOp:
    """An op of the update, each tensor with whose it is."""

    op: Op
    inputs: tuple[tuple[Key, Ref], ...]
    outputs: tuple[tuple[Key, Ref], ...]
    allocates: tuple[tuple[Key, int], ...]
    frees: tuple[tuple[Key, int], ...]


class Origin:
    """A model's trace, seen by the kinds of its blocks."""

    def __init__(self, trace: Trace, material: Material) -> None:
        self.trace, self.fitted = trace, fitted_ops(trace)
        members: dict[int, list[str]] = {}
        for block, kind in zip(material.blocks, material.kinds, strict=True):
            members.setdefault(kind, []).append(block)
        self.names = {kind: same[len(same) // 2] for kind, same in members.items()}
        """Kind → the block whose ops stand for it."""
        kinds = {name: kind for kind, name in self.names.items()}
        blocks: dict[str, None] = dict.fromkeys(("", *material.blocks))
        places: dict[str, Key | None] = {}

        def of(module: str) -> Key | None:
            if module not in places:
                path = unit_of(module, blocks)  # type: ignore[arg-type]
                places[module] = ROOT if not path else kinds.get(path)
            return places[module]

        self.owner: dict[int, Key] = {}
        """Storage that is kept between ops → the kind it belongs to, or the root; those of other blocks are not there."""
        self.other: set[int] = set()
        for number, storage in trace.storages.items():
            if storage.role in _OWNED:
                found = of(storage.module)
                if found is None:
                    self.other.add(number)
                else:
                    self.owner[number] = found
        self.resident = tuple(number for number in trace.resident if number not in self.other)
        self.programs = {name: tuple(self._joined(self._lines(program.ops))) for name, program in trace.programs.items() if name != FIRST}
        units = units_of(trace, FsdpSharding(ranks=2), Storages(trace.storages))
        self.units = {kind: units[name] for kind, name in self.names.items()} | {ROOT: units[""]}

    def _lines(self, ops: Sequence[Op]) -> Iterator[_UpdateOp]:
        mine, other = dict[int, Key](), set(self.other)

        def whose(number: int) -> Key:
            return mine.get(number) or self.owner.get(number) or mine.get(number, self.owner.get(number, ROOT))

        for op in ops:
            if len(op.outputs) == len(op.inputs) > 1:  # one result for each
                for ref, made in zip(op.inputs, op.outputs, strict=True):
                    if made.storage in op.allocates and made.storage not in self.owner:
                        if ref.storage in other:
                            other.add(made.storage)
                        else:
                            mine[made.storage] = whose(ref.storage)
            refs = [tuple((whose(r.storage), r) for r in found if r.storage not in other) for found in (op.inputs, op.outputs)]
            numbers = [tuple((whose(n), n) for n in found if n not in other) for found in (op.allocates, op.frees)]
            if (op.inputs and not refs[0]) or (op.allocates and not numbers[0]):
                continue
            yield _UpdateOp(op, refs[0], refs[1], numbers[0], numbers[1])

    @staticmethod
    def _joined(lines: Iterable[_UpdateOp]) -> Iterator[_UpdateOp]:
        """State that is made tensor by tensor, for one block at once."""
        waiting: list[_UpdateOp] = []
        for line in lines:
            owner = line.allocates[0][0] if line.op.name.startswith(_MAKING) and line.allocates else None
            if waiting and owner != waiting[0].allocates[0][0]:
                yield _together(waiting)
                waiting = []
            if owner is None:
                yield line
            else:
                waiting.append(line)
        if waiting:
            yield _together(waiting)


def _together(lines: Sequence[_UpdateOp]) -> _UpdateOp:
    def every(name: str) -> tuple[Any, ...]:
        return tuple(one for line in lines for one in getattr(line, name))

    op = replace(lines[0].op, name=_MADE) if len(lines) > 1 else lines[0].op
    return _UpdateOp(op, every("inputs"), every("outputs"), every("allocates"), every("frees"))


# ---------------------------------------------------------------------- split weights


def shapes_of(origin: Origin, material: Material) -> tuple[dict[int, TensorSpec], dict[tuple[Key, tuple[int, ...]], tuple[int, ...]]]:
    """Parameters whose part a rank has, with that part's shape; and whole shapes → parts, by whose they are."""
    specs: dict[int, TensorSpec] = {}
    shapes: dict[tuple[Key, tuple[int, ...]], tuple[int, ...]] = {}
    for key, unit in origin.units.items():
        trained = {piece.storage for piece in unit.trained}
        if key == ROOT:
            both = [material.weights[part] for part in (BEFORE, AFTER)]
            weights = Weights(tuple(s for w in both for s in w.trained), tuple(s for w in both for s in w.frozen))
            first = _root_order(origin, material)
            pieces = sorted(unit.parameters, key=lambda piece: first.get(piece.storage, 0))
        else:
            weights, pieces = material.weights[key], unit.parameters
        experts, rest, frozen = list(weights.experts), list(weights.trained), list(weights.frozen)
        for piece in pieces:
            if experts and piece.spec.shape and replace_first(piece.spec, weights.groups) == experts[0] and piece.storage in trained:
                part = experts.pop(0)
            else:
                part = (rest if piece.storage in trained else frozen).pop(0)
            if part != piece.spec:
                specs[piece.storage] = part
                shapes[key, piece.spec.shape] = part.shape
    return specs, shapes


def _root_order(origin: Origin, material: Material) -> dict[int, int]:
    """Parameters of the root that only `after` reads come last, as the material has them."""
    read = {
        key: {ref.storage for op in (*material.pieces[key].forward, *material.pieces[key].backward) for ref in op.inputs}
        for key in (BEFORE, AFTER)
    }
    return {piece.storage: int(piece.storage in read[AFTER] and piece.storage not in read[BEFORE]) for piece in origin.units[ROOT].parameters}


# ---------------------------------------------------------------------- putting together


@dataclass
class Stacker:
    """Short stacks of one model at one micro-batch and split."""

    origin: Origin
    material: Material
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    shapes: dict[tuple[Key, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs, self.shapes = shapes_of(self.origin, self.material)
        whole = sum(s.nbytes for s in self.origin.trace.storages.values() if s.role == types.INPUT) or 1
        self.inputs = self.material.inputs / whole
        """How many times the traced micro-batch this one is."""

    def trace(self, items: Sequence[Item], pieces: Mapping[tuple[Key, str], Coarse]) -> Trace:
        """The step of these blocks, with what runs before and after them."""
        return _Stack(self, items, pieces).trace()


class _Stack:
    def __init__(self, stacker: Stacker, items: Sequence[Item], pieces: Mapping[tuple[Key, str], Coarse]) -> None:
        self.stacker, self.items, self.pieces = stacker, items, pieces
        self.origin, self.material = stacker.origin, stacker.material
        self.storages: dict[int, Storage] = {}
        self.next = max(max(one.storages, default=0) for one in pieces.values()) + 1
        self.next = max(self.next, max(self.origin.trace.storages, default=0) + 1)
        self.names: list[dict[int, int]] = [{} for _ in items]
        """Of each block: storage of its kind's piece → its own."""
        self.modules: list[dict[str, str]] = [{} for _ in items]
        self.early: list[dict[int, int]] = [{} for _ in items]
        """Of each block: storage of another piece that it reads → the one that stands for it here."""
        self.late: dict[tuple[int, int], int] = {}
        """Block and storage of the model's update → the one here."""
        self.here: dict[int, tuple[int, ...]] = {}
        self.out: list[Op] = []
        self.places: dict[Key, list[int]] = {}
        for place, item in enumerate(items):
            self.places.setdefault(item.kind, []).append(place)
        self.root_early: dict[str, dict[int, int]] = {BEFORE: {}, AFTER: {}}
        self.born_before = {n for op in self._piece(BEFORE).forward for n in op.allocates}

    def _piece(self, key: Key, mode: str = "keep") -> Coarse:
        return self.pieces[key, mode]

    # ------------------------------------------------------------------ storages

    def own(self, place: int, number: int) -> int:
        """A block's own storage for one of its kind's."""
        found = self.names[place].get(number)
        if found is None:
            found, self.next = self.next, self.next + 1
            self.names[place][number] = found
            item = self.items[place]
            storage = self._sized(item.kind, number, self._piece(item.kind, item.mode).storages)
            self.storages[found] = storage._replace(module=self.module(place, storage.module))
        return found

    def root(self, number: int, known: Mapping[int, Storage]) -> int:
        if number not in self.storages:
            self.storages[number] = self._sized(ROOT, number, known)
        return number

    def _sized(self, key: Key, number: int, known: Mapping[int, Storage]) -> Storage:
        storage = known.get(number) or self.origin.trace.storages[number]
        if number in self.stacker.specs:
            return storage._replace(nbytes=self.stacker.specs[number].nbytes)
        if storage.role == types.INPUT:
            return storage._replace(nbytes=round(self.origin.trace.storages[number].nbytes * self.stacker.inputs))
        return storage

    def module(self, place: int, path: str) -> str:
        """The module of a block that takes the place of one of its kind's."""
        found = self.modules[place].get(path)
        if found is None:
            item = self.items[place]
            like = self.origin.names[item.kind]
            inside = path == like or path.startswith(f"{like}.")
            found = self.modules[place][path] = item.name + path[len(like) :] if inside else path
        return found

    # ------------------------------------------------------------------ a micro-batch

    def trace(self) -> Trace:
        self._micro()
        programs = {FIRST: Program(FIRST, tuple(self.out))}
        for name, lines in self.origin.programs.items():
            programs[name] = Program(name, tuple(self._update(lines)))
        resident = []
        for number in self.origin.resident:
            key = self.origin.owner.get(number, ROOT)
            resident += [self.root(number, {})] if key == ROOT else [self.own(place, number) for place in self.places.get(key, ())]
        old = self.origin.trace
        recipe = old.meta.get("recipe", {})
        assert isinstance(recipe, Mapping)
        about = {**self.material.meta, "blocks": [item.name for item in self.items], "recipe": {**recipe, "recompute": "none"}}
        if self.origin.fitted:
            about[FITTED] = self.origin.fitted
        if EXPERTS in about:
            about[EXPERTS] = self._experts(about[EXPERTS])
        return Trace(programs=programs, schedule=old.schedule, storages=self.storages, resident=tuple(resident), meta=about)

    def _experts(self, paths: object) -> list[str]:
        assert isinstance(paths, Iterable)
        found = []
        for path in paths:
            for place, item in enumerate(self.items):
                like = self.origin.names.get(item.kind, "")
                if not like:
                    continue
                if path == like or str(path).startswith(f"{like}."):
                    found.append(self.module(place, str(path)))
        return found

    def _micro(self) -> None:
        last: list[int] = []
        """What the piece before has handed on."""
        before, after = self._piece(BEFORE), self._piece(AFTER)
        self._run_root(BEFORE, before.forward, before, last)
        last = list(self._handed(BEFORE, before.forward))
        for place in range(len(self.items)):
            last = self._run(place, 0, last)
        self._run_root(AFTER, after.forward, after, last)
        dying = [
            self.names[place][n] for place, item in enumerate(self.items) if item.kind != LINK
            for n in self._piece(item.kind, item.mode).lingering if n in self.names[place]
        ]  # fmt: skip
        if dying:
            self.out[-1] = replace(self.out[-1], frees=(*self.out[-1].frees, *dying))
        self._run_root(AFTER, after.backward, after, last)
        last = [self.root_early[AFTER].get(n, n) for n in after.outgoing]
        for place in reversed(range(len(self.items))):
            last = self._run(place, 1, last)
        self._run_root(BEFORE, before.backward, before, last)
        self._close()

    def _handed(self, key: str, ops: Sequence[Op]) -> Iterator[int]:
        """What a piece's forward makes and others read, in the order it is made."""
        outputs = self.material.pieces[key].outputs
        yield from (n for op in ops for n in op.allocates if n in outputs)

    def _run(self, place: int, half: int, last: list[int]) -> list[int]:
        """A block's forward or backward on storages of its own; what it hands on."""
        item = self.items[place]
        if item.kind == LINK:
            return self._link(item, half, last)
        piece = self._piece(item.kind, item.mode)
        ops = piece.backward if half else piece.forward
        known = self.early[place]
        self._match(place, piece, ops, last)
        born = {n for op in piece.forward for n in op.allocates} | {n for op in piece.backward for n in op.allocates}

        def of(number: int) -> int:
            storage = piece.storages[number]
            if number in born or storage.role in (types.PARAMETER, types.BUFFER, types.GRADIENT):
                return self.own(place, number) if self.origin.owner.get(number, item.kind) != ROOT else self.root(number, piece.storages)
            if number in known:
                return known[number]
            if number in self.born_before or storage.role == types.INPUT:
                return self.root(number, piece.storages)
            return self.own(place, number)  # of a piece that is not here

        for op in ops:
            self.out.append(_renamed(op, of, self.module(place, op.module)))
        if half:
            return [of(n) for n in piece.outgoing] or last
        outputs = self.material.pieces[item.kind].outputs
        return [of(n) for op in piece.forward for n in op.allocates if n in outputs] or last

    def _link(self, item: Item, half: int, last: Sequence[int]) -> list[int]:
        specs = self.material.boundary
        phase = "backward" if half else "forward"
        made: list[int] = []
        for number in last[: len(specs)]:
            self.storages[self.next] = self.storages[number]._replace(role=types.ACTIVATION, module=item.name)
            made.append(self.next)
            self.next += 1
        inputs, outputs = (tuple(Ref(n, spec) for n, spec in zip(found, specs, strict=False)) for found in (last, made))
        self.out.append(Op("foretell.link", inputs, outputs, item.name, phase, 0, tuple(made)))
        return made

    def _match(self, place: int, piece: Coarse, ops: Sequence[Op], last: Sequence[int]) -> None:
        """What a block reads of its neighbour: of the same size, in order."""
        item, known = self.items[place], self.early[place]
        born = {n for op in (*piece.forward, *piece.backward) for n in op.allocates}
        free = [n for n in last if n not in known.values()]
        starts = self.origin.names[item.kind] == self.material.blocks[0]
        for op in ops:
            for number in dict.fromkeys((*(r.storage for r in op.inputs), *(r.storage for r in op.outputs), *op.frees)):
                storage = piece.storages[number]
                if number in born or number in known or storage.role in (*_FIXED, types.GRADIENT):
                    continue
                if number in self.born_before and not (starts and place):
                    continue
                same = [n for n in free if self.storages[n].nbytes == storage.nbytes]
                if same:
                    known[number] = same[0]
                    free.remove(same[0])

    def _run_root(self, key: str, ops: Sequence[Op], piece: Coarse, last: Sequence[int]) -> None:
        known = self.root_early[key]
        born = {n for k in (BEFORE, AFTER) for op in (*self._piece(k).forward, *self._piece(k).backward) for n in op.allocates}
        free = [n for n in last if n not in known.values()]

        def of(number: int) -> int:
            nonlocal free
            storage = piece.storages[number]
            if number in born or storage.role in (*_FIXED, types.GRADIENT):
                return self.root(number, piece.storages)
            if number not in known:
                same = [n for n in free if self.storages[n].nbytes == storage.nbytes]
                known[number] = same[0] if same else self.root(number, piece.storages)
                free = [n for n in free if n != known[number]]
            return known[number]

        self.out += [_renamed(op, of, op.module) for op in ops]

    def _close(self) -> None:
        """What nobody frees dies with the micro-batch."""
        born = dict.fromkeys(n for op in self.out for n in op.allocates if self.storages[n].role != types.GRADIENT)
        gone = {n for op in self.out for n in op.frees}
        left = tuple(n for n in born if n not in gone)
        if left:
            self.out[-1] = replace(self.out[-1], frees=(*self.out[-1].frees, *left))

    # ------------------------------------------------------------------ the update

    def _update(self, lines: Sequence[_UpdateOp]) -> Iterator[Op]:
        for line in lines:
            inputs = tuple(self._refs(line.inputs))
            if line.inputs and not inputs:
                continue
            yield replace(
                line.op, inputs=inputs, outputs=tuple(self._refs(line.outputs, line.allocates)),
                allocates=tuple(self._numbers(line.allocates)), frees=tuple(self._numbers(line.frees)),
            )  # fmt: skip

    def _numbers(self, found: Sequence[tuple[Key, int]]) -> Iterator[int]:
        for key, number in found:
            mine = self.here.get(number)
            if mine is None:
                mine = self.here[number] = self._all(key, number)
            yield from mine

    def _all(self, key: Key, number: int) -> tuple[int, ...]:
        """What stands here for a storage of the model's update: of every block of its kind."""
        storage = self.origin.trace.storages[number]
        if storage.role not in (types.PARAMETER, types.GRADIENT, types.BUFFER, types.INPUT):
            places = (-1,) if key == ROOT else self.places.get(key, ())
            return tuple(self._late(key, place, number, storage) for place in places)
        if key == ROOT:
            return (self.root(number, {}),)
        return tuple(self.own(place, number) for place in self.places.get(key, ()))

    def _late(self, key: Key, place: int, number: int, storage: Storage) -> int:
        """A storage of the update alone: a piece with other ops may have given its number to something else."""
        found = self.late.get((place, number))
        if found is None:
            found, self.next = self.next, self.next + 1
            self.late[place, number] = found
            self.storages[found] = storage if key == ROOT else storage._replace(module=self.module(place, storage.module))
        return found

    def _refs(self, found: Sequence[tuple[Key, Ref]], born: Sequence[tuple[Key, int]] = ()) -> Iterator[Ref]:
        shapes, made = self.stacker.shapes, {number for _, number in born}
        for key, (number, old) in found:
            spec = old
            if shapes and (key, old.shape) in shapes:
                spec = TensorSpec(shapes[key, old.shape], old.dtype)
            for mine in self._numbers(((key, number),)):
                if made and number in made and self.storages[mine].nbytes == old.nbytes:
                    self.storages[mine] = self.storages[mine]._replace(nbytes=spec.numel * DTYPE_BYTES[spec.dtype])
                yield Ref(mine, spec)


def _renamed(op: Op, of: Callable[[int], int], module: str) -> Op:
    return Op(
        op.name, tuple([Ref(of(ref.storage), ref.spec) for ref in op.inputs]), tuple([Ref(of(ref.storage), ref.spec) for ref in op.outputs]),
        module, op.phase, op.flops, tuple(map(of, op.allocates)), tuple(map(of, op.frees)), op.attrs,
    )  # fmt: skip
