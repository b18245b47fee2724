"""Which attention kernel CUDA picks, and what the composite op does around it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from foretell.errors import ModelError
from foretell.trace.cuda.versions import DROPOUT_IN_CUDNN, holds

if TYPE_CHECKING:
    from foretell.trace.record.recorder import Recorder

_LOW = (torch.bfloat16, torch.float16)
_BACKENDS = {int(one.value): name for name, one in (
    ("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION), ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ("cudnn", SDPBackend.CUDNN_ATTENTION))}  # fmt: skip
_DEFAULT = ("flash", "efficient", "math", "cudnn")
"""The order of PyTorch where nobody asked for another; newer devices then try cuDNN first."""
_FUSED = (5, 0)
"""The oldest devices with a fused kernel."""
_SWITCHES = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled, "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled, "math": torch.backends.cuda.math_sdp_enabled,
}  # fmt: skip


def choose(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool,
    capability: tuple[int, int], grad: bool, release: str,
) -> str:  # fmt: skip
    """cudnn, flash, efficient or math, in the order CUDA tries them on this device under a release of torch.

    What the caller switched off (`sdpa_kernel`, `enable_flash_sdp`) is not tried; PyTorch raises where nothing is left.
    """
    if capability < _FUSED:
        return "math"
    order: tuple[str, ...] = _in_order()
    if order == _DEFAULT and capability[0] in (9, 10) and (not dropout or holds(DROPOUT_IN_CUDNN, release)):
        order = ("cudnn", *order[:-1])
    allowed = {name for name, is_on in _SWITCHES.items() if is_on()}
    strided = any(t.stride(-1) != 1 for t in (query, key, value, mask) if t is not None and t.shape[-1] > 1)
    able = {"cudnn": _cudnn, "flash": takes_flash, "efficient": _efficient}
    for name in order:
        if name not in allowed:
            continue
        if name == "math" or (not strided and able[name](query, key, value, mask, dropout, causal, gqa, capability, grad)):
            return name
    raise ModelError(
        f"no attention kernel that is switched on ({', '.join(sorted(allowed)) or 'none'}) can run this call on a device of compute capability "
        f"{capability[0]}.{capability[1]}: query {tuple(query.shape)} in {str(query.dtype).removeprefix('torch.')}"
        f"{' with a mask' if mask is not None else ''}",
        "name more backends in sdpa_kernel([...]); SDPBackend.MATH runs everything",
    )


def _same_heads(query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> bool:
    """No fused kernel broadcasts: samples are as many everywhere, and so are heads, unless groups of them were asked to share a key."""
    heads = {t.shape[1] for t in (key, value)}
    return len({t.shape[0] for t in (query, key, value)}) == 1 and (
        all(query.shape[1] % count == 0 for count in heads) if gqa else heads == {query.shape[1]}
    )


def _is_broadcast(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """A mask of two or four dimensions, each of full size or 1."""
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return mask.dim() in (2, 4) and all(size in (1, most) for size, most in zip(mask.shape[::-1], full[::-1], strict=False))


def _in_order() -> tuple[str, ...]:
    """What `sdpa_kernel(..., set_priority=True)` asks to be tried first."""
    return tuple(_BACKENDS[number] for number in torch._C._get_sdp_priority_order() if number in _BACKENDS)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool,
    capability: tuple[int, int], grad: bool,
) -> bool:  # fmt: skip
    head, head_value = query.shape[-1], value.shape[-1]
    limit = 256 if capability == (9, 0) else 192 if capability[0] == 10 and (head, head_value) == (192, 128) else 128
    return (
        query.dim() == 4
        and query.dtype in _LOW
        and head % 8 == 0
        and head_value % 8 == 0
        and head <= limit
        and head_value <= limit
        and key.shape[2] > 1
        and _same_heads(query, key, value, gqa)
        and not (dropout and query.shape[2] == 1)
        and not (mask is not None and (mask.requires_grad or not _is_broadcast(mask, query, key)))
    )


def takes_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool,
    capability: tuple[int, int], grad: bool,
) -> bool:  # fmt: skip
    head = query.shape[-1]
    little_shared = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        mask is None
        and capability >= (8, 0)
        and query.dim() == 4
        and query.dtype in _LOW
        and head == key.shape[-1] == value.shape[-1]
        and head <= 256
        and key.shape[1] == value.shape[1]
        and _same_heads(query, key, value, gqa)
        and not (causal and query.shape[-2] != key.shape[-2])
        and not (grad and little_shared and (192 < head <= 224 or (head > 224 and dropout)))
    )


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool,
    capability: tuple[int, int], grad: bool,
) -> bool:  # fmt: skip
    half = query.dtype in _LOW
    alignment = 1 if capability[0] < 7 else 8 if half else 4 if capability[0] >= 8 else 1
    head = query.shape[-1]
    return (
        query.dim() == 4
        and query.dtype in (*_LOW, torch.float32)
        and (query.dtype != torch.bfloat16 or capability >= (8, 0))
        and _same_heads(query, key, value, False)
        and head == key.shape[-1]
        and head % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def attention(
    recorder: Recorder, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    assert recorder.capability is not None
    backend = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, recorder.capability, grad, recorder.release)
    mask = _as_bias(attn_mask, query)
    if backend == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, grad, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == "flash":
        return run_flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, grad, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def run_flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Flash attention wants head sizes in multiples of 8: pad, run, cut."""
    head = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(head)
    missing = -head % 8
    if missing:
        query, key, value = (torch.constant_pad_nd(tensor, (0, missing)) for tensor in (query, key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return output[..., :head] if missing else output


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A boolean mask becomes an additive one of the query's dtype."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))


def _aligned(mask: Tensor) -> Tensor:
    """The last dimension of a bias, padded in memory to a multiple of 16 where it is not one of 8."""
    last = mask.shape[-1]
    if last % 8 == 0:
        return mask
    return torch.constant_pad_nd(mask, (0, 16 - last % 16))[..., :last]
