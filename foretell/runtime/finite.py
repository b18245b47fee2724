"""An update that would put NaN or infinity into the weights is not applied."""

from __future__ import annotations

import torch
from torch import Tensor


def may_step(optimizer: torch.optim.Optimizer, value: Tensor) -> bool:
    """Whether to take the coming `optimizer.step()`, given what must be finite: loss and squared norm, added up.

    A fused optimizer decides on the device: it is told, takes the step and changes nothing if it must not, and nobody
    waits. Others cannot; for them the value is read here, and False means that the step must not be taken.
    """
    bad = ~value.detach().isfinite()
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        return True
    return not bool(bad)
