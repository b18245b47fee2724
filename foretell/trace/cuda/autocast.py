"""CUDA's autocast on CPU fake tensors: which ops run in the lower precision, which in fp32.

PyTorch decides per device; the CPU's lists are shorter than CUDA's. The lists below are what CUDA does
(the op reference of torch.amp, and ATen/autocast_mode.h of torch 2.11 to 2.15), registered as Python kernels for the CPU's
autocast key where the CPU's own lists differ. A check on a real GPU holds the op lists equal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import IN_FLOAT32, NAMESPACE
from foretell.trace.cuda.versions import RMS_NORM_IN_FP32, holds

LOWER = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
    "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention",
)  # fmt: skip
"""Run in bf16 or fp16."""

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Inputs are cast up to fp32; from torch 2.12 on those of `rms_norm` too."""

FP32_BY_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Given `dtype=float32` unless the call names a dtype."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""Inputs are cast to the widest float dtype among them."""

_KEY = "AutocastCPU"
_LOW = (torch.bfloat16, torch.float16)


class _Casts:
    """The weight casts autocast remembers until its outermost context ends."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def lower(self, value: Any) -> Any:
        if not _is_float(value):
            return value
        dtype = torch.get_autocast_dtype("cpu")
        if value.dtype == dtype:
            return value
        remember = (
            torch.is_autocast_cache_enabled()
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
        )
        if not remember:
            return value.to(dtype)
        known = self.cache.get(id(value))
        if known is None or known[0] is not value:
            with torch.enable_grad():  # a pass without gradients may be the first to see the weight
                known = self.cache[id(value)] = (value, value.to(dtype))
        return known[1]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _upper(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


def _apply(function: Any, values: Any) -> Any:
    """Cast arguments last to first, the order in which the C++ kernels evaluate theirs."""
    if isinstance(values, (list, tuple)):
        return type(values)(reversed([_apply(function, value) for value in reversed(values)]))
    return function(values)


class CudaAutocast:
    """Installs the lists of a release of torch for as long as it is open: `with CudaAutocast("2.13.0") as casts: ...`.

    `casts.forget()` empties the weight cache; call it where an autocast context ends.
    """

    def __init__(self, release: str) -> None:
        self._upper = (*FP32, "rms_norm") if holds(RMS_NORM_IN_FP32, release) else FP32

    def __enter__(self) -> CudaAutocast:
        self._casts = _Casts()
        self._library = torch.library.Library("aten", "IMPL")
        self._guard = torch._C._ExcludeDispatchKeyGuard
        self._keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        known = {*LOWER, *self._upper, *FP32_BY_DTYPE, *PROMOTE}
        for name in _on_cpu():
            if name in known:
                continue
            self._library.impl(name, torch.library.fallthrough_kernel, _KEY, allow_override=True)
        for names, make in ((LOWER, self._lower), (self._upper, self._fp32), (FP32_BY_DTYPE, self._by_dtype), (PROMOTE, self._promote)):
            for name in names:
                overload = _overload(name)
                if overload is not None:
                    self._library.impl(name, make(overload), _KEY, allow_override=True)
        self._own = torch.library.Library(NAMESPACE, "IMPL")
        for op in IN_FLOAT32:
            self._own.impl(op.name().split("::")[1], self._fp32(op), _KEY)
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
        self._own._destroy()
        self.forget()

    def forget(self) -> None:
        self._casts.cache.clear()

    def _lower(self, op: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._guard(self._keys):
                return op(*_apply(self._casts.lower, args), **{k: _apply(self._casts.lower, v) for k, v in kwargs.items()})

        return kernel

    def _fp32(self, op: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._guard(self._keys):
                return op(*_apply(_upper, args), **{k: _apply(_upper, v) for k, v in kwargs.items()})

        return kernel

    def _by_dtype(self, op: Any) -> Any:
        position = [argument.name for argument in op._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._guard(self._keys):
                named = kwargs.get("dtype") or (args[position] if position < len(args) else None)
                if named is None and isinstance(args[0], Tensor) and args[0].dtype in _LOW:
                    args = args[:position]
                    kwargs["dtype"] = torch.float32
                return op(*args, **kwargs)

        return kernel

    def _promote(self, op: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._guard(self._keys):
                flat = torch.utils._pytree.tree_leaves((args, kwargs))
                if any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in flat):
                    args = _apply(_upper, args)
                return op(*args, **kwargs)

        return kernel


@functools.cache
def _on_cpu() -> tuple[str, ...]:
    """Ops that the CPU's autocast touches; those that CUDA's leaves alone must be left alone here."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(name for name in names if has_kernel(f"aten::{name}", _KEY))


def _overload(name: str) -> Any | None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None
