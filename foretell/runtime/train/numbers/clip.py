"""The norm of the whole gradient, wherever its pieces lie, and gradients scaled down to a limit.

Every piece is held by some number of ranks. Each rank adds the squares of the pieces it has, each divided by that
number, and one sum over all ranks gives the square of the true norm: whatever the mix of sharded, replicated,
tensor-split and staged parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


def holders(parameter: Tensor, ranks_of_stage: int) -> int:
    """How many of the ranks that hold a stage hold the same piece of a parameter."""
    if not isinstance(parameter, DTensor):
        return ranks_of_stage
    pieces = 1
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard | _StridedShard):
            pieces *= parameter.device_mesh.size(dim)
    return ranks_of_stage // pieces


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Bring gradients that are still partial sums, or laid out in another way, to the layout of their parameter."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(parameter.device_mesh, parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """The piece that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squares(
    parameters: Iterable[nn.Parameter], weights: Mapping[nn.Parameter, float], known: Mapping[nn.Parameter, Tensor] | None = None
) -> Tensor | None:
    """This rank's share of the squared norm, in fp32; None where it has no gradient. `known` are norms of gradients that
    are not on the device any more."""
    known, held = known or {}, list(parameters)
    here = [p for p in held if p.grad is not None]
    grads = [local(p.grad) for p in here if p.grad is not None]
    norms = dict(known) | dict(zip(here, torch._foreach_norm(grads, 2, dtype=torch.float32) if grads else (), strict=True))
    found = [(norms[p], weights[p]) for p in held if p in norms]
    if not found:
        return None
    total = None
    for weight in sorted({weight for _, weight in found}):
        part = torch.stack([norm for norm, own in found if own == weight]).square().sum() * weight
        total = part if total is None else total + part
    return total


def factor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of that norm are multiplied by."""
    return torch.clamp(limit / (norm + EPSILON), max=1.0)


def scale(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Multiply all gradients so that their norm is at most the limit; nothing waits for the device."""
    multiply(parameters, factor(norm, limit))


def multiply(parameters: Iterable[nn.Parameter], share: Tensor) -> None:
    """Multiply all gradients in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, share.to(dtype))
