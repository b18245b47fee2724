"""Products of matrices in numbers: the best tiling of a device's cores, in whole waves, against what memory allows.

A kernel covers the result with tiles; each core takes one at a time, so the last wave may be mostly idle. Where tiles are
few, the inner dimension is split over more cores and the parts are added. The constants are fractions of a device's own
peaks and seconds of fixed work, fitted to products measured on an H200; the learned part corrects them elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from foretell.hardware.types import Device


class Product(NamedTuple):
    """(batch × m × k) times (batch × k × n); `left` and `right` are layout letters of a trace."""

    batch: int
    m: int
    n: int
    k: int
    left: str
    right: str


class Engine(NamedTuple):
    """How one kind of kernel works."""

    launch: float
    """Seconds before and after everything."""
    start: float
    """Seconds to fill the pipeline."""
    rate: float
    """Of the peak, inside a tile."""
    near: float
    """Bandwidth near the cores, as a multiple of the memory's."""
    far: float
    """Of the memory's bandwidth, when more is moved than the cache holds."""
    cached: float
    """The same when it is held there."""
    split: float
    """Seconds to split the inner dimension and add the parts."""
    add: float
    """Bandwidth of adding the parts, as a multiple of the memory's; 0 where they never leave the cores."""
    blend: float
    """How sharply the slower of computing and moving decides: the exponent of their norm."""
    tile: float
    """Seconds of every tile beside its products."""
    store: float
    """Seconds per element of a tile, to store it."""
    edge: float
    """Loss of rate in small tiles."""
    step: int
    """Inner elements taken at a time."""


_WIDE = (
    (64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (192, 128), (128, 256), (256, 128), (64, 256), (256, 64),
    (192, 192), (256, 192), (192, 256), (256, 256), (64, 32), (32, 64), (64, 16), (16, 64),
)  # fmt: skip
_OLD = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
_PLAIN = (*_OLD, (32, 32), (32, 128), (128, 32))
SPLITS = (2, 4, 8, 16, 32)
LEAST_SPLIT = 128
"""Inner elements left to each part."""

ENGINES = {
    "fast": Engine(2.08e-6, 5.9e-7, 0.923, 3.5, 0.96, 1.22, 2.9e-6, 0.0, 2.06, 6.0e-7, 3.5e-11, 0.0, 64),
    "half": Engine(2.18e-6, 9.7e-7, 0.258, 4.2, 0.87, 0.52, 4.2e-6, 0.0, 1.18, 3.0e-7, 5.6e-11, 0.002, 32),
    "odd": Engine(3.14e-6, 4.1e-7, 0.148, 4.2, 0.37, 0.32, 4.5e-6, 5.0, 1.44, 2.1e-7, 1.6e-12, 0.017, 32),
    "odd_rows": Engine(2.35e-6, 1.0e-6, 0.100, 4.2, 0.51, 0.41, 3.6e-6, 0.23, 1.16, 1.4e-7, 2.1e-12, 0.001, 32),
    "tf32": Engine(2.90e-6, 1.08e-6, 0.841, 3.4, 0.73, 0.74, 4.0e-6, 0.0, 2.07, 4.6e-7, 3.2e-11, 0.004, 32),
    "tf32_odd": Engine(3.36e-6, 6.4e-7, 0.232, 4.2, 0.75, 0.32, 3.1e-6, 0.0, 1.38, 2.9e-7, 0.0, 0.023, 32),
    "patches": Engine(2.00e-6, 1.1e-6, 0.65, 3.4, 0.80, 1.00, 4.0e-6, 1.0, 2.00, 5.0e-7, 3.0e-11, 0.004, 32),
    "plain": Engine(1.52e-6, 8.2e-7, 0.761, 4.2, 2.17, 0.80, 3.0e-6, 0.59, 1.08, 2.1e-7, 7.2e-11, 0.01, 8),
}
"""On matrix units, by what rows of all three matrices begin at multiples of: fast 16 bytes, half 4 or 8, odd 2 (odd_rows
where both operands lie along the inner dimension); patches: of convolutions; plain: without matrix units."""


class Tiling(NamedTuple):
    """How a product would best be laid out, and what that costs."""

    seconds: float
    computing: float
    moving: float
    rows: int
    columns: int
    parts: int
    waves: float
    rival: float
    """Seconds of the best layout with other tiles."""


def engine_of(p: Product, rate: str, width: int) -> str:
    """Which kernels serve a product."""
    aligned = aligned_bytes(p, width)
    if rate == "tf32":
        return "tf32" if aligned >= 16 else "tf32_odd"
    if width >= 4:
        return "plain"
    if aligned >= 4:
        return "fast" if aligned >= 16 else "half"
    return "odd_rows" if p.right == "t" and p.left != "t" else "odd"


def aligned_bytes(p: Product, width: int) -> int:
    """What the beginnings of rows in memory, of both operands and of the result, are multiples of, at most 16 bytes."""
    sizes = p.m if p.left == "t" else p.k, p.k if p.right == "t" else p.n, p.n
    return min(16, min(size & -size for size in sizes) * width)


def best_tiling(p: Product, engine: str, rate: str, width: float, device: Device) -> Tiling:
    """The fastest way to lay a product out, by this model."""
    e, cores = ENGINES[engine], device.sm_count
    bandwidth = device.memory_bandwidth_bytes_per_second
    flops = device.peak(rate) * e.rate / cores
    near = bandwidth * e.near / cores
    moved = p.batch * (p.m * p.k + p.k * p.n + p.m * p.n) * width
    moving = moved / bandwidth / (e.cached if moved < (device.l2_bytes or 0) else e.far)
    depth = -(-p.k // e.step) * e.step
    found: list[tuple[float, int, int, int, float]] = []
    for rows, columns in _WIDE if engine == "fast" else _PLAIN if engine == "plain" else _OLD:
        tiles = p.batch * -(-p.m // rows) * -(-p.n // columns)
        inner = max(2 * rows * columns / flops * (1 + e.edge * (128 / rows + 128 / columns)), (rows + columns) * width / near)
        fixed = e.tile + e.store * rows * columns
        best = (-(-tiles // cores) * (inner * depth + fixed), rows, columns, 1, tiles / cores)
        if tiles < cores and p.k >= 2 * LEAST_SPLIT:
            for parts in SPLITS:
                if p.k < parts * LEAST_SPLIT:
                    break
                each = -(-p.k // (parts * e.step)) * e.step
                added = e.split + (p.batch * p.m * p.n * 4 * parts / (bandwidth * e.add) if e.add else 0.0)
                split = -(-tiles * parts // cores) * (inner * each + fixed) + added
                if split < best[0]:
                    best = (split, rows, columns, parts, tiles * parts / cores)
        found.append(best)
    found.sort()
    computing, rows, columns, parts, waves = found[0]
    computing += e.start
    seconds = e.launch + (computing**e.blend + moving**e.blend) ** (1 / e.blend)
    return Tiling(seconds, computing, moving, rows, columns, parts, waves, found[1][0] + e.start)
