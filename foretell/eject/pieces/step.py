"""One step"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from foretell.eject.pieces.loss import one_loss
from foretell.eject.pieces.pipeline import Stage, add_tied
from foretell.eject.pieces.scale import SCALER
from foretell.eject.pieces.settings import ACCUMULATE, CLIP, CUTS, MESH, TIED


def learning_rate(step: int, *, peak: float, steps: int, warmup: int, kind: str) -> float:
    """A straight rise, then level (constant), a cosine to a tenth, or level and straight down to 0 (wsd)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    first = warmup if kind == "cosine" else max(warmup, steps - round(0.2 * steps))
    left = steps - 1 - first
    done = min(1.0, max(0.0, (step - first) / left)) if left > 0 else float(step > first)
    if kind == "cosine":
        return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    return peak * (1 - done)


def by_mesh(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:  # if: tp
    """Fused and foreach operations take tensors of one mesh at a time."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return groups


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in by_mesh(parameters).values()]  # if: tp
    return torch.optim.AdamW(parameters, lr=1e-4, OPTIONS=True)  # if: adamw
    return torch.optim.Adam(parameters, lr=1e-4, OPTIONS=True)  # if: adam
    return torch.optim.SGD(parameters, lr=1e-3, OPTIONS=True)  # if: sgd
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, OPTIONS=True)  # if: momentum


def clip_stages(stages: nn.ModuleList, mesh: DeviceMesh, device: torch.device) -> None:  # if: clip and pp
    """Scale the gradients so that the norm of all of them, over all stages, is at most CLIP."""
    again = {stage.model.get_parameter(name) for stage in stages if stage.index == len(CUTS) for name in TIED}  # if: tied
    counted = [p.grad for p in stages.parameters() if p.grad is not None and p not in again]  # if: tied
    counted = [p.grad for p in stages.parameters() if p.grad is not None]  # if: not tied
    norm = get_total_norm(counted)
    total = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    dist.all_reduce(total, group=mesh.get_group("pp"))
    clip_grads_with_norm_(stages.parameters(), CLIP, total.sqrt())


def clip_meshes(parameters: list[nn.Parameter]) -> None:  # if: clip and tp
    """Scale the gradients so that the norm of all of them together is at most CLIP."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [get_total_norm(group) for group in by_mesh(grads).values()]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in by_mesh(parameters).values():
        clip_grads_with_norm_(group, CLIP, total)


def settle(parameters: list[nn.Parameter]) -> None:  # if: tp
    """Sum gradients that are still a share of the whole on every rank."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def backward_one(model: nn.Module, batch: Any, device: torch.device) -> Tensor:  # if: not pp
    """Gradients of one micro-batch's share of the mean loss; returns that share."""
    with loss_parallel():  # if: loss_parallel
        loss = one_loss(model, batch, device)
        loss.backward()  # if: not fp16
        (loss * SCALER.scale).backward()  # if: fp16
    loss = one_loss(model, batch, device)  # if: not loss_parallel
    loss.backward()  # if: not loss_parallel and not fp16
    (loss * SCALER.scale).backward()  # if: not loss_parallel and fp16
    return loss.detach().full_tensor()  # if: loss_parallel
    return loss.detach()  # if: not loss_parallel


def backward(model: nn.Module, batches: list[Any], device: torch.device) -> Tensor:  # if: not pp
    """Gradients of the mean loss over the micro-batches; returns that mean."""
    total = torch.zeros((), device=device)
    for turn, batch in enumerate(batches):  # if: hybrid
        model.set_requires_all_reduce(turn == ACCUMULATE - 1)
        total += backward_one(model, batch, device)
    for batch in batches:  # if: not hybrid
        total += backward_one(model, batch, device)
    return total


def backward_stages(schedule: Any, stages: list[Stage], batches: list[dict[str, Tensor]], mesh: DeviceMesh) -> Tensor:  # if: pp
    """Gradients of the mean loss over the micro-batches; returns that mean on the last stage, 0 elsewhere."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    has_last = stages[-1].index == len(CUTS)
    losses: list[Tensor] = []
    # The loss comes out of the last stage; the target only says that there is one.
    schedule.step(target=torch.arange(ACCUMULATE) if has_last else None, losses=losses, return_outputs=False, **whole)
    add_tied(stages, mesh)  # if: tied
    total = torch.stack([loss.detach() for loss in losses]).sum() if has_last else torch.zeros((), device=stages[0].device)
    return total / SCALER.scale  # if: fp16
    return total  # if: not fp16


def mean_loss(loss: Tensor) -> Tensor:  # if: several
    """Over the data ranks, the same on every rank."""
    dist.all_reduce(loss)
    for axis in ("dp_replicate", "dp_shard", "tp"):
        loss /= MESH.get(axis, 1)
    return loss
