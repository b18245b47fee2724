"""torch.compile block by block: every block is a graph of its own, what lies around them stays eager. No torch.

    head, eager │ enter F0 leave │ enter F1 leave │ tail, loss, eager │ enter B1 leave │ enter B0 leave │ head', eager

What a block is given and what it returns lives as it does without compilation; inside, kernels and tensors are those
of the compiled graph (compiled_joint and the rest). Of equal blocks without a backward the first is compiled, and the others
are written down from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from foretell.trace import types
from foretell.trace.inductor.emit import Emitter
from foretell.trace.inductor.graph import BACKWARD, RECOMPUTE
from foretell.trace.inductor.joint import ProgramOps, join, touched, writes
from foretell.trace.inductor.partition import partition
from foretell.trace.types import Op, Ref, Storage

ENTER, LEAVE = "foretell.enter", "foretell.leave"

BlockOf = Callable[[Sequence[Op], Sequence[str]], list[str]]
"""Ops of a program and the paths of blocks → the block of every op, empty for none."""


def in_blocks(ops: Sequence[Op], blocks: Sequence[str], block_of: BlockOf, storages: dict[int, Storage]) -> Iterator[Op]:
    """The ops of one program with each block's forward under torch.compile; new storages are added."""
    where = block_of(ops, blocks)
    ops = _apart(ops, where, storages)
    late = [op.phase in (BACKWARD, RECOMPUTE) for op in ops]
    found: dict[tuple[str, bool], list[int]] = {}
    for position, block in enumerate(where):
        if block and not _adds(ops[position], storages, ops):
            found.setdefault((block, late[position]), []).append(position)
    written: dict[int, list[Op]] = {}
    taken: set[int] = set()
    readers = _readers(ops)
    alike: dict[object, _Written] = {}
    for block in dict.fromkeys(where):
        if not block:
            continue
        ahead, back = found.get((block, False), []), found.get((block, True), [])
        if ahead and not back:
            forward, backward = _forward(ops, ahead, storages, readers, block, alike), []
        else:
            forward, backward = _block(ops, ahead, back, storages, readers)
        if ahead:
            written[ahead[0]] = _entered(forward, "forward", block)
        if back:
            written[back[0]] = _entered(backward, "backward", block)
        taken.update(ahead, back)
    yield from _outlived(list(_whole(ops, written, taken, storages)))


def _whole(
    ops: Sequence[Op], written: Mapping[int, list[Op]], taken: set[int], storages: Mapping[int, Storage]
) -> Iterator[Op]:
    """The program with compiled blocks in their places; what lived inside them dies no more outside."""
    alive = {n for at, op in enumerate(ops) if at not in taken for n in op.allocates}
    alive.update(n for made in written.values() for op in made for n in op.allocates)
    given = set(storages) - {n for op in ops for n in op.allocates}
    for position, op in enumerate(ops):
        if position in written:
            yield from written[position]
        if position not in taken:
            yield replace(op, frees=tuple(n for n in op.frees if n in alive or n in given))


def _apart(ops: Sequence[Op], where: Sequence[str], storages: dict[int, Storage]) -> list[Op]:
    """With what one block writes into a tensor of another in a tensor of its own: a graph returns new tensors.

    Autograd adds the gradients of a residual stream in place, from block to block.
    """
    lasting = (types.PARAMETER, types.BUFFER, types.GRADIENT, types.INPUT)
    born: dict[int, str] = {}
    now: dict[int, int] = {}
    done: list[Op] = []
    free = max(storages) + 1
    for op, block in zip(ops, where, strict=True):
        new = set(op.allocates)
        inputs = tuple(ref._replace(storage=now.get(ref.storage, ref.storage)) for ref in op.inputs)
        frees = [now.get(number, number) for number in op.frees]
        allocates = list(op.allocates)
        for ref in op.outputs if writes(op) and block else ():
            if ref.storage in new or ref.storage not in born or storages[ref.storage].role in lasting:
                continue
            if born[ref.storage] != block:
                number, free = free, free + 1
                storages[number] = storages[ref.storage]
                frees = [now.get(ref.storage, ref.storage), *frees]
                now[ref.storage], born[ref.storage] = number, block
                allocates.append(number)
        outputs = tuple(ref._replace(storage=now.get(ref.storage, ref.storage)) for ref in op.outputs)
        born.update(dict.fromkeys(new, block))
        done.append(replace(op, inputs=inputs, outputs=outputs, allocates=tuple(allocates), frees=tuple(frees)))
    return done


def _outlived(ops: list[Op]) -> list[Op]:
    """With deaths no earlier than the last use: a graph may keep what the eager block did not."""
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        last.update(dict.fromkeys(touched(op), position))
    late: dict[int, list[int]] = {}
    early: set[tuple[int, int]] = set()
    for position, op in enumerate(ops):
        for number in op.frees:
            if last.get(number, -1) > position:
                late.setdefault(last[number], []).append(number)
                early.add((position, number))
    return [
        replace(op, frees=(*(n for n in op.frees if (at, n) not in early), *late.get(at, ())))
        if at in late or any((at, n) in early for n in op.frees) else op
        for at, op in enumerate(ops)
    ]  # fmt: skip


def _adds(op: Op, storages: dict[int, Storage], ops: Sequence[Op]) -> bool:
    """Whether an op adds to the gradient of an earlier micro-batch, as autograd does outside the graph."""
    held = [n for n in touched(op) if storages[n].role == types.GRADIENT]
    return bool(held) and not any(n in other.allocates for other in ops for n in held)


class _Written(NamedTuple):
    """A block that was compiled: its ops, whose storages these are, and those that it made."""

    block: str
    ops: list[Op]
    order: Mapping[int, int]
    """Storage → its place among those that the block touches."""
    first: int
    """The number of the first new storage; the others follow."""
    made: list[Storage]


def _forward(
    ops: Sequence[Op], ahead: Sequence[int], storages: dict[int, Storage], readers: Readers, block: str, alike: dict[object, _Written]
) -> list[Op]:
    """The forward of a block, compiled; or as that of an equal one, with its own storages."""
    order: dict[int, int] = {}
    mine = [ops[at] for at in ahead]
    for op in mine:
        for number in (*touched(op), *op.allocates, *op.frees):
            order.setdefault(number, len(order))
    outside, born = _read_outside(mine, set(ahead), readers), {n for op in mine for n in op.allocates}

    def within(module: str) -> tuple[bool, str]:
        inside = module == block or module.startswith(f"{block}.")
        return inside, module[len(block) :] if inside else module

    key = (
        tuple((op.name, tuple((order[ref.storage], ref.spec) for ref in op.inputs), tuple((order[ref.storage], ref.spec) for ref in op.outputs),
               within(op.module), op.phase, op.flops, tuple(order[n] for n in op.allocates), tuple(order[n] for n in op.frees), op.attrs)
              for op in mine),
        tuple((*storages[number]._replace(module=""), within(storages[number].module) if number in born else ()) for number in order),
        tuple((order[ref.storage], ref.spec, place) for _, place, ref in outside), tuple(at - outside[0][0] for at, _, _ in outside),
    )  # fmt: skip
    first = max(storages, default=0) + 1
    known = alike.get(key)
    if known is None:
        made = _block(ops, ahead, [], storages, readers)[0]
        alike[key] = _Written(block, made, order, first, [storages[number] for number in range(first, max(storages, default=0) + 1)])
        return made
    places = list(order)
    number_of = {old: places[place] for old, place in known.order.items()} | {known.first + place: first + place for place in range(len(known.made))}

    def here(module: str) -> str:
        return block + module[len(known.block) :] if module == known.block or module.startswith(f"{known.block}.") else module

    storages.update({first + place: one._replace(module=here(one.module)) for place, one in enumerate(known.made)})
    return [
        replace(
            op, inputs=tuple(Ref(number_of[ref.storage], ref.spec) for ref in op.inputs), module=here(op.module),
            outputs=tuple(Ref(number_of[ref.storage], ref.spec) for ref in op.outputs),
            allocates=tuple(number_of[n] for n in op.allocates), frees=tuple(number_of[n] for n in op.frees),
        ) for op in known.ops
    ]  # fmt: skip


Readers = Mapping[int, Sequence[tuple[int, int, Ref]]]
"""Storage → where it is read: the op's position, the input's place, and as what."""


def _readers(ops: Sequence[Op]) -> Readers:
    found: dict[int, list[tuple[int, int, Ref]]] = {}
    for position, op in enumerate(ops):
        for place, ref in enumerate(op.inputs):
            found.setdefault(ref.storage, []).append((position, place, ref))
    return found


def _read_outside(made: Sequence[Op], inside: set[int], readers: Readers) -> list[tuple[int, int, Ref]]:
    """What other ops read of what some allocate, in the order of these ops."""
    born = {n for op in made for n in op.allocates}
    return sorted((one for number in born for one in readers.get(number, ()) if one[0] not in inside), key=lambda one: one[:2])


def _block(
    ops: Sequence[Op], ahead: Sequence[int], back: Sequence[int], storages: dict[int, Storage], readers: Readers
) -> tuple[list[Op], list[Op]]:
    """Forward and backward of one block, compiled."""
    inside = {*ahead, *back}
    forward, backward = [ops[at] for at in ahead], [ops[at] for at in back]
    between = ops[ahead[-1] + 1 if ahead else 0 : back[0]] if back else ()
    returned: dict[int, Ref] = {}
    first: dict[int, int] = {}
    for position, _, ref in _read_outside(forward, inside, readers):
        if first.setdefault(ref.storage, position) == position:  # the last view that the first op reads
            returned[ref.storage] = ref
    read = tuple(ref for _, _, ref in _read_outside(backward, inside, readers))
    after = [Op("foretell.output", read, (), "", BACKWARD, 0)]
    parts = ProgramOps(forward, between, backward, after, list(returned.values()))
    joint = join(parts, storages)
    free = {
        node.index for number, node in joint.inputs.items()
        if storages[number].role in (types.PARAMETER, types.BUFFER) and node in joint.graph.nodes
    }  # fmt: skip
    nodes = joint.graph.nodes
    split = partition(nodes, [*joint.outputs.values(), *joint.mutations.values()], list(joint.gradients.values()), free)
    emitter = Emitter(storages, joint)
    made = emitter.forward(split.forward, split.saved), emitter.backward(split.backward)
    gone = {n for half in made for op in half for n in op.frees}
    owned = {n for op in (*forward, *backward) for n in op.allocates} - returned.keys() - joint.gradients.keys()
    return tuple(  # type: ignore[return-value]
        _ending(half, [n for op in eager for n in op.frees if n not in owned and n not in gone])
        for half, eager in zip(made, (forward, backward), strict=True)
    )


def _ending(ops: list[Op], dying: Sequence[int]) -> list[Op]:
    """Ops with deaths at their end."""
    if not ops or not dying:
        return ops
    return [*ops[:-1], replace(ops[-1], frees=(*ops[-1].frees, *dict.fromkeys(dying)))]


def _entered(ops: list[Op], phase: str, block: str) -> list[Op]:
    return [Op(ENTER, (), (), block, phase, 0), *ops, Op(LEAVE, (), (), block, phase, 0)] if ops else []
