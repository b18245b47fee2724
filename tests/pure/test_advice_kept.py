"""Some of the random questions of benchmarks/advice.py: every suggestion keeps its promise when it is asked as printed, and where
anything on the same devices fits, something that does is offered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NUMBERS = (48, 95, 91, 193, 124, 1139)
LONGER = (33, 1283, 144, 24, 146, 106, 7, 71, 8, 1, 0)
"""Of those whose steps do not fit, or hardly: GPT-2, Llama, ResNet-50, ViT, one of transformers; of one device and of several, for
inference and with LoRA, and one that nothing on its device makes fit."""
FURTHER = pytest.mark.slow(reason="further questions, of kinds that the others have, or that take half a minute")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "advice.py"
    spec = importlib.util.spec_from_file_location("advice_bench", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["advice_bench"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [*NUMBERS, *(pytest.param(number, marks=FURTHER) for number in LONGER)])
def test_suggestions_hold_and_none_is_missing(number: int, bench: ModuleType) -> None:
    row: dict[str, Any] = bench.asked_once(number)
    assert row["verdict"] in ("no", "tight")
    assert [one for one in row["suggestions"] if not one["kept"]] == []
    assert row["suggestions"] or row["verdict"] == "tight" or not row["possible_here"]
    assert bool(row.get("offered_here", True)) == bool(row.get("possible_here", True))
