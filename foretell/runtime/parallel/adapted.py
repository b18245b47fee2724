"""Adapters of a plan on its model, as they are traced, and which base they are trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from foretell.checkpoint.format import TensorMeta
from foretell.checkpoint.peft_files import AdapterFile, refuse_unlike
from foretell.checkpoint.tree import dtype_name
from foretell.plan.types import Plan
from foretell.trace.record.step import prepare_weights

_LOOKED_AT = 4096
"""Elements of a tensor that its digest is made of, first and last ones among them."""


def put_on(model: nn.Module, plan: Plan, start: AdapterFile | None = None) -> str:
    """Cast a model as its plan says and put the plan's adapters on it, in place; returns which weights they are trained on.
    They begin as `start` has them, else as an update of nothing."""
    assert plan.adapters is not None
    digest = base_digest(model)
    throughout = "bf16" if plan.precision == "bf16" else "fp32"  # what is mixed is cast as it computes
    prepare_weights(model, throughout, plan.adapters, tuple(plan.base.items()))
    if start is not None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        specs = {name: TensorMeta(tuple(p.shape), dtype_name(p.dtype)) for name, p in trained.items()}
        refuse_unlike(start, plan.adapters, specs, digest)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(start.tensors[name].read())
    return digest


@torch.no_grad()
def base_digest(model: nn.Module) -> str:
    """Sixteen hexadecimal digits that change with the weights of a model: of every tensor a few thousand elements count."""
    found = hashlib.sha256()
    for name, tensor in sorted(_tensors(model)):
        flat = tensor.detach().reshape(-1)
        if flat.numel() > _LOOKED_AT:
            flat = flat[torch.linspace(0, flat.numel() - 1, _LOOKED_AT, dtype=torch.float64).long().to(flat.device)]
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.numel())
