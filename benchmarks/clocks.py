"""Clocks under load: the same kernels in short bursts, held for half a minute, and inside training steps.

    python benchmarks/clocks.py --out FILE [--seconds 30] [--dry]

One JSON row for each kernel (burst seconds, held seconds, watts, clock while held) and for each step (seconds, watts, clock, and
device seconds of its products by shape, from the profiler). `--dry` goes the same way on a CPU with small shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from foretell.hardware.probe.clock import Clock  # noqa: E402
from foretell.hardware.probe.machine import nvml  # noqa: E402
from foretell.hardware.probe.power import PowerMeter  # noqa: E402

PRODUCTS = (
    (8192, 8192, 8192), (4096, 4096, 4096), (16384, 2048, 2048), (8192, 28672, 4096), (8192, 4096, 14336), (2048, 2048, 8192),
    (1024, 4096, 1024), (32768, 768, 3072),
)  # fmt: skip
STEPS = ((2048, 8, 16, 8, 1024), (4096, 4, 32, 4, 2048), (1024, 12, 16, 32, 512))
"""Width, blocks, heads, batch, tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-seconds", type=float, default=15.0)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    device = "cpu" if asked.dry else "cuda"
    scale = 64 if asked.dry else 1
    with nvml() as found, asked.out.open("a", encoding="utf-8") as file:
        meter = PowerMeter(*found) if found is not None else None
        about = {"date": datetime.now(UTC).isoformat(), "torch": torch.__version__, "device": _name(device)}
        for kernel in _kernels(device, scale):
            _write(file, {**about, **_held(*kernel, device, meter, asked.seconds)})
        for sizes in STEPS:
            _write(file, {**about, **_step(sizes, device, meter, asked.step_seconds, scale)})


def _write(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
    print({key: value for key, value in row.items() if key != "products"}, flush=True)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _kernels(device: str, scale: int) -> list[tuple[str, dict[str, Any], Callable[[], Any]]]:
    found: list[tuple[str, dict[str, Any], Callable[[], Any]]] = []
    for m, n, k in PRODUCTS:
        a = torch.randn(m // scale, k // scale, device=device, dtype=torch.bfloat16)
        b = torch.randn(n // scale, k // scale, device=device, dtype=torch.bfloat16)
        found.append(("product", {"m": m, "n": n, "k": k}, lambda a=a, b=b: F.linear(a, b)))
    q = torch.randn(4, 16, 4096 // scale, 128, device=device, dtype=torch.bfloat16)
    found.append(("attention", {"shape": list(q.shape)}, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)))
    x = torch.randn(2**28 // scale**2, device=device, dtype=torch.bfloat16)
    found.append(("copy", {"bytes": 2 * x.nbytes}, x.clone))
    return found


def _held(kind: str, sizes: dict[str, Any], call: Callable[[], Any], device: str, meter: PowerMeter | None, seconds: float) -> dict[str, Any]:
    time.sleep(1.5)  # cool, and at the highest clock
    burst = Clock(device).measure(call).seconds
    piece = max(1, int(0.05 / burst))
    began, joules = time.perf_counter(), meter.joules() if meter else None
    series: list[tuple[float, float, float]] = []
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        for _ in range(piece):
            call()
        clock = meter.clock() if meter else 0.0
        _wait(device)
        series.append((time.perf_counter() - began, (time.perf_counter() - start) / piece, clock))
    late = [row for row in series if row[0] > seconds / 2]
    used = meter.joules() if meter else None
    watts = (used - joules) / (time.perf_counter() - began) if joules is not None and used is not None else None
    return {
        "kind": kind, **sizes, "burst_seconds": burst, "held_seconds": sum(row[1] for row in late) / len(late),
        "first_seconds": series[0][1], "clock_mhz": sum(row[2] for row in late) / len(late), "watts": watts, "held_for": seconds,
        "series": [[round(t, 2), float(f"{s:.5g}"), c] for t, s, c in series[:: max(1, len(series) // 30)]],
    }  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.two(x))))


def _step(sizes: tuple[int, ...], device: str, meter: PowerMeter | None, seconds: float, scale: int) -> dict[str, Any]:
    width, blocks, heads, batch, tokens = sizes
    width, tokens, heads = width // scale, tokens // scale, max(1, heads // scale)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, heads) for _ in range(blocks))).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, tokens, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().pow(2).mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    _wait(device)
    began, joules, count = time.perf_counter(), meter.joules() if meter else None, 0
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            step()
        _wait(device)
        count += 5
    took, used = time.perf_counter() - began, meter.joules() if meter else None
    clock = meter.clock() if meter else 0.0
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as seen:
        for _ in range(3):
            step()
        _wait(device)
    products = [
        {"name": event.key, "shapes": event.input_shapes[:3], "count": event.count / 3, "seconds": _device_seconds(event) / event.count}
        for event in seen.key_averages(group_by_input_shape=True)
        if event.key in ("aten::mm", "aten::addmm", "aten::bmm") or "attention" in event.key
    ]
    watts = (used - joules) / took if joules is not None and used is not None else None
    return {"kind": "step", "sizes": sizes, "seconds": took / count, "watts": watts, "clock_mhz": clock, "products": products}


def _device_seconds(event: Any) -> float:
    return float(event.device_time_total or event.cpu_time_total) * 1e-6


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
