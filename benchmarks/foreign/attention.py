"""Seconds of attention by a named kernel: what each reaches on a generation of devices is in the catalogue, with its source."""

from __future__ import annotations

from math import ceil

from foretell.hardware import generations
from foretell.hardware.generations import AttentionPeak
from foretell.hardware.types import Device
from foretell.price.analytic import FAMILIES, family

KERNELS = generations.attention()
"""By kernel, then by family. A kernel that has no figure for a family takes its nearest kin's."""
_NEAREST = {"flash-1": "flash-2", "flash-3": "flash-2", "cudnn": "flash-2"}

_SHORT = 256
"""Queries at which attention reaches half of its long-sequence rate; assumed."""
_BLOCK = 128


def seconds_of(
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    device: Device,
    kernel: str = "flash-2",
    causal: bool = True,
    backward: bool = False,
) -> float:
    """One fused attention kernel, forward or backward. Causal FLOPs count the blocks on and below the diagonal."""
    kin = family(device)
    known = _known(kernel, kin)
    visited = keys if not causal else min(keys, (keys + _BLOCK) / 2)
    flops = 4 * batch * heads * queries * visited * head_dim * (2.5 if backward else 1.0)
    part = known.backward if backward else known.forward
    if head_dim <= 64:
        part *= known.narrow
    part *= queries / (queries + _SHORT)
    blocks = batch * heads * ceil(queries / _BLOCK)
    used = min(1.0, blocks / device.sm_count)
    rate = device.peak("bfloat16" if "bfloat16" in device.peak_flops_per_second else "float16")
    return flops / (rate * part * used) + FAMILIES[kin].launch


def heat(kernel: str, device: Device, *, backward: bool) -> float:
    """How much of the rate of large products an attention kernel reaches on a device."""
    kin = family(device)
    known = _known(kernel, kin)
    return min(1.0, (known.backward if backward else known.forward) / FAMILIES[kin].product)


def _known(kernel: str, kin: str) -> AttentionPeak:
    return KERNELS.get(kernel, {}).get(kin) or KERNELS.get(_NEAREST.get(kernel, ""), {}).get(kin) or KERNELS[""][""]
