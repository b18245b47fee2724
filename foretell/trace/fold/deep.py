"""Trace a deep stack of equal blocks from three shallow ones, and get the very trace of the full depth.

    depth d      F F F [R R R]       F F      F: tokens that are there at every depth
    depth d+1    F F F [R R R R]     F F      R: one block's worth, once more at every depth
    depth d+2    F F F [R R R R R]   F F

`extend` finds F and R, and what they are at any depth. Three depths give more equations than unknowns; where one does not
hold, or anything else is in doubt, the step is traced in full.

Shallow traces cannot show what happens at a place they do not reach. So the blocks must be equal in every attribute,
nothing else may hold them, and the model is called once at full depth with all blocks but the first left out, to see
that it treats them alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from foretell.trace import types
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.fold.extend import Doubt, extend
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import any_code, capture, no_initialisation
from foretell.trace.record.collection import no_collection
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import Workload, call_model, compute_loss

FEWEST = 48
"""Blocks from which on it is worth it: three shallow traces and a look at the model cost as much as some 30 blocks."""
SHALLOW = (7, 8, 9)
"""Depths that are traced."""


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
