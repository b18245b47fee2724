"""Time ops: cases of every family, spread evenly, until the time is up."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from foretell.hardware.probe.cases.blocks import BLOCKS
from foretell.hardware.probe.cases.families import CUDA_ONLY, FAMILIES, TAGS, Call, Draw
from foretell.hardware.probe.cases.irregular import RARE, worth
from foretell.hardware.probe.cases.narrow import NARROW
from foretell.hardware.probe.cases.pictures import PICTURES
from foretell.hardware.probe.cases.scattered import SCATTERED
from foretell.hardware.probe.clock import Clock
from foretell.hardware.probe.harvest import Harvest
from foretell.hardware.profile import Case
from foretell.hardware.types import Device

ORDER_SEED = 1
WHOLE_MEMORY_BYTES, WHOLE_FLOPS_PER_SECOND = 40e9, 200e12
"""A GPU with as much gets cases of full size."""
CPU_LEAST_SCALE, CPU_SCALE_PER_CORE, CPU_MOST_SCALE = 0.001, 0.005, 0.05
CPU_SHARE = 0.25
"""A CPU gets this share of the cases of single ops, and all of blocks, updates, rare ops and narrow ones: it is slow, its models are small."""

_ALL: dict[str, tuple[Callable[[Draw], Call], int]] = {**FAMILIES, **BLOCKS, **RARE, **NARROW, **PICTURES, **SCATTERED}
_WHOLE = frozenset({*BLOCKS, *RARE, *NARROW, "update"})
_APART = ("aten._local_scalar_dense",)
"""What the host waits for is timed among rare ops alone."""


_LONG = ("masked", "spectra", "singular", "eigen", "functions", "orthogonal", "borders", "few_lanes")
_SHORT = (
    "linear", "batched", "norm", "unary", "binary", "reduction", "indexing", "movement", "softmax", "loss", "fourier", "complex_product", "update",
    "grouped", "images", "scores", "mixing", "routing", "messages",
)  # fmt: skip
SHARED: Mapping[str, float] = {**dict.fromkeys((*RARE, *SCATTERED), 0.5), **dict.fromkeys(_LONG, 0.25), **dict.fromkeys(_SHORT, 2.0), "head": 0.5}
"""How much denser a family's cases come in a probe to be shared, which is stopped by its time long before the end: more of those that
give many rows a second, fewer of those that take long and that few steps have."""


def order(kind: str, families: Collection[str] = _ALL, mode: str = "full") -> list[tuple[str, int]]:
    """Every case of a full probe, or of one to be shared, in an order of which any beginning has each family in proportion."""
    rng = random.Random(ORDER_SEED)
    denser = SHARED if mode == "share" else {}
    placed = [
        ((index + rng.random()) / count / denser.get(family, 1.0), family, index)
        for family, count in _counts(kind).items()
        for index in range(count)
    ]
    return [(family, index) for place, family, index in sorted(placed) if family in families and place <= 1]


def _counts(kind: str) -> dict[str, int]:
    if kind == "cuda":
        return {family: count for family, (_, count) in _ALL.items() if family not in NARROW}
    return {
        family: count if family in _WHOLE else max(1, round(count * CPU_SHARE))
        for family, (_, count) in _ALL.items()
        if family not in CUDA_ONLY and family not in PICTURES
    }


def scale_of(kind: str, device: Device, seed: int) -> float:
    """How much smaller cases are than on a large GPU; on a CPU each case draws its own, from tiny to modest."""
    if kind == "cuda":
        return min(1.0, device.memory_bytes / WHOLE_MEMORY_BYTES, device.peak("bfloat16") / WHOLE_FLOPS_PER_SECOND)
    most = min(CPU_MOST_SCALE, CPU_SCALE_PER_CORE * device.sm_count)
    return math.exp(random.Random(seed).uniform(math.log(CPU_LEAST_SCALE), math.log(most)))


def run_case(family: str, index: int, kind: str, device: Device, clock: Clock) -> Case:
    """Draw one case and time every op it runs."""
    seed = 1000 * sum(map(ord, family)) + index
    torch.manual_seed(seed)
    call = _ALL[family][0](Draw(seed, kind, scale_of(kind, device, seed)))

    def keep(name: str) -> bool:
        return worth(name, family) if family in RARE else not name.startswith(_APART if family in BLOCKS else (*_APART, "aten.ones_like"))

    harvest = Harvest(clock, keep=keep, tag=TAGS.get(family, ""))
    with harvest:
        call()
    return Case(family, index, tuple(harvest.rows.values()))


def run_cases(
    kind: str, device: Device, done: Collection[tuple[str, int]], until: float, families: Collection[str] = _ALL, mode: str = "full"
) -> Iterator[tuple[str, int, float, Case | str]]:
    """Cases not yet done until `time.perf_counter()` says `until`: family, index, seconds spent, rows or why not."""
    plain, watchful = Clock(kind), Clock(kind, watchful=True)
    for family, index in order(kind, families, mode):
        if (family, index) in done:
            continue
        began = time.perf_counter()
        if began >= until:
            return
        found: Any
        try:
            found = run_case(family, index, kind, device, watchful if family in RARE else plain)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            if kind == "cuda":
                _let_go()
        yield family, index, time.perf_counter() - began, found


def _let_go() -> None:
    """After a failed case: no memory of it stays. An error of the device itself is not to be passed over."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
