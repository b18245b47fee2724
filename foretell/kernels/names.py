"""The training kernels by name, and what they were measured to be worth, for those who only plan with them. No torch.

    measured.toml    rows of benchmarks/kernels.py: kernel, device, dtype, shape, seconds, baseline_seconds, floor_seconds, speedup, ...
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMESPACE = "foretell_kernels"
"""Of their ops in torch, and so of their names in a trace."""
KERNELS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu", "geglu", "geglu_tanh", "rotary")
OF_OP = {"gated": "swiglu"}
"""Ops of another name than their kernel's: one for all activations of a gate."""
PARTS_PER_SM = ((1024, 8), (4096, 4), (1 << 30, 2))
"""Of a norm's backward: widths up to so many, and the rows of float32 for each multiprocessor, at most, that a weight's gradient is added
up in."""
FILE = Path(__file__).with_name("measured.toml")
ENOUGH = 1.0
"""Speedup over the best baseline from which a kernel is on."""

Row = Mapping[str, Any]


def read_rows(path: Path = FILE) -> tuple[Row, ...]:
    return tuple(tomllib.loads(path.read_text(encoding="utf-8")).get("row", ()))


@functools.cache
def measured_rows() -> tuple[Row, ...]:
    return read_rows()


def rows_on(device: str, rows: Sequence[Row] | None = None) -> tuple[Row, ...]:
    """Those of a device: `H200-SXM-141GB` is what torch calls `NVIDIA H200`."""
    return tuple(row for row in (measured_rows() if rows is None else rows) if _words(row["device"]) <= _words(device))


def faster_on(device: str, dtype: str, rows: Sequence[Row] | None = None) -> tuple[str, ...]:
    """The kernels that are at least as fast as the best baseline at every shape they were measured at, in a format."""
    found: dict[str, bool] = {}
    for row in rows_on(device, rows):
        if row["dtype"] == dtype:
            found[row["kernel"]] = found.get(row["kernel"], True) and row["speedup"] >= ENOUGH
    return tuple(name for name in KERNELS if found.get(name))


def efficiency(kernel: str, device: str, dtype: str, elements: int, rows: Sequence[Row] | None = None) -> float | None:
    """Of the bandwidth that its least bytes were measured to move at, at the shape next in size; None where it was not measured."""
    mine = [row for row in rows_on(device, rows) if (row["kernel"], row["dtype"]) == (kernel, dtype) and row.get("floor_seconds")]
    if not mine:
        return None
    best = min(mine, key=lambda row: abs(math.log(max(1, elements)) - math.log(max(1, math.prod(row["shape"].values())))))
    return float(best["floor_seconds"] / best["seconds"])


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.casefold())) - {"nvidia", "amd"}
