"""Watts under loads held for a while, from the driver's energy counter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from foretell.hardware.probe.machine import nvml

HELD_SECONDS = {"quick": 0.7, "full": 1.2}
PIECE_SECONDS = 0.02
"""The clock is read between pieces of the load as long as this."""


def watts(mode: str, until: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Load points until the time is up: seconds spent, and what was found. Nothing without NVML."""
    with nvml() as found:
        if found is None:
            return
        pynvml, handle = found
        meter = PowerMeter(pynvml, handle)
        began = time.perf_counter()
        yield time.perf_counter() - began, meter.idle(HELD_SECONDS[mode])
        for name, make in _loads(mode):
            began = time.perf_counter()
            if began >= until:
                return
            call, work, unit = make()
            row = meter.held(call, HELD_SECONDS[mode])
            del call
            torch.cuda.empty_cache()
            yield time.perf_counter() - began, {"name": name, **row, "rate": work / row["seconds"], "unit": unit}


class PowerMeter:
    """Joules and clocks of one GPU."""

    def __init__(self, pynvml: Any, handle: Any) -> None:
        self.pynvml, self.handle = pynvml, handle

    def joules(self) -> float | None:
        try:
            return float(self.pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)) / 1e3
        except self.pynvml.NVMLError:
            return None

    def clock(self) -> float:
        return float(self.pynvml.nvmlDeviceGetClockInfo(self.handle, self.pynvml.NVML_CLOCK_SM))

    def now(self) -> float:
        return float(self.pynvml.nvmlDeviceGetPowerUsage(self.handle)) / 1e3

    def idle(self, seconds: float) -> dict[str, Any]:
        torch.cuda.synchronize()
        energy, began = self.joules(), time.perf_counter()
        time.sleep(seconds)
        took, used = time.perf_counter() - began, self.joules()
        watts = self.now() if energy is None or used is None else (used - energy) / took
        return {"name": "idle", "watts": round(watts, 2), "clock_mhz": self.clock()}

    def held(self, call: Callable[[], Any], seconds: float) -> dict[str, Any]:
        """Keep the device at it; watts from the counter, or where there is none the mean of readings."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        one = time.perf_counter() - began
        energy, began, count = self.joules(), time.perf_counter(), 0
        clocks, readings = [], []
        while time.perf_counter() - began < seconds:
            piece = max(1, int(PIECE_SECONDS / one))
            for _ in range(piece):
                call()
            torch.cuda.synchronize()
            count += piece
            clocks.append(self.clock())
            readings.append(self.now())
        took, used = time.perf_counter() - began, self.joules()
        mean = sum(readings) / len(readings) if energy is None or used is None else (used - energy) / took
        return {
            "watts": round(mean, 2), "last_watts": round(readings[-1], 2), "clock_mhz": clocks[-1],
            "clock_first_mhz": clocks[0], "seconds": took / count,
        }  # fmt: skip


def _loads(mode: str) -> list[tuple[str, Callable[[], tuple[Callable[[], Any], float, str]]]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    loads = [
        ("gemm-bf16-8192", lambda: _product(8192, bf16)),
        ("copy", _copy),
        ("gelu", _gelu),
        ("gemm-fp32-4096", lambda: _product(4096, fp32)),
        ("sdpa", _attention),
        ("mix", _mix),
        ("small-add", _small),
    ]
    if mode == "full":
        loads += [
            ("gemm-bf16-4096", lambda: _product(4096, bf16)),
            ("gemm-bf16-2048", lambda: _product(2048, bf16)),
            ("gemm-tf32-8192", lambda: _tf32(8192)),
            ("gemm-bf16-8192-zeros", lambda: _product(8192, bf16, zeros=True)),
        ]
    return loads


def _product(size: int, dtype: torch.dtype, zeros: bool = False) -> tuple[Callable[[], Any], float, str]:
    make: Any = torch.zeros if zeros else torch.randn
    a, b = (make(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return lambda: a @ b, 2.0 * size**3, "flops"


def _tf32(size: int) -> tuple[Callable[[], Any], float, str]:
    a = torch.randn(size, size, device="cuda")

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            a @ a
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return call, 2.0 * size**3, "flops"


def _elements() -> int:
    """A gigabyte in fp32, or less where memory is short."""
    return int(min(1 << 28, torch.cuda.mem_get_info()[0] // 32))


def _copy() -> tuple[Callable[[], Any], float, str]:
    x = torch.randn(_elements(), device="cuda")
    y = torch.empty_like(x)
    return lambda: y.copy_(x), 8.0 * x.numel(), "bytes"


def _gelu() -> tuple[Callable[[], Any], float, str]:
    x = torch.randn(_elements(), device="cuda")
    return lambda: F.gelu(x), 8.0 * x.numel(), "bytes"


def _small() -> tuple[Callable[[], Any], float, str]:
    x = torch.randn(1 << 20, device="cuda")
    return lambda: x.add_(1.0), 8.0 * x.numel(), "bytes"


def _attention() -> tuple[Callable[[], Any], float, str]:
    q = torch.randn(4, 32, 4096, 128, device="cuda", dtype=torch.bfloat16)
    work = 4.0 * 4 * 32 * 4096 * 4096 * 128 / 2
    return lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), work, "flops"


def _mix() -> tuple[Callable[[], Any], float, str]:
    product, flops, _ = _product(8192, torch.bfloat16)
    point, _, _ = _gelu()

    def call() -> None:
        product()
        point()

    return call, flops, "flops"
