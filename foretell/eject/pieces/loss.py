"""Loss"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretell.eject.pieces.model import compute_loss
from foretell.eject.pieces.settings import ACCUMULATE


def one_loss(model: nn.Module, batch: Any, device: torch.device) -> Tensor:
    """A micro-batch's share of the step's mean loss."""
    with torch.autocast(device.type, torch.bfloat16):  # if: autocast and not fp16
        return compute_loss(model, batch) / ACCUMULATE
    with torch.autocast(device.type, torch.float16):  # if: autocast and fp16
        return compute_loss(model, batch) / ACCUMULATE
    return compute_loss(model, batch) / ACCUMULATE  # if: not autocast
