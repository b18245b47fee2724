"""Three traces of equal blocks, one block apart in depth, extended to any depth.

A trace is read as streams of tokens: the head of an op, each tensor it reads and writes, each storage that is born
or dies, so that a list that grows with the depth (all weights, in one fused update) is a run like the ops of a layer.
An integer of a token that is there at every depth must be affine in the depth, one of a block affine in depth and place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from foretell.trace import types
from foretell.trace.fold.repeats import join_path, split_path

_MARGIN = 2
"""Blocks at either end of a run that may differ from those inside in their integers."""
_HEAD, _IN, _OUT, _BORN, _DEAD, _STORAGE, _NUMBER, _TEXT = range(8)
_COUNTS = ("parameters", "trainable")
_BYTE = [bytes([kind]) for kind in range(8)]
_OP = re.compile(rb"\x00(\x01*)(\x02*)(\x03*)(\x04*)")


class Doubt(Exception):
    """Why a stack cannot be extended; the step is traced in full."""


class Token(NamedTuple):
    """A piece of a trace: all of it but its integers, and those."""

    kind: int
    sign: Any
    """What must be equal for two tokens to be the same at two depths or in two blocks.

    Of a tensor it says what its storage is for, whose it is, and whether it is younger than the one before: where
    an op reads several lists of alike tensors, that tells one list from the next.
    """
    slots: tuple[int, ...]


def _streams(trace: types.Trace) -> dict[str, list[Token]]:
    ids = {
        number: (storage.nbytes, storage.role, split_path(storage.module)[0]) for number, storage in trace.storages.items()
    }
    streams = {f"program {name}": list(_op_tokens(program.ops, ids)) for name, program in trace.programs.items()}
    streams["storages"] = [_storage_token(*pair) for pair in trace.storages.items()]
    streams["resident"] = [Token(_NUMBER, ids[number], (number,)) for number in trace.resident]
    streams["blocks"] = [Token(_TEXT, *split_path(path)) for path in trace.meta["blocks"]]  # type: ignore[attr-defined]
    streams["counts"] = [Token(_NUMBER, name, (trace.meta[name],)) for name in _COUNTS]  # type: ignore[arg-type]
    return streams


def _op_tokens(ops: Sequence[types.Op], ids: Mapping[int, Any]) -> Iterator[Token]:
    for op in ops:
        path, numbers = split_path(op.module)
        attrs = tuple((type(value), value) for value in op.attrs)
        yield Token(_HEAD, (op.name, path, op.phase, attrs, op.flops), numbers)
        for kind, refs in ((_IN, op.inputs), (_OUT, op.outputs)):
            last = -1
            for number, spec in refs:
                yield Token(kind, (spec, number > last, *ids[number][1:]), (number,))
                last = number
        for number in op.allocates:
            yield Token(_BORN, ids[number], (number,))
        for number in op.frees:
            yield Token(_DEAD, ids[number], (number,))


def _storage_token(number: int, storage: types.Storage) -> Token:
    path, numbers = split_path(storage.module)
    return Token(_STORAGE, (path, storage._replace(module="")), (number, *numbers))


def _softened(token: Token) -> Token:
    """The token with its sizes among its integers: those of a tensor with one entry for each weight, for example."""
    kind, sign, slots = token
    if kind == _HEAD and sign[4] is not None:
        return Token(kind, ("soft", *sign[:4]), (*slots, sign[4]))
    if kind in (_IN, _OUT):
        spec, *rest = sign
        return Token(kind, ("soft", spec.dtype, len(spec.shape), *rest), (*slots, *spec.shape))
    if kind in (_BORN, _DEAD):
        return Token(kind, ("soft", *sign[1:]), (*slots, sign[0]))
    if kind == _STORAGE:
        return Token(kind, ("soft", sign[0], sign[1]._replace(nbytes=0)), (*slots, sign[1].nbytes))
    return token


# --- extending -------------------------------------------------------------------------------------------------------


def extend(shallow: Sequence[types.Trace], more: int) -> types.Trace:
    """The trace `more` blocks deeper than the first of three that are one block apart."""
    first = shallow[0]
    _require_alike(shallow)
    streams = [_streams(trace) for trace in shallow]
    made = {
        name: _extended_stream([each[name] for each in streams], more) for name in streams[0]
    }
    counts = dict(zip(_COUNTS, made["counts"][1], strict=True))
    return types.Trace(
        programs={
            key: types.Program(program.name, _join_ops(*made[f"program {key}"])) for key, program in first.programs.items()
        },
        schedule=first.schedule,
        storages=dict(made["storages"][1]),
        resident=tuple(made["resident"][1]),
        meta={**first.meta, "blocks": made["blocks"][1], **counts},
    )


def _require_alike(shallow: Sequence[types.Trace]) -> None:
    """All that does not grow is the same at every depth."""
    for trace in shallow[1:]:
        one, two = shallow[0], trace
        rest = [{key: value for key, value in each.meta.items() if key not in (*_COUNTS, "blocks")} for each in (one, two)]
        names = [[(key, program.name) for key, program in each.programs.items()] for each in (one, two)]
        if one.schedule != two.schedule or names[0] != names[1] or repr(rest[0]) != repr(rest[1]):
            raise Doubt("the traces differ in more than their depth")


def _extended_stream(depths: list[list[Token]], more: int) -> tuple[bytes, list[Any]]:
    """Kinds and values of a stream `more` blocks deeper, given those of three depths."""
    common = set.intersection(*({token[:2] for token in tokens} for tokens in depths))
    depths = [[token if token[:2] in common else _softened(token) for token in tokens] for tokens in depths]
    known: dict[Any, int] = {}
    signs = [[known.setdefault(token[:2], len(known)) for token in tokens] for tokens in depths]
    kinds: list[bytes] = []
    values: list[Any] = []
    done = [0, 0, 0]
    for starts, width, count in _runs(signs):
        _fixed(depths, done, starts, more, kinds, values)
        _repeated(depths, starts, width, count, more, kinds, values)
        done = [start + width * (count + extra) for extra, start in enumerate(starts)]
    _fixed(depths, done, [len(tokens) for tokens in depths], more, kinds, values)
    return b"".join(kinds), values


def _runs(signs: list[list[int]]) -> Iterator[tuple[list[int], int, int]]:
    """Where the streams grow: start at each depth, width, and how often it is there at the first depth."""
    a, b, c = signs
    inserted, again = _insertions(a, b), _insertions(b, c)
    low = moved = 0
    if len(inserted) != len(again):
        raise Doubt("the streams do not grow alike")
    for (end, width), (end_again, width_again) in zip(inserted, again, strict=True):
        if width != width_again or end_again != end + moved + width:
            raise Doubt("the streams do not grow alike")
        start = end - width
        while start > low and a[start - 1] == a[start - 1 + width]:
            start -= 1
        reps = (end - start) // width
        count = reps - 2 * _MARGIN
        if count < 1:
            raise Doubt("too few blocks are alike")
        begin = end - (reps - _MARGIN) * width
        yield [begin, begin + moved, begin + 2 * moved], width, count
        low = begin + count * width
        moved += width


def _insertions(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """(end, width) of the stretches of `a` that are there once more in `b`."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while True:
        same = _common(a, i, b, j)
        i, j = i + same, j + same
        if i == len(a) and j == len(b):
            return found
        extra = (len(b) - j) - (len(a) - i)
        best = (-1, 0)
        for width in range(1, min(extra, j) + 1):
            if i < len(a):
                if b[j + width] != a[i]:
                    continue
            elif width != extra:
                continue
            if b[j] == b[j - width] and b[j : j + width] == b[j - width : j]:
                best = max(best, (_common(a, i, b, j + width), -width))
        if best[0] < 0:
            raise Doubt("a stream does not grow by whole blocks")
        found.append((i, -best[1]))
        j -= best[1]


def _common(a: list[int], i: int, b: list[int], j: int) -> int:
    """How many are equal from these places on."""
    start, step = i, 64
    while step:
        if i + step <= len(a) and j + step <= len(b) and a[i : i + step] == b[j : j + step]:
            i, j, step = i + step, j + step, step * 2
        else:
            step //= 2
    return i - start


def _fixed(
    depths: list[list[Token]], begin: list[int], end: list[int], more: int, kinds: list[bytes], values: list[Any]
) -> None:
    for a, b, c in zip(*(tokens[x:y] for tokens, x, y in zip(depths, begin, end, strict=True)), strict=True):
        kinds.append(_BYTE[a.kind])
        values.append(_value(a, tuple(_affine(x, y, z, more) for x, y, z in zip(a.slots, b.slots, c.slots, strict=True))))


def _affine(x: int, y: int, z: int, more: int) -> int:
    if z - y != y - x:
        raise Doubt("an integer is not affine in the depth")
    return x + (y - x) * more


def _repeated(
    depths: list[list[Token]], starts: list[int], width: int, count: int, more: int, kinds: list[bytes], values: list[Any]
) -> None:
    total = count + more
    laid: list[Any] = [None] * (width * total)
    for place in range(width):
        columns = [
            [token.slots for token in tokens[start + place : start + place + width * (count + extra) : width]]
            for extra, (tokens, start) in enumerate(zip(depths, starts, strict=True))
        ]
        token = depths[0][starts[0] + place]
        slots = []
        for number in range(len(token.slots)):
            rows = [[each[number] for each in column] for column in columns]
            step = rows[2][1] - rows[2][0]
            for row in rows:
                if row != list(_column(row[0], step, len(row))):
                    raise Doubt("an integer is not affine in the place of its block")
            slots.append(_column(_affine(rows[0][0], rows[1][0], rows[2][0], more), step, total))
        laid[place::width] = _values(token, slots, total)
    kinds.append(bytes(token.kind for token in depths[0][starts[0] : starts[0] + width]) * total)
    values.extend(laid)


def _column(base: int, step: int, count: int) -> Sequence[int]:
    return range(base, base + step * count, step) if step else (base,) * count


# --- from tokens to a trace ------------------------------------------------------------------------------------------


def _values(token: Token, slots: list[Sequence[int]], count: int) -> Sequence[Any]:
    """What a token stands for in each of its repetitions."""
    if token.kind in (_IN, _OUT) and len(slots) == 1:
        return list(map(types.Ref, slots[0], repeat(token.sign[0])))
    if token.kind in (_BORN, _DEAD, _NUMBER):
        return slots[0]
    return [_value(token, row) for row in zip(*slots, strict=True)] if slots else [_value(token, ())] * count


def _value(token: Token, slots: tuple[int, ...]) -> Any:
    """What a token with these integers stands for."""
    kind, sign, _ = token
    if kind in (_BORN, _DEAD, _NUMBER):
        return slots[0]
    soft = isinstance(sign, tuple) and sign[:1] == ("soft",)
    if kind in (_IN, _OUT):
        return types.Ref(slots[0], types.TensorSpec(slots[1:], sign[1]) if soft else sign[0])
    if kind == _HEAD:
        if soft:
            sign, slots = (*sign[1:], slots[-1]), slots[:-1]
        name, path, phase, attrs, flops = sign
        return name, join_path(path, slots), phase, flops, tuple(value for _, value in attrs)
    if kind == _STORAGE:
        path, storage = sign[-2:]
        if soft:
            storage, slots = storage._replace(nbytes=slots[-1]), slots[:-1]
        return slots[0], storage._replace(module=join_path(path, slots[1:]))
    return join_path(sign, slots)


def _join_ops(kinds: bytes, values: list[Any]) -> tuple[types.Op, ...]:
    ops = []
    done = 0
    for found in _OP.finditer(kinds):
        start, (a, b, c, d) = found.start(), (found.end(group) for group in (1, 2, 3, 4))
        if start != done:
            raise Doubt("tokens do not make ops")
        name, module, phase, flops, attrs = values[start]
        ops.append(types.Op(
            name, tuple(values[start + 1 : a]), tuple(values[a:b]), module, phase, flops,
            tuple(values[b:c]), tuple(values[c:d]), attrs,
        ))  # fmt: skip
        done = d
    if done != len(kinds):
        raise Doubt("tokens do not make ops")
    return tuple(ops)
