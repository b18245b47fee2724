"""Fifty steps of a small model around a module: the same code around the reference and around the candidate.

    x ── scale and shift, learned ──►  the module under test  ── scale, learned ──►  squared distance from a fixed target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretell.tune.verify.inside.calls import outputs_of, tensor_of
from foretell.tune.verify.wire import RawTensor


class Around(nn.Module):
    """The module with what learns before and after it."""

    def __init__(self, module: nn.Module, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.module = module
        self.before = nn.ParameterList([_learned(one, 0.0) for one in inputs if _float(one)])
        self.scales = nn.ParameterList([_learned(one, 0.0) for one in inputs if _float(one)])
        self.after = nn.ParameterList([_learned(one, 0.0) for one in outputs])

    def forward(self, inputs: Sequence[Any], targets: Sequence[Tensor]) -> Tensor:
        learned = iter(zip(self.scales, self.before, strict=True))
        given = []
        for one in inputs:
            if _float(one):
                scale, shift = next(learned)
                given.append(one * (1 + scale) + shift)
            else:
                given.append(one)
        outputs = [one for one in outputs_of(self.module(*given)) if _float(one)]
        losses = [((one * (1 + scale) - target) ** 2).mean() for one, scale, target in zip(outputs, self.after, targets, strict=True)]
        return torch.stack(losses).sum()


def _float(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


def _learned(like: Tensor, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full(like.shape[-1:], value, dtype=like.dtype, device=like.device))


def losses(module: nn.Module, asked: Mapping[str, Any], blobs: Sequence[bytes], device: str) -> list[float]:
    """Of each step, with AdamW on everything that learns; batches take turns."""
    left = iter(blobs)
    batches = [[spec["value"] if "value" in spec else tensor_of(RawTensor.of(spec, next(left)), device) for spec in one] for one in asked["batches"]]
    targets = [tensor_of(RawTensor.of(spec, next(left)), device) for spec in asked["targets"]]
    model = Around(module, batches[0], targets)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["rate"], foreach=False)
    found = []
    for step in range(asked["steps"]):
        torch.manual_seed(asked["seed"] + step)
        loss = model(batches[step % len(batches)], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(one) for one in found]
