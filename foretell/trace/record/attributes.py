"""What a cost rule needs of an op besides shapes and dtypes: its settings, and how its inputs lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
_LAYOUT_MATTERS = {
    *_CONVOLUTIONS, torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_layer_norm_backward.default,
    torch.ops.aten.embedding_dense_backward.default, torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim,
}  # fmt: skip
_ATTRS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.convolution.default: (3, 4, 5, 6, 7, 8),
    torch.ops.aten.convolution_backward.default: (4, 5, 6, 7, 8, 9, 10),
    torch.ops.aten.native_layer_norm.default: (),
    torch.ops.aten.native_layer_norm_backward.default: (),
    torch.ops.aten.embedding_dense_backward.default: (),
    torch.ops.aten.index_put.default: (3,),
    torch.ops.aten.index_put_.default: (3,),
    torch.ops.aten.sum.dim_IntList: (1, 2),
    torch.ops.aten.mean.dim: (1, 2),
    torch.ops.aten.roll.default: (1, 2),
    torch.ops.aten._fft_r2c.default: (1,),
    torch.ops.aten._fft_c2r.default: (1,),
    torch.ops.aten._fft_c2c.default: (1,),
    torch.ops.aten.sort.default: (1,),
    torch.ops.aten.topk.default: (2,),
    torch.ops.aten.cumsum.default: (1,),
    torch.ops.aten.cumprod.default: (1,),
    torch.ops.aten.cummax.default: (1,),
    torch.ops.aten.logcumsumexp.default: (1,),
    torch.ops.aten.multinomial.default: (1, 2),
    torch.ops.aten._unique2.default: (1, 2, 3),
    torch.ops.aten.unique_consecutive.default: (1, 2),
    torch.ops.aten.grid_sampler_2d.default: (2, 3, 4),
    torch.ops.aten.grid_sampler_3d.default: (2, 3, 4),
    torch.ops.aten.grid_sampler_2d_backward.default: (3, 4, 5, 6),
    torch.ops.aten.grid_sampler_3d_backward.default: (3, 4, 5, 6),
    torch.ops.aten._linalg_svd.default: (1, 2),
    torch.ops.aten._linalg_eigh.default: (2,),
    torch.ops.aten._cdist_forward.default: (2,),
    torch.ops.aten._cdist_backward.default: (3,),
    torch.ops.aten._scaled_dot_product_flash_attention.default: (3, 4),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: (5, 6),
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: (5, 6),
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: (10, 11),
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: (9, 11),
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: (13, 14),
}
"""Positions of the arguments a cost rule needs besides shapes."""
_UNREAD = frozenset(
    f"aten::{name}" for name in (
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
        "split", "split_with_sizes", "chunk", "detach", "alias", "as_strided", "unbind", "unfold", "diagonal", "real",
        "imag", "view_as_real", "view_as_complex", "_reshape_alias", "empty", "empty_like", "empty_strided",
        "new_empty", "new_empty_strided", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like",
        "new_zeros", "_local_scalar_dense", "zero_", "fill_",
    )
)  # fmt: skip
"""Ops that read no element of their inputs, so how those lie in memory costs nothing."""
_READS: dict[Any, bool] = {}
"""Overload → whether how its inputs lie in memory is written down."""


def keep_arguments(func: Any, positions: tuple[int, ...]) -> None:
    """Of an op that is defined elsewhere: the arguments that a cost rule needs besides shapes."""
    _ATTRS[func] = positions


def attributes(func: Any, args: Any) -> tuple[Any, ...]:
    """What a cost rule needs of an op's arguments besides shapes and dtypes."""
    positions = _ATTRS.get(func)
    if positions is None:
        return _layouts(func, args)
    flat: list[Any] = []
    for position in positions:
        value = args[position] if position < len(args) else None
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    scalars: tuple[Any, ...] = tuple(value for value in flat if isinstance(value, (bool, int, float)))
    if func in _CONVOLUTIONS:
        source = args[1] if func is torch.ops.aten.convolution_backward.default else args[0]
        scalars = (*scalars, is_channels_last(source))
    if func in _LAYOUT_MATTERS:
        scalars = (*scalars, *_strided(args))
    return (*scalars, *_layouts(func, args))


def _layouts(func: Any, args: Any) -> tuple[str, ...]:
    """`layout:` and a letter for every input, where one of them is not plainly contiguous."""
    reads = _READS.get(func)
    if reads is None:
        name = func._schema.name
        reads = name not in _UNREAD and not name.startswith(("aten::_foreach", "aten::_fused_adam", "aten::_fused_sgd"))
        _READS[func] = reads
    if not reads:
        return ()
    tensors = [value for value in args if isinstance(value, Tensor)]
    if len(tensors) != len(args):
        tensors = tensors_in(args)
    if all(tensor.layout is not torch.strided or tensor.is_contiguous() for tensor in tensors):
        return ()
    return (f"layout:{''.join([_layout(tensor) for tensor in tensors])}",)


def _layout(tensor: Tensor) -> str:
    """c contiguous, t last two dimensions swapped, l channels last, b expanded, s otherwise strided."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return "c"
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        return "b"
    if _is_swapped(sizes, strides):
        return "t"
    return "l" if is_channels_last(tensor) else "s"


def _is_swapped(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the tensor would be contiguous with its last two dimensions swapped."""
    if len(sizes) < 2:
        return False
    expected = 1
    order = [len(sizes) - 2, len(sizes) - 1, *range(len(sizes) - 3, -1, -1)]
    for dim in order:
        if sizes[dim] > 1 and strides[dim] != expected:
            return False
        expected *= sizes[dim]
    return True


def is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    )


def _strided(args: Any) -> Iterator[str]:
    """Marks for inputs that a kernel wanting dense ones has to copy."""
    for position, tensor in enumerate(tensors_in(args)):
        if not tensor.is_contiguous():
            yield f"strided:{position}"


def tensors_in(values: Any) -> list[Tensor]:
    """In order, out of lists, tuples and dicts in each other."""
    found: list[Tensor] = []
    _add((values,), found)
    return found


def _add(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _add(value, found)
        elif isinstance(value, dict):
            _add(value.values(), found)
