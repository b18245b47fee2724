"""Tensors that have a shape and no value: what a stage sees of everything that other stages compute.

A later stage runs the model's own forward from its beginning. What depends on parameters it does not hold is a ghost,
and what a ghost touches is a ghost; masks, positions and the like, which the micro-batch alone decides, are real. At
the stage's first block its ghosts get the values that the stage before sent, and from then on they act as these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from foretell.errors import UserError

_BY_SHAPE = {
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default,
}
"""Ops that read no value of their tensor: their result is real."""
_KNOWN_OPS = 4096
"""Results of so many ops are remembered; a model's glue has some tens."""


class Ghost(Tensor):
    """A tensor of another stage; acts as its value once it has one."""

    value: Tensor | None
    origin: str
    """What made it, for messages."""
    form: tuple[Any, ...]
    """Shape, stride, dtype, device: to be had without asking torch."""

    @staticmethod
    def __new__(cls, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, origin: str) -> Ghost:
        ghost: Ghost = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=False
        )
        ghost.value, ghost.origin, ghost.form = None, origin, (tuple(shape), tuple(stride), dtype, device)
        return ghost

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Ghost({self.origin})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = resolve((args, kwargs or {}))
        if not holds_ghost((args, kwargs)):
            return func(*args, **kwargs)
        if len(args) == 1 and getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            _refuse_writing(func, args, kwargs)
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next(leaf for leaf in tensors if isinstance(leaf, Ghost))
        if func in _BY_SHAPE:
            args, kwargs = _map_ghosts((args, kwargs), _shell)
            return func(*args, **kwargs)
        spec, outputs = _result(func, args, kwargs, first.origin)
        leaves = []
        for kind, what in outputs:
            made = tensors[what] if kind == "argument" else Ghost(*what, first.origin) if kind == "new" else what
            leaves.append(made)
        return pytree.tree_unflatten(leaves, spec)


def ghost_like(tensor: Tensor, origin: str, dtype: torch.dtype | None = None) -> Tensor:
    """A ghost of the same shape. A distributed tensor keeps its placements around a ghost of its local part."""
    return ghost_maker(tensor, origin, dtype)()


def ghost_maker(tensor: Tensor, origin: str, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """What makes such ghosts without keeping the tensor."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        local = ghost_maker(tensor._local_tensor, origin, dtype)
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return lambda: DTensor.from_local(local(), mesh, placements, run_check=False, shape=shape, stride=stride)
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    return functools.partial(Ghost, tuple(tensor.size()), tensor.stride(), dtype, tensor.device, origin)


def resolve(values: Any) -> Any:
    """The same structure with values in the place of ghosts that have one."""
    return _map_ghosts(values, lambda ghost: ghost if ghost.value is None else ghost.value)


def holds_ghost(values: Any) -> bool:
    return any(is_ghost(leaf) for leaf in leaves_of(values))


def is_ghost(value: Any) -> bool:
    """Whether it is a ghost without a value, or a distributed tensor around one."""
    if isinstance(value, Ghost):
        return value.value is None
    return isinstance(value, Tensor) and isinstance(getattr(value, "_local_tensor", None), Ghost)


# --- one op on ghosts ------------------------------------------------------------------------------------------------


def _result(func: Any, args: Any, kwargs: Any, origin: str) -> Any:
    """Shape of the result: computed on fake tensors the first time, remembered after that."""
    try:
        key: Hashable = (func, form_of(args), form_of(kwargs), torch.get_default_dtype())
        known = _results.get(key)
    except TypeError:
        key, known = None, None
    if known is None:
        known = _compute(func, args, kwargs, origin)
        if key is not None and len(_results) < _KNOWN_OPS:
            _results[key] = known
    return known


_results: dict[Hashable, Any] = {}


def _compute(func: Any, args: Any, kwargs: Any, origin: str) -> Any:
    tensors: list[Tensor] = []

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        tensors.append(made)
        return made

    with _disable_current_modes(), _fake_mode():
        args, kwargs = _map((args, kwargs), fake)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"forward reads the value of {origin} ({func}) on stages that do not compute it",
                "keep decisions that depend on activations inside the blocks, or leave out the pipeline",
            ) from error
    leaves, spec = pytree.tree_flatten(result)
    outputs: list[tuple[str, Any]] = []
    for leaf in leaves:
        place = next((index for index, tensor in enumerate(tensors) if tensor is leaf), None)
        if place is not None:
            outputs.append(("argument", place))
        elif isinstance(leaf, Tensor):
            outputs.append(("new", (leaf.size(), leaf.stride(), leaf.dtype, leaf.device)))
        else:
            outputs.append(("constant", leaf))
    return spec, outputs


@functools.cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def form_of(value: Any) -> Hashable:
    """What of a value decides the shape of a result."""
    if isinstance(value, Tensor):
        if isinstance(value, Ghost) and value.value is None:
            return value.form
        return tuple(value.size()), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of, value))
    if isinstance(value, dict):
        return tuple((key, form_of(item)) for key, item in value.items())
    return type(value), value


def _shell(ghost: Ghost) -> Tensor:
    """Memory of the same shape, its content not to be read."""
    return torch.empty_strided(ghost.size(), ghost.stride(), dtype=ghost.dtype, device=ghost.device)


def _refuse_writing(func: Any, args: Any, kwargs: Any) -> None:
    """A ghost written into a real tensor would leave it half real."""
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(given, Tensor) and not isinstance(given, Ghost):
            raise UserError(
                f"forward writes activations into a tensor in place ({func}) before the stage begins",
                "make a new tensor there, or leave out the pipeline",
            )


# --- structures of arguments: plain recursion, some times faster than pytree's ---------------------------------------


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_map(item, change) for item in value)
    if kind is dict:
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(_map(item, change) for item in value))
    return change(value)


def _map_ghosts(value: Any, change: Callable[[Ghost], Any]) -> Any:
    return _map(value, lambda leaf: change(leaf) if isinstance(leaf, Ghost) else leaf)
