"""A GPU that no catalogue has, described by what torch reports of it and by what it reaches in a second of work."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from foretell.hardware.probe.clock import Clock
from foretell.hardware.types import Backend, Device
from foretell.units import GIB, MIB

PRODUCT_SHARE, COPY_SHARE = 0.8, 0.9
"""Of a peak that a large product and a large copy reach on devices whose peaks are known; assumed of others."""
_PRODUCTS = {"float32": 4096, "float16": 8192, "bfloat16": 8192}
_WORDS = re.compile(r"\b(nvidia|amd|intel|tesla|geforce|radeon|instinct|graphics)\b", re.I)
_REACHED = "measured by foretell probe: what a large {} reaches is taken as {:.0f} % of it"


def described(card: Any) -> Device:
    """The device of torch's properties."""
    return _described(card.name, int(card.total_memory), int(card.multi_processor_count), _capability(card), int(getattr(card, "L2_cache_size", 0)))


def name_of(reported: str, memory_bytes: int) -> str:
    """`NVIDIA GeForce RTX 4060 Ti` of 16 GB → RTX-4060-Ti-16GB."""
    short = re.sub(r"[^A-Za-z0-9.]+", "-", _WORDS.sub(" ", re.sub(r"\([^)]*\)", " ", reported))).strip("-") or "GPU"
    return f"{short}-{round(memory_bytes / GIB)}GB"


def _capability(card: Any) -> tuple[int, int] | None:
    return None if torch.version.hip else (int(card.major), int(card.minor))


@functools.cache
def _described(reported: str, memory: int, units: int, capability: tuple[int, int] | None, l2: int) -> Device:
    backend: Backend = "rocm" if torch.version.hip else "cuda"
    peaks = {dtype: rate / PRODUCT_SHARE for dtype, size in _PRODUCTS.items() if (rate := _product_rate(dtype, size, memory))}
    bandwidth = _copy_rate(memory) / COPY_SHARE
    torches = "reported by torch"
    sources = {
        **dict.fromkeys(("memory_bytes", "memory_nominal_bytes", "sm_count", "l2_bytes"), torches),
        "peak_flops_per_second": _REACHED.format("product", 100 * PRODUCT_SHARE),
        "memory_bandwidth_bytes_per_second": _REACHED.format("copy", 100 * COPY_SHARE),
        "tdp_watts": "assumed: unknown", "launch_overhead_seconds": "assumed: as of others",
    }  # fmt: skip
    return Device(
        name=name_of(reported, memory), vendor="AMD" if backend == "rocm" else "NVIDIA", backend=backend, compute_capability=capability,
        memory_bytes=memory, memory_nominal_bytes=memory, memory_bandwidth_bytes_per_second=float(f"{bandwidth:.4g}"),
        peak_flops_per_second={dtype: float(f"{rate:.4g}") for dtype, rate in peaks.items()}, l2_bytes=l2 or None, sm_count=units,
        tdp_watts=None, usual_per_node=1, verified=True, launch_overhead_seconds=2.5e-6, sources=sources,
    )  # fmt: skip


def _product_rate(dtype: str, size: int, memory: int) -> float:
    """The best of a few sizes; 0 where the device cannot."""
    best = 0.0
    for side in (size // 2, size):
        if 16 * side * side > memory // 4:
            continue
        try:
            a, b = (torch.randn(side, side, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
            seconds = Clock("cuda", budget=0.1).measure(lambda a=a, b=b: a @ b).seconds  # type: ignore[misc]
        except RuntimeError:
            continue
        best = max(best, 2.0 * side**3 / seconds if seconds else 0.0)
    return best


def _copy_rate(memory: int) -> float:
    count = min(256 * MIB, memory // 32) // 4
    x = torch.zeros(count, device="cuda")
    y = torch.empty_like(x)
    return 8.0 * count / Clock("cuda", budget=0.05).measure(lambda: y.copy_(x)).seconds
