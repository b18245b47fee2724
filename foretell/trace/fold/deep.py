"""Trace a deep stack of equal blocks from three shallow ones, and get the very trace of the full depth.

    depth d      F F F [R R R]       F F      F: tokens that are there at every depth
    depth d+1    F F F [R R R R]     F F      R: one block's worth, once more at every depth
    depth d+2    F F F [R R R R R]   F F

A trace is read as streams of tokens: the head of an op, each tensor it reads and writes, each storage that is born
or dies, so that a list that grows with the depth (all weights, in one fused update) is a run like the ops of a layer.
An integer of a token in F must be affine in the depth, one in R affine in depth and place. Three depths give more
equations than unknowns; where one does not hold, or anything else is in doubt, the step is traced in full.

Shallow traces cannot show what happens at a place they do not reach. So the blocks must be equal in every attribute,
nothing else may hold them, and the model is called once at full depth with all blocks but the first left out, to see
that it treats them alike.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from foretell.trace import types
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.fold.repeats import join_path, split_path
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import any_code, capture, no_initialisation
from foretell.trace.record.collection import no_collection
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import Workload, call_model, compute_loss

FEWEST = 48
"""Blocks from which on it is worth it: three shallow traces and a look at the model cost as much as some 30 blocks."""
SHALLOW = (7, 8, 9)
"""Depths that are traced."""
_MARGIN = 2
"""Blocks at either end of a run that may differ from those inside in their integers."""


class Doubt(Exception):
    """Why a stack cannot be extended; the step is traced in full."""


def capture_deep(
    build: Callable[[], Workload],
    recipe: Recipe,
    *,
    capability: tuple[int, int] | None = (9, 0),
    hints: Mapping[str, float] | None = None,
) -> types.Trace:
    """What `capture` returns, sooner where the model is one deep stack of equal blocks."""
    try:
        return extended(build, recipe, capability=capability, hints=hints)
    except Exception:  # also whatever user code raises on a shortened model
        return capture(build, recipe, capability=capability, hints=hints)


def extended(
    build: Callable[[], Workload],
    recipe: Recipe,
    *,
    capability: tuple[int, int] | None = (9, 0),
    hints: Mapping[str, float] | None = None,
) -> types.Trace:
    """The full trace from shallow ones; raises `Doubt`, or what the user's code raises, where that is not safe."""
    if hints:
        raise Doubt("hints may name single blocks")
    with no_collection():
        with Recorder() as recorder, any_code(recorder, capability):
            with no_initialisation():
                workload = build()
            path, depth = find_stack(workload.model)
            if workload.losses is not None:
                raise Doubt("blocks run backward one by one")
            if any(len(prefix) > len(path) + 1 and prefix.startswith(f"{path}.") for prefix in recipe.freeze):
                raise Doubt("single blocks are frozen")
            blocks = find_blocks(workload.model)
            probe_depth(recorder, workload, path, recipe)
        del workload
        shallow = [
            capture(lambda d=d: shortened_to(build(), path, depth, d), recipe, capability=capability)  # type: ignore[misc]
            for d in SHALLOW
        ]
        trace = extend(shallow, depth - SHALLOW[0])
    if trace.meta["blocks"] != blocks:
        raise Doubt("the blocks found are not those of the full model")
    return trace


# --- the stack -------------------------------------------------------------------------------------------------------


def find_stack(model: nn.Module) -> tuple[str, int]:
    """Path and length of the one `ModuleList` of many equal blocks."""
    stacks = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= FEWEST
    ]
    if len(stacks) != 1:
        raise Doubt(f"{len(stacks)} deep stacks")
    path, stack = stacks[0]
    if type(stack) is not nn.ModuleList or not path or stack._parameters or stack._buffers:
        raise Doubt("not a plain ModuleList")
    if list(stack._modules) != [str(place) for place in range(len(stack))]:
        raise Doubt("the list is not numbered from 0")
    inside = [list(block.named_modules()) for block in stack]
    for parts in inside[1:]:
        _require_equal(inside[0], parts)
    _require_own(model, inside)
    return path, len(stack)


def _require_equal(first: list[tuple[str, nn.Module]], other: list[tuple[str, nn.Module]]) -> None:
    """The same modules with the same attributes, but for the tensors themselves."""
    if len(first) != len(other):
        raise Doubt("blocks of different structure")
    for (name, one), (other_name, two) in zip(first, other, strict=True):
        if name != other_name or type(one) is not type(two) or one.__dict__.keys() != two.__dict__.keys():
            raise Doubt(f"blocks differ in '{name}'")
        for key, value in one.__dict__.items():
            against = two.__dict__[key]
            if key in ("_parameters", "_buffers"):
                same = list(map(_looks, value.items())) == list(map(_looks, against.items()))
            elif key == "_modules":
                same = list(value) == list(against)
            else:
                same = value is against or (type(value) is type(against) and _PLAIN(value) and value == against)
            if not same:
                raise Doubt(f"blocks differ in '{name}' {key}")


def _looks(item: tuple[str, Tensor | None]) -> Any:
    name, tensor = item
    if tensor is None:
        return name, None
    hooks = bool(getattr(tensor, "_backward_hooks", None))
    return (
        name, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, hooks, vars(tensor).keys(),
    )  # fmt: skip


def _PLAIN(value: Any) -> bool:
    """Whether equality of two such values says that code cannot tell them apart."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_PLAIN, value))
    if isinstance(value, dict):
        return all(map(_PLAIN, value)) and all(map(_PLAIN, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.Size))


def _require_own(model: nn.Module, inside: list[list[tuple[str, nn.Module]]]) -> None:
    """No module and no tensor of a block is anywhere else in the model."""
    modules = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    tensors = [tensor for module in model.modules() for tensor in _own_tensors(module)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    held = {id(module) for parts in inside for _, module in parts}
    owned = {tensor.untyped_storage()._cdata for parts in inside for _, module in parts for tensor in _own_tensors(module)}
    if len(held) != sum(number in held for number in modules):
        raise Doubt("a module of a block is in more than one place")
    if len(owned) != sum(number in owned for number in storages):
        raise Doubt("a tensor of a block is in more than one place")


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def shortened_to(workload: Workload, path: str, depth: int, short: int) -> Workload:
    """The same with the first blocks only; nothing may hold on to the others."""
    if find_stack(workload.model) != (path, depth):
        raise Doubt("another model than before")
    _cut(workload.model, path, short)
    return workload


def _cut(model: nn.Module, path: str, short: int) -> None:
    stack = model.get_submodule(path)
    dropped = list(stack._modules.items())[short:]
    gone: list[weakref.ref[Any]] = []
    while dropped:
        name, block = dropped.pop()
        for module in block.modules():
            gone.append(weakref.ref(module))
            gone.extend(map(weakref.ref, _own_tensors(module)))
        module = None  # type: ignore[assignment]
        del stack._modules[name], block
    if any(reference() is not None for reference in gone):
        raise Doubt("something else holds on to a block")


# --- does the model treat its blocks alike? --------------------------------------------------------------------------


class _Log(TorchDispatchMode):
    """What the model does outside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[list[Any]] = [[]]
        self.inside = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            self.gaps[-1].append((str(func), [_shown(leaf) for leaf in tree_flatten((args, kwargs))[0]]))
        return result


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return type(leaf), leaf if _PLAIN(leaf) else id(leaf)


def probe_depth(recorder: Recorder, workload: Workload, path: str, recipe: Recipe) -> None:
    """Call the model with all blocks but the first left out, at full depth and at a shallow one, and compare."""
    workload.model.train(recipe.mode == "train")
    full_calls, full = _outline(workload, path, recipe)
    _cut(workload.model, path, SHALLOW[0])
    calls, short = _outline(workload, path, recipe)
    if any(call != full_calls[2] for call in full_calls[2:]) or any(gap != full[2] for gap in full[2:-1]):
        raise Doubt("the blocks are not called alike")
    if calls != full_calls[: SHALLOW[0]] or short[:-1] != full[: SHALLOW[0]]:
        raise Doubt("the shallow model calls its blocks otherwise")
    if [name for name, _ in short[-1]] != [name for name, _ in full[-1]]:
        raise Doubt("after the blocks the shallow model does something else")


def _outline(workload: Workload, path: str, recipe: Recipe) -> tuple[list[Any], list[list[Any]]]:
    """How each block is called, and what is done before, between and after them."""
    stack = workload.model.get_submodule(path)
    log = _Log()
    calls: list[Any] = []
    latest: list[Any] = []
    held: list[Any] = []  # so that no id is given twice

    def stand_in(place: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if place != len(calls):
                raise Doubt("blocks are not called once and in order")
            leaves, shape = tree_flatten((args, kwargs))
            before = {id(leaf): number for number, leaf in enumerate(tree_flatten(latest[-1])[0])} if latest else {}
            first = held[0] if held else []
            calls.append((str(shape), [
                (_shown(leaf), before.get(id(leaf)), number < len(first) and leaf is first[number])
                for number, leaf in enumerate(leaves)
            ]))  # fmt: skip
            held.append(leaves)
            log.inside = True
            result = tree_map_only(Tensor, torch.empty_like, latest[0]) if latest else plain(*args, **kwargs)
            log.inside = False
            if not all(isinstance(leaf, Tensor) or _PLAIN(leaf) for leaf in tree_flatten(result)[0]):
                raise Doubt("blocks return something else than tensors")
            latest.append(result)
            log.gaps.append([])
            return result

        return forward

    for place, block in enumerate(stack):
        if "forward" in vars(block):
            raise Doubt("a block has a forward of its own")
        block.forward = stand_in(place, block.forward)
    try:
        with torch.no_grad(), log:
            if recipe.mode == "infer":
                call_model(workload.model, workload.batch)
            else:
                compute_loss(workload)
    finally:
        for block in stack:
            vars(block).pop("forward", None)
    if len(calls) != len(stack):
        raise Doubt("not every block is called")
    return calls, log.gaps


# --- tokens ----------------------------------------------------------------------------------------------------------

_HEAD, _IN, _OUT, _BORN, _DEAD, _STORAGE, _NUMBER, _TEXT = range(8)


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


_COUNTS = ("parameters", "trainable")


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

_BYTE = [bytes([kind]) for kind in range(8)]
_OP = re.compile(rb"\x00(\x01*)(\x02*)(\x03*)(\x04*)")


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
