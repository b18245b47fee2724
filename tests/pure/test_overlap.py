"""Compute beside a collective: the law held against what an H200 did (benchmarks/beside_messages.py)."""

from __future__ import annotations

import json
import statistics
from math import log
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware import find
from foretell.price.kernels.features import describe
from foretell.price.kernels.shapes import Shape
from foretell.price.network.overlap import CHANNELS, LOST, LOST_OTHERS, slower
from foretell.trace.types import TensorSpec

ROWS = Path(__file__).resolve().parents[2] / "benchmarks/results/beside_messages.jsonl"


def rows(kind: str, blocks: int = CHANNELS) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in ROWS.read_text().splitlines()]
    return [row for row in every if row["what"] == "slowdown" and row["kind"] == kind and row["stand_in"] == "copy" and row["blocks"] == blocks]


def waves_of(row: dict[str, Any]) -> float:
    m, n, k, dtype = row["m"], row["n"], row["k"], row["dtype"]
    shape = Shape("aten.mm.default", (TensorSpec((m, k), dtype), TensorSpec((k, n), dtype)), (TensorSpec((m, n), dtype),), ())
    described = describe(shape, find("H200"))
    assert described is not None
    return float(2 ** described.values["waves"])


def test_products_need_a_wave_more() -> None:
    """In the mean over 27 products within 6 %; a product of one wave takes nearly twice as long, one of twenty a quarter longer."""
    found = rows("gemm")
    off = [abs(log((1 + slower("gemm", waves_of(row))) / row["slower"])) for row in found]
    assert len(found) == 27 and statistics.fmean(off) < 0.06
    assert slower("gemm", 0.97) > 3 * slower("gemm", 20.0)


@pytest.mark.parametrize(("kind", "family"), [("attention", "attention"), ("memory", "stream"), ("convolution", "convolution")])
def test_other_kinds_take_the_median_of_their_rows(kind: str, family: str) -> None:
    told = LOST.get(family, LOST_OTHERS)
    assert statistics.median(row["slower"] for row in rows(kind)) - 1 == pytest.approx(told, abs=0.02)
    assert slower(family, 1.0) == told
