"""A backward in two: first the gradients that the stage before waits for, later those of the weights.

In the first half nothing that forward kept goes: the graph stays for the second. What flows into a layer with weights
is kept for it too. In the second half each layer's tensors go as it is done, the rest at its end. A norm's backward runs
in both halves, each time for what that half wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from foretell.trace import types
from foretell.trace.fold.merged import MERGED
from foretell.trace.types import Op, Ref, Storage


def unshared(
    ops: Sequence[Op], storages: dict[int, Storage], sent: set[int], held: Callable[[int, int], bool]
) -> tuple[tuple[Op, ...], dict[int, int]]:
    """Ops whose additions do not write into a tensor that somebody else holds (storage, position), but make a new one.

    Also says which storage takes the place of which in the end; one that is sent on stays.
    """
    last = {ref.storage: place for place, op in enumerate(ops) for ref in (*op.inputs, *op.outputs)}
    born = {number for op in ops for number in op.allocates}
    twins: dict[int, int] = {}
    done: list[Op] = []

    def now(refs: Sequence[Ref]) -> tuple[Ref, ...]:
        return tuple(Ref(twins.get(ref.storage, ref.storage), ref.spec) for ref in refs)

    for position, op in enumerate(ops):
        inputs, allocates = now(op.inputs), op.allocates
        frees = [twins.get(number, number) for number in op.frees]
        target = op.outputs[0].storage if op.outputs else -1
        if op.name in ("aten.add.Tensor", MERGED) and target in last and target not in op.allocates and held(target, position):
            before = twins.get(target, target)
            frees += [before] if before != target or target in born else []
            twins[target] = max(storages) + 1
            storages[twins[target]] = storages[target]._replace(role=types.TEMPORARY)
            allocates = (*allocates, twins[target])
        frees += [twin for number, twin in twins.items() if last[number] == position and number not in sent]
        frees = list(dict.fromkeys(frees))
        done.append(replace(op, inputs=inputs, outputs=now(op.outputs), allocates=allocates, frees=tuple(frees)))
    return tuple(done), twins


def weight_readers(backward: Sequence[Op], sent: set[int], storages: Mapping[int, Storage]) -> dict[int, int]:
    """Storage → the first op for a weight's gradient that reads it."""
    born = {number for op in backward for number in op.allocates}
    weights = {number for number in born if storages[number].role == types.GRADIENT}
    first, _ = _leading_to(backward, sent, born)
    found: dict[int, int] = {}
    for position in sorted(_leading_to(backward, weights, born)[0]):
        if position not in first or _makes(backward[position], weights):
            for ref in backward[position].inputs:
                found.setdefault(ref.storage, position)
    return found


def halves(
    backward: Sequence[Op], sent: Iterable[int], storages: Mapping[int, Storage]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Gradients of inputs, and gradients of weights; `sent` are the storages of the former."""
    born = {number for op in backward for number in op.allocates}
    weights = {number for number in born if storages[number].role == types.GRADIENT}
    first, onward = _leading_to(backward, set(sent), born)
    second, _ = _leading_to(backward, weights, born)
    own = {position for position in second if position not in first or _makes(backward[position], weights)}
    inputs = [_only(op, onward | (born - weights)) if i in own else op for i, op in enumerate(backward) if i in first or i not in own]
    later = [_only(backward[i], born - onward) if i in first else backward[i] for i in sorted(own)]
    made_first = {number for op in inputs for number in op.allocates}
    return _first_half(inputs, later, made_first, set(sent)), _second_half(inputs, later, backward, set(sent), weights)


def _leading_to(ops: Sequence[Op], wanted: set[int], born: set[int]) -> tuple[set[int], set[int]]:
    """Positions of ops on the way to storages, and the storages of backward on that way."""
    needed = set(wanted)
    found: set[int] = set()
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        if any(ref.storage in needed for ref in op.outputs):
            found.add(position)
            needed.update(ref.storage for ref in op.inputs if ref.storage in born)
    return found, needed


def _makes(op: Op, wanted: set[int]) -> bool:
    return any(number in wanted for number in op.allocates)


def _only(op: Op, wanted: set[int]) -> Op:
    """The op for some of its outputs."""
    allocates = tuple(number for number in op.allocates if number in wanted)
    gone = set(op.allocates) - set(allocates)
    return replace(op, outputs=tuple(ref for ref in op.outputs if ref.storage not in gone), allocates=allocates)


def _first_half(inputs: Sequence[Op], later: Sequence[Op], made: set[int], sent: set[int]) -> tuple[Op, ...]:
    kept = {ref.storage for op in later for ref in op.inputs} | sent
    done = [replace(op, frees=tuple(number for number in op.frees if number in made and number not in kept)) for op in inputs]
    gone = {number for op in done for number in op.frees}
    left = [number for number in made if number not in gone and number not in kept]
    if left and done:
        done[-1] = replace(done[-1], frees=(*done[-1].frees, *left))
    return tuple(done)


def _second_half(
    inputs: Sequence[Op], later: Sequence[Op], backward: Sequence[Op], sent: set[int], weights: set[int]
) -> tuple[Op, ...]:
    last: dict[int, int] = {}
    for position, op in enumerate(later):
        last.update((ref.storage, position) for ref in (*op.inputs, *op.outputs))
    mortal = {number for op in backward for number in op.frees} - sent - weights
    freed = {number for op in _first_half(inputs, later, {n for op in inputs for n in op.allocates}, sent) for number in op.frees}
    dying: dict[int, list[int]] = {}
    for number in mortal - freed:
        dying.setdefault(last.get(number, len(later) - 1), []).append(number)
    return tuple(
        replace(op, frees=tuple(sorted(dying.get(position, ())))) for position, op in enumerate(later)
    )
