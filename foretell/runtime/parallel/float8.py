"""float8 training with torchao: products of the blocks' linear layers in float8, all else as in bf16-mixed.

Weights stay in fp32; what goes into a product is scaled and rounded at every call. On a CPU, which has no such products,
torchao computes the same rounding in bf16: for tests, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from foretell.errors import UserError
from foretell.plan.types import FLOAT8, Plan

MULTIPLE = 16
"""Sizes of a product in float8 are multiples of this."""
LEAST = (8, 9)
"""The first CUDA devices with such products."""


def lowered(model: nn.Module, plan: Plan, blocks: Sequence[str], device: torch.device) -> Plan:
    """Convert a model in place if the plan says float8, and the plan for all that is left to do."""
    if plan.precision != FLOAT8:
        return plan
    try:
        from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError as error:
        raise UserError(f"precision float8 needs torchao: {error}", "install torchao, or use bf16-mixed") from None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST:
        raise UserError(f"{torch.cuda.get_device_name(device)} has no products in float8", "use bf16-mixed")
    chosen = {path for path, module in model.named_modules() if _fits(path, module, blocks)}
    if not chosen:
        raise UserError(
            f"float8 finds no linear layer inside a block whose sizes are multiples of {MULTIPLE}", "use bf16-mixed"
        )

    def wanted(_: nn.Module, path: str) -> bool:
        return path in chosen

    config: Any = Float8LinearConfig(emulate=device.type != "cuda")
    convert_to_float8_training(model, module_filter_fn=wanted, config=config)
    return plan.with_(precision="bf16-mixed")


def _fits(path: str, module: nn.Module, blocks: Sequence[str]) -> bool:
    inside = any(path.startswith(f"{block}.") for block in blocks)
    return inside and type(module) is nn.Linear and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
