"""AdamW over all parameters in one launch, with clipping, a copy in 16 bits and zeroed gradients in the same pass.

    gradients ─► sum of squares ─► factor │ parameter, gradient, two moments ─► parameter, two moments, copy, zero
                    read once              │              each read and written once

`adamw_step` works on the states of the user's own `torch.optim.AdamW`, whose state dict stays what it is. Nothing waits for the device:
norm, factor, step counts and whether a step is skipped stay there, so that a CUDA graph can hold it. The clipped gradient is not
rounded to its own format before it is used, as it is by torch.

Bytes at the least, of N parameters in float32: 28N alone; 38N with the norm (4N), a copy in bfloat16 (2N) and zeros (4N).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.kernels.kernel import Shape, ShapeBucket, TrainingKernel, define

EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


# ---------------------------------------------------------------- in plain torch


def _plain_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], steps: Sequence[Tensor],
    copies: Sequence[Tensor], factor: Tensor | None, found_inf: Tensor | None, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool, zero: bool,
) -> None:  # fmt: skip
    """As torch.optim.AdamW does it for one tensor after another, bit for bit where nothing is clipped."""
    if found_inf is None or not bool(found_inf):
        for param, given, m, v, count in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
            grad = given if factor is None else given * factor
            grad = (-grad if maximize else grad).to(m.dtype)
            count += 1
            t = count.item()
            param.mul_(1 - lr * weight_decay)
            m.lerp_(grad, 1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            bound = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(eps)
            param.addcdiv_(m.to(param.dtype), bound.to(param.dtype), value=-lr / (1 - beta1**t))
        for param, copy in zip(params, copies, strict=bool(copies)):
            copy.copy_(param)
    for given in grads if zero else ():
        given.zero_()


def _plain_squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.to(torch.promote_types(one.dtype, torch.float32)).square().sum() for one in grads]).sum().to(torch.float32)


_adamw_ = define(
    "adamw_",
    "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] steps, Tensor(f!)[] copies, "
    "Tensor? factor, Tensor? found_inf, float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, bool zero) -> ()",
    plain=_plain_, triton="adamw.adamw_", fake=lambda *_: None,
)  # fmt: skip
_squares = define(
    "squares", "(Tensor[] grads) -> Tensor", plain=_plain_squares, triton="adamw.squares",
    fake=lambda grads: grads[0].new_empty((), dtype=torch.float32),
)  # fmt: skip


# ---------------------------------------------------------------- over an optimizer


@dataclass(frozen=True, kw_only=True)
class _AdamwGroup:
    """Tensors of one group of parameters that have gradients, and its settings."""

    tensors: tuple[list[Tensor], ...]
    """Parameters, gradients, two moments, step counts."""
    copies: list[Tensor]
    settings: tuple[float, ...]
    maximize: bool


def refusal(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer is left to torch; empty where it is not."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return f"it is a {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                return f"it has {name}"
        if isinstance(group["lr"], Tensor) or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "its lr or betas are tensors"
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.layout is not torch.strided or param.dtype not in (*KERNEL.dtypes, *([torch.float64] if param.is_cpu else [])):
                return f"a parameter is {param.dtype}" if param.grad.layout is torch.strided else "a gradient is sparse"
            state = optimizer.state.get(param, {})
            if not _alike(param, param.grad, *(state[key] for key in ("exp_avg", "exp_avg_sq") if key in state)):
                return "a gradient or state is laid out in another way than its parameter"
    return ""


@torch.no_grad()
def adamw_step(
    optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, norm: Tensor | None = None, copies: Mapping[Tensor, Tensor] | None = None,
    zero: bool = False, found_inf: Tensor | None = None, scale: Tensor | None = None, skip_nonfinite: bool = False,
) -> Tensor | None:  # fmt: skip
    """One step of a `torch.optim.AdamW`; returns the norm of its gradients where that is asked for, before clipping and without `scale`.

    `norm` is that of the whole gradient where other ranks hold parts of it; `scale` is what the loss was multiplied by; `copies` are
    tensors that get the new values; `zero` leaves zeros in the gradients. With `found_inf` of 1, or a norm that is not finite under
    `skip_nonfinite`, parameters and states stay. An optimizer that `refusal` names a reason for takes the same steps by torch's own ops.
    """
    if refusal(optimizer):
        return separate_step(
            optimizer, max_norm=max_norm, norm=norm, copies=copies, zero=zero, found_inf=found_inf, scale=scale, skip_nonfinite=skip_nonfinite
        )
    groups = [_group(optimizer, group, copies or {}) for group in optimizer.param_groups]
    groups = [one for one in groups if one.tensors[0]]
    if not groups:
        return norm
    if norm is None and (max_norm is not None or skip_nonfinite):
        norm = _squares([grad for one in groups for grad in one.tensors[1]]).sqrt()
        norm = norm if scale is None else norm / scale.float().reshape(())
    factor = _factor(norm, max_norm, scale)
    found_inf = _skip(found_inf, norm, skip_nonfinite)
    for one in groups:
        _adamw_(*one.tensors, one.copies, factor, found_inf, *one.settings, one.maximize, zero)
        for changed in (*one.tensors[0], *one.tensors[1]):
            torch.autograd.graph.increment_version(changed)
    optimizer._opt_called = True  # type: ignore[attr-defined] # what a learning rate scheduler asks for
    return norm


@torch.no_grad()
def separate_step(
    optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, norm: Tensor | None = None, copies: Mapping[Tensor, Tensor] | None = None,
    zero: bool = False, found_inf: Tensor | None = None, scale: Tensor | None = None, skip_nonfinite: bool = False,
) -> Tensor | None:  # fmt: skip
    """The same by torch's ops, one after another; what is skipped waits for the device."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if norm is None and (max_norm is not None or skip_nonfinite):
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        norm = norm if scale is None else norm / scale.float().reshape(())
    factor = _factor(norm, max_norm, scale)
    skip = _skip(found_inf, norm, skip_nonfinite)
    if skip is None or not bool(skip):
        if factor is not None and params:
            torch._foreach_mul_([p.grad for p in params], factor)
        optimizer.step()
        for p in params:
            if copies and p in copies:
                copies[p].copy_(p)
    if zero:
        optimizer.zero_grad(set_to_none=False)
    return norm


def _factor(norm: Tensor | None, max_norm: float | None, scale: Tensor | None) -> Tensor | None:
    """What gradients are multiplied by."""
    factor = None if scale is None else 1.0 / scale.float().reshape(())
    if norm is not None and max_norm is not None:
        clip = torch.clamp(max_norm / (norm + EPSILON), max=1.0).float()
        factor = clip if factor is None else factor * clip
    return factor


def _skip(found_inf: Tensor | None, norm: Tensor | None, skip_nonfinite: bool) -> Tensor | None:
    if not skip_nonfinite or norm is None:
        return None if found_inf is None else found_inf.float().reshape(())
    bad = (~norm.isfinite()).float()
    return bad if found_inf is None else torch.maximum(bad, found_inf.float().reshape(()))


def _group(optimizer: torch.optim.Optimizer, group: dict[str, Any], copies: Mapping[Tensor, Tensor]) -> _AdamwGroup:
    tensors: tuple[list[Tensor], ...] = ([], [], [], [], [])
    kept: list[Tensor] = []
    for param in group["params"]:
        if param.grad is None:
            continue
        state = _state(optimizer, param)
        for row, one in zip(tensors, (param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]), strict=True):
            row.append(_local(one))
        if copies:
            kept.append(_local(copies.get(param, param)))  # onto itself: nothing happens
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    return _AdamwGroup(
        tensors=tensors, copies=kept, settings=(float(group["lr"]), beta1, beta2, group["eps"], decay), maximize=bool(group["maximize"])
    )


def _state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """As torch makes it where there is none; a step count lives where its parameter does."""
    state: dict[str, Any] = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    if state["step"].device != param.device:
        state["step"] = state["step"].to(param.device, non_blocking=True)
    return state


def _local(tensor: Tensor) -> Tensor:
    one = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return one.detach()


def _alike(param: Tensor, *others: Tensor) -> bool:
    """Whether tensors have their elements in the same places, and without gaps."""
    one = _local(param)
    dense = one.is_contiguous() or torch.empty_like(one, device="meta").stride() == one.stride()
    return dense and all(_local(other).stride() == one.stride() for other in others)


# ---------------------------------------------------------------- where it serves


def shape_of(params: Sequence[Tensor], *_: Any) -> Shape:
    return {"elements": sum(one.numel() for one in params)}


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Parameters, gradients, moments and counts, in tensors as a transformer has them."""
    sizes, left = [], shape["elements"]
    while left:
        sizes.append(min(left, 1 << 24))
        left -= sizes[-1]
    make = [[torch.randn(size, dtype=dtype, device=device) for size in sizes] for _ in range(3)]
    squares = [torch.rand(size, dtype=dtype, device=device) for size in sizes]
    return *make, squares, [torch.ones((), device=device) for _ in sizes]


DECLARED = ({"elements": 10**9}, {"elements": 124 * 10**6})
BUCKETS = (ShapeBucket(name="all", limits={}, config={"warps": 8, "block": 2048, "norm_warps": 8, "norm_block": 8192}),)
KERNEL = TrainingKernel(
    name="adamw", says="AdamW with clipping, a copy in 16 bits and zeroed gradients", reference=separate_step, call=adamw_step, shape_of=shape_of,
    buckets=BUCKETS, dtypes=(torch.float32, torch.bfloat16, torch.float16), measured_at=DECLARED, draw=draw,
    floor_bytes=lambda shape, size: 7 * size * shape["elements"], saved_bytes=lambda shape, size: 0,
)  # fmt: skip
