"""An adapter added to the weights of its layer, and what that loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.trace.adapters.formats import pack, unpack
from foretell.trace.adapters.layers import PackedLinear, is_conv1d

BASES = ("original", "dequantised", "requantised")
"""What an adapter over a packed base is merged into: the weights before they were packed; what they unpack to, which it was
trained on; or that, packed again."""


@dataclass(frozen=True, kw_only=True)
class MergedLayer:
    """What merging did to one layer."""

    name: str
    change: float
    """Of the weight by its adapter, as a share of the weight: ‖ΔW‖/‖W‖."""
    error: float
    """By how much the merged weight is off what was trained, as a share of the change: 1 is as much as was learned."""


@torch.no_grad()
def trained_weight(layer: Any, onto: Tensor) -> Tensor:
    """`onto`, a row for every output, with what the adapter makes of it, in fp32."""
    change = layer.lora_adapter.scale * (layer.lora_B.float() @ layer.lora_A.float())
    found = onto.float() + change
    if layer.lora_adapter.kind.startswith("dora"):  # the length is that of the weight it was trained on
        length = torch.linalg.vector_norm(layer.lora_rows().float() + change, dim=1)
        found *= (layer.lora_magnitude.float() / length)[:, None]
    return found


@torch.no_grad()
def merge_layer(name: str, layer: Any, original: Tensor, base: str, dtype: torch.dtype) -> tuple[Tensor, MergedLayer]:
    """The merged weight as the layer's own class keeps it, rounded to `dtype` once, and what that loses."""
    plain = original.detach().t() if is_conv1d(type(layer)) else original.detach()
    under = layer.lora_rows().detach()
    learned = trained_weight(layer, under)
    found = learned if base != "original" else trained_weight(layer, plain)
    if base == "requantised" and isinstance(layer, PackedLinear):
        codes = pack(found.to(layer.base_dtype).contiguous(), layer.base_kind)
        found = unpack(*codes, found.shape, torch.float32, layer.base_kind)
    merged = found.to(dtype)
    change = float((learned - under.float()).norm())
    off = float((merged.float() - learned).norm())
    told = MergedLayer(name=name, change=change / max(float(under.float().norm()), 1e-30), error=off / change if change else 0.0)
    return (merged.t() if is_conv1d(type(layer)) else merged).contiguous(), told
