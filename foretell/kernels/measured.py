"""What kernels were measured to be worth: `measured.toml`, written by benchmarks/kernels.py on a GPU.

A row: kernel, device, dtype, shape; config, seconds, the best baseline and its seconds; speedup with its interval; peak bytes of both.
A kernel is on by default on a device, for a format, in the buckets whose declared shapes all have a row of 1.00× or more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.kernels.kernel import Shape, ShapeBucket, TrainingKernel
from foretell.kernels.names import ENOUGH, FILE, read_rows


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """Forward and backward of one kernel at one shape."""

    kernel: str
    device: str
    """As torch names it."""
    dtype: str
    shape: Shape
    config: Mapping[str, int]
    seconds: float
    floor_seconds: float
    """Of its bytes at the bandwidth measured in the same run."""
    baseline: str
    """The best one."""
    baseline_seconds: float
    speedup: float
    low: float
    high: float
    """Of the speedup, between which nine and a half of ten resamples lie."""
    peak_bytes: int
    baseline_peak_bytes: int
    source: str
    """Torch, Triton and date."""


def read(path: Path = FILE) -> tuple[KernelRow, ...]:
    return tuple(KernelRow(**row) for row in read_rows(path))


@functools.cache
def rows() -> tuple[KernelRow, ...]:
    return read()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def on_by_default(
    kernel: TrainingKernel, device: str, dtype: torch.dtype, found: tuple[KernelRow, ...] | None = None
) -> tuple[ShapeBucket, ...]:
    """The buckets in which it is on."""
    name = str(dtype).removeprefix("torch.")
    mine = [one for one in (rows() if found is None else found) if (one.kernel, one.device, one.dtype) == (kernel.name, device, name)]

    def proven(bucket: ShapeBucket) -> bool:
        declared = [shape for shape in kernel.measured_at if bucket.holds(shape)]
        return bool(declared) and all(any(one.shape == shape and one.speedup >= ENOUGH for one in mine) for shape in declared)

    return tuple(bucket for bucket in kernel.buckets if proven(bucket))


# ---------------------------------------------------------------- configurations

_TRIED: dict[str, Mapping[str, int]] = {}


def config(kernel: TrainingKernel, shape: Shape, device: torch.device) -> Mapping[str, int]:
    """How to launch: as is being tried, or as measured on this device at the nearest declared shape of the bucket, or as compiled."""
    chosen = _config(kernel, tuple(shape.items()), device)
    return {**chosen, **_TRIED[kernel.name]} if kernel.name in _TRIED else chosen


@functools.lru_cache(maxsize=4096)
def _config(kernel: TrainingKernel, shape: tuple[tuple[str, int], ...], device: torch.device) -> Mapping[str, int]:
    wanted, name = dict(shape), device_name(device)
    bucket = kernel.bucket(wanted)
    if bucket is None:
        return kernel.buckets[-1].config
    mine = [one for one in rows() if one.kernel == kernel.name and one.device == name and bucket.holds(one.shape)]
    return {**bucket.config, **(min(mine, key=lambda one: _apart(one.shape, wanted)).config if mine else {})}


def _apart(one: Shape, other: Shape) -> float:
    return sum(abs(one[name] - other[name]) / max(1, other[name]) for name in one if name in other)


@contextlib.contextmanager
def trying(kernel: str, chosen: Mapping[str, int]) -> Iterator[None]:
    """Launch a kernel in another way for a while: for sweeps and tests."""
    before = _TRIED.get(kernel)
    _TRIED[kernel] = dict(chosen)
    try:
        yield
    finally:
        if before is None:
            del _TRIED[kernel]
        else:
            _TRIED[kernel] = before

