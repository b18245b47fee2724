"""Latency of every memory level by pointer chase, and the rate of matrix products by dtype.

A chase follows one random cycle through all lines of a working set: every load has to wait for the one before, so that seconds a hop
are the latency of the level that the working set fits in. On a GPU one warp does it in a Triton kernel. On a CPU numpy's `take` does
it: what it writes is what it reads next, which adds the few cycles of handing a store on to a load. Where that led is checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from foretell.hardware.probe.clock import Clock, host_clock
from foretell.units import GIB, KIB, MIB

Found = dict[str, Any]
LINE_BYTES = {"cuda": 128, "cpu": 64}
ENTRY_BYTES = 8
WORKING_SETS = {
    "cuda": (16 * KIB, 64 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 48 * MIB, 128 * MIB, 1 * GIB),
    "cpu": (16 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
"""From the smallest cache to memory, with several sizes inside each level."""
HOPS, LEAST_HOPS = {"cuda": 40_000, "cpu": 100_000}, 4_000
ROUNDS = 3
FREE_SHARE = 8
"""A working set takes at most this part of free memory."""


class Cycle(NamedTuple):
    """Entries of `ENTRY_BYTES`, of which one in each line says where the next is."""

    table: torch.Tensor
    order: torch.Tensor
    """Entries in the order in which the chase meets them."""


def cycle(size: int, kind: str, seed: int = 0) -> Cycle:
    """One cycle through every line of `size` bytes, in random order."""
    step = LINE_BYTES[kind] // ENTRY_BYTES
    draw = torch.Generator(kind).manual_seed(seed)
    order = torch.randperm(size // LINE_BYTES[kind], generator=draw, device=kind) * step
    table = torch.zeros(size // ENTRY_BYTES, dtype=torch.int64, device=kind)
    table[order] = order.roll(-1)
    return Cycle(table, order)


def latencies(kind: str) -> Iterator[Found]:
    """Working sets from small to large: seconds of one load that waits for the one before."""
    chase = _on_gpu() if kind == "cuda" else _on_cpu
    for size in WORKING_SETS[kind]:
        if kind == "cuda" and size > torch.cuda.mem_get_info()[0] // FREE_SHARE:
            continue
        made = cycle(size, kind)
        each = sorted(chase(made) for _ in range(ROUNDS))
        middle = statistics.median(each)
        yield {
            "working_set_bytes": size, "seconds": float(f"{each[0] if kind == 'cpu' else middle:.4g}"),
            "spread": round((each[-1] - each[0]) / middle, 3),
        }  # fmt: skip
        del made


def _on_cpu(made: Cycle) -> float:
    table, hops = made.table.numpy(), HOPS["cpu"]
    path = np.zeros(hops + 1, dtype=np.int64)
    path[0] = int(made.order[0])
    now = host_clock()
    if made.table.nbytes < 32 * MIB:  # what is larger than caches stays cold
        np.take(table, path[:-1], out=path[1:], mode="wrap")
    else:
        path[0] = int(made.order[len(made.order) // 2])
    began = now()
    np.take(table, path[:-1], out=path[1:], mode="wrap")
    took = now() - began
    place = int((made.order == int(path[0])).nonzero()[0, 0])
    ends = int(made.order[(place + hops) % len(made.order)])
    if int(path[-1]) != ends:
        raise RuntimeError("numpy does not follow a chain of entries here")
    return took / hops


def _on_gpu() -> Callable[[Cycle], float]:
    """Seconds a hop from two chases of unlike length, so that a launch does not count; small sets are in cache before they do."""
    try:
        from foretell.hardware.probe.chase_kernel import chase
    except ImportError:
        raise RuntimeError("Triton, in which the chase is written, is not installed") from None

    def seconds(made: Cycle) -> float:
        lines = len(made.order)
        place = made.order[:1].clone()
        made.table.sum()  # what fits in the larger caches is there now
        short = max(LEAST_HOPS, min(lines, HOPS["cuda"]))
        at = 0
        took = []
        for hops in (short, short + HOPS["cuda"]):
            took.append(_timed(lambda hops=hops: chase(made.table, place, hops)))  # type: ignore[misc]
            at += hops
        if int(place) != int(made.order[at % lines]):
            raise RuntimeError("the chase did not follow its cycle")
        return (took[1] - took[0]) / HOPS["cuda"]

    warm = cycle(16 * KIB, "cuda")
    chase(warm.table, warm.order[:1].clone(), 1)  # compiled, and not part of any figure
    return seconds


def _timed(call: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


# ---------------------------------------------------------------- products by dtype

SIDES = {"cuda": (1024, 2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
LONGEST_SECONDS = {"cuda": 20e-3, "cpu": 0.15}
"""Of one product: the next larger is left out where it would take longer."""


def rates(kind: str) -> Iterator[Found]:
    """For every dtype that products have here: the best rate of square ones up to the largest that is still quick."""
    for name, make in _products(kind):
        best: Found | None = None
        try:
            for side in SIDES[kind]:
                timing = Clock(kind, budget=30e-3 if kind == "cuda" else 60e-3).measure(make(side))
                if best is None or side**3 / timing.seconds > best["side"] ** 3 / best["seconds"]:
                    best = {"dtype": name, "side": side, "seconds": float(f"{timing.seconds:.4g}"), "spread": round(timing.spread, 3)}
                if 8 * timing.seconds > LONGEST_SECONDS[kind]:
                    break
        except (RuntimeError, NotImplementedError, AttributeError, ValueError):  # this device or this torch has no such product
            pass
        if best is not None:
            yield best


def _products(kind: str) -> list[tuple[str, Callable[[int], Callable[[], Any]]]]:
    plain = [(str(dtype)[6:], _plain(kind, dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    if kind == "cpu":
        return [*plain, ("int8", _int8(kind))]
    return [*plain, ("tf32", _tf32), ("float8_e4m3fn", _float8), ("int8", _int8(kind))]


def _plain(kind: str, dtype: torch.dtype) -> Callable[[int], Callable[[], Any]]:
    def make(side: int) -> Callable[[], Any]:
        a, b = (torch.randn(side, side, device=kind, dtype=dtype) for _ in range(2))
        return lambda: a @ b

    return make


def _tf32(side: int) -> Callable[[], Any]:
    a, b = (torch.randn(side, side, device="cuda") for _ in range(2))

    def call() -> None:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


def _float8(side: int) -> Callable[[], Any]:
    a, b = (torch.randn(side, side, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    other = b.t()  # the second has to lie column by column
    return lambda: torch._scaled_mm(a, other, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8(kind: str) -> Callable[[int], Callable[[], Any]]:
    def make(side: int) -> Callable[[], Any]:
        a, b = (torch.randint(-127, 128, (side, side), device=kind, dtype=torch.int8) for _ in range(2))
        other = b.t()
        return lambda: torch._int_mm(a, other)

    return make


def flops_per_second(row: Found) -> float:
    return 2.0 * float(row["side"]) ** 3 / float(row["seconds"])
