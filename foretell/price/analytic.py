"""What kernels reach of a device's rates on each generation of devices, and seconds of attention by a named kernel.

Peaks, bandwidths and core counts come from the catalogue; what part of them is reached is data here (`FAMILIES`,
`KERNELS`), each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from foretell.hardware.types import Device


class Generation(NamedTuple):
    """What large kernels reach on one generation of devices, as parts of the catalogue's figures."""

    product: float
    """Of the peak of the dtype, by a large dense product in a burst."""
    product8: float
    """The same for 8-bit products, of their own peak."""
    stream: float
    """Of the nominal memory bandwidth."""
    launch: float
    """Seconds from one kernel to the next when they do nothing."""
    source: str


FAMILIES: Mapping[str, Generation] = {
    "hopper": Generation(
        0.79, 0.68, 0.86, 3e-6,
        "public table of 370 large bf16 products on an H200: half of them above 0.786; 4.13 of 4.8 TB/s for copies measured",
    ),
    "blackwell": Generation(0.69, 0.60, 0.85, 3e-6, "public table of 365 large bf16 products on a B200: half of them above 0.688"),
    "ampere": Generation(0.86, 0.77, 0.86, 3e-6, "public table of 145 large bf16 products on an A100: half of them above 0.864"),
    "volta": Generation(
        0.68, 0.68, 0.86, 4e-6,
        "set by hand on 14 published runs on V100; public tests of large fp16 products: 85 to 95 of 125 TFLOP/s",
    ),
    "rtx-blackwell": Generation(0.76, 0.72, 0.88, 3e-6, "public table of large bf16 products on an RTX PRO 6000: 380 to 430 of 504 TFLOP/s"),
    "ada": Generation(
        0.97, 0.85, 0.90, 3e-6,
        "public tests on RTX 4090: 155 to 170 of 165 TFLOP/s, at clocks above nominal; data-centre cards wait for power (price.kin)",
    ),
    "cdna": Generation(0.42, 0.36, 0.78, 5e-6, "public tests of large bf16 products on MI300X: 550 to 700 of 1,307 TFLOP/s; the least"),
    "other": Generation(0.70, 0.60, 0.80, 5e-6, "assumed"),
}  # fmt: skip


class AttentionPeak(NamedTuple):
    """Part of the 16-bit peak that an attention kernel reaches, forward and backward, on long causal sequences."""

    forward: float
    backward: float
    source: str
    narrow: float = 0.9
    """Factor for heads of 64 channels and less."""


KERNELS: Mapping[str, Mapping[str, AttentionPeak]] = {
    "flash-1": {
        "ampere": AttentionPeak(0.37, 0.30, "FlashAttention-2 paper: 100 to 130 of 312 TFLOP/s forward", 1.0),
        "hopper": AttentionPeak(0.222, 0.179, "assumed: of FlashAttention 2 there, the part that it is on A100", 1.0),
    },
    "flash-2": {
        "ampere": AttentionPeak(0.60, 0.52, "FlashAttention-2 paper: up to 190 forward and 170 backward of 312 TFLOP/s, causal"),
        "hopper": AttentionPeak(0.36, 0.31, "FlashAttention-2 paper: up to 350 TFLOP/s on H100 without Hopper's own units"),
        "blackwell": AttentionPeak(0.25, 0.20, "assumed: as Hopper, over a peak twice as high"),
        "cdna": AttentionPeak(0.28, 0.20, "assumed"),
        "volta": AttentionPeak(0.35, 0.30, "assumed"),
        "ada": AttentionPeak(0.85, 0.65, "assumed: public plots on RTX 4090 show up to 160 of 165 TFLOP/s forward"),
    },
    "flash-3": {"hopper": AttentionPeak(0.62, 0.52, "FlashAttention-3 paper: about 640 forward and 560 backward TFLOP/s, causal")},
    "cudnn": {
        "ampere": AttentionPeak(0.60, 0.52, "assumed as flash-2"),
        "hopper": AttentionPeak(0.655, 0.52, "measured on one H200: 591 forward, 469 backward of 989 TFLOP/s, causal"),
        "blackwell": AttentionPeak(0.55, 0.42, "assumed: NVIDIA reports about 1.3 PFLOP/s forward"),
    },
}  # fmt: skip
"""By kernel, then by family. A kernel that has no figure for a family takes its nearest kin's."""

_NEAREST = {"flash-1": "flash-2", "flash-3": "flash-2", "cudnn": "flash-2"}
_USUAL_KERNEL = AttentionPeak(0.45, 0.38, "assumed")

_SHORT = 256
"""Queries at which attention reaches half of its long-sequence rate; assumed."""
_BLOCK = 128

def family(device: Device) -> str:
    """Generation of a device: hopper, ampere, cdna, ..."""
    if device.backend == "rocm":
        return "cdna"
    major, minor = device.compute_capability or (0, 0)
    if device.backend != "cuda" or major < 7:
        return "other"
    names = {7: "volta", 8: "ada" if minor in (6, 9) else "ampere", 9: "hopper", 10: "blackwell"}
    return names.get(major, "rtx-blackwell")


def attention_seconds(
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
    return KERNELS.get(kernel, {}).get(kin) or KERNELS.get(_NEAREST.get(kernel, ""), {}).get(kin) or _USUAL_KERNEL
