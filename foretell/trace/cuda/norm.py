"""Normalisation, dropout and softmax as CUDA runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretell.trace.record.recorder import Recorder


def dropout(_: Recorder, input: Tensor, p: float, train: bool) -> Tensor:
    """One fused kernel that keeps a boolean mask, where the CPU multiplies by a float mask."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.ops.aten.native_dropout(input, p, train)[0]


def softmax(_: Recorder, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """fp16 to fp32 happens inside the kernel; every other change of dtype is a cast before it."""
    if dtype == torch.float32 and input.dtype == torch.float16:
        return torch.ops.aten._softmax(input, dim, True)
    return torch.ops.aten._softmax(input if dtype is None else input.to(dtype), dim, False)


def log_softmax(_: Recorder, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """As `softmax`."""
    if dtype == torch.float32 and input.dtype == torch.float16:
        return torch.ops.aten._log_softmax(input, dim, True)
    return torch.ops.aten._log_softmax(input if dtype is None else input.to(dtype), dim, False)


class _RmsNorm(torch.autograd.Function):
    """`_fused_rms_norm`: keeps the reciprocal deviation of every row."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, input: Tensor, shape: list[int], weight: Tensor | None, eps: Any) -> Tensor:
        rows = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
        output, deviation = recorder.emit(
            "aten._fused_rms_norm.default",
            (input, weight),
            lambda: (torch.empty_like(input), torch.empty(rows, dtype=torch.float32)),
        )
        ctx.recorder, ctx.detaches = recorder, torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        ctx.save_for_backward(input, weight, deviation.detach() if ctx.detaches else deviation)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, deviation = ctx.saved_tensors
        if ctx.detaches:
            deviation = deviation.detach()
        wants_weight = weight is not None and ctx.needs_input_grad[3]
        grad_input, grad_weight = ctx.recorder.emit(
            "aten._fused_rms_norm_backward.default",
            (grad, input, deviation, weight),
            lambda: (
                torch.empty_like(input) if ctx.needs_input_grad[1] else None,
                torch.empty_like(weight) if wants_weight else None,
            ),
        )
        return None, grad_input, None, grad_weight, None


def _rms_norm_in_parts(input: Tensor, dims: int, weight: Tensor, eps: float | None) -> Tensor:
    wide = input.to(torch.float32)
    axes = list(range(-dims, 0))
    mean = wide.pow(2).mean(axes, keepdim=True)
    scale = torch.rsqrt(torch.ops.aten.add_.Scalar(mean, torch.finfo(input.dtype).eps if eps is None else eps))
    return wide.mul(scale).mul(weight).to(input.dtype)


def rms_norm(
    recorder: Recorder, input: Tensor, normalized_shape: list[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:  # fmt: skip
    """One kernel where weight and input are of one dtype, and op by op in fp32 where they are not."""
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm_in_parts(input, len(normalized_shape), weight, eps)
    return _RmsNorm.apply(recorder, input, normalized_shape, weight, eps)


def batch_norm(
    recorder: Recorder, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """cuDNN's kernel for fp32 and fp16 images in training; PyTorch's own otherwise."""
    cudnn = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and input.dim() >= 3
        and input.dtype != torch.bfloat16
        and (input.dtype == torch.float32 or weight.dtype == torch.float32)
        and (running_mean is not None or training)
        and input.shape[0] <= (880801 if training else 65535)
    )
    if cudnn:
        op = torch.ops.aten.cudnn_batch_norm
    else:
        op = torch.ops.aten.native_batch_norm
        torch.empty(0, dtype=torch.uint8)  # the reserve that only cuDNN fills
    return op(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def one_hot(_: Recorder, input: Tensor, num_classes: int = -1) -> Tensor:
    """Zeros and a scatter; on fake tensors PyTorch would compare with a range instead."""
    if num_classes <= 0:
        num_classes = int(input.max().item()) + 1
    return torch.zeros((*input.shape, num_classes), dtype=torch.int64).scatter_(-1, input.unsqueeze(-1), 1)
