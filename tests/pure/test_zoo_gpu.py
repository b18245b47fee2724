"""The table of the zoo on a GPU: its configurations, the seal of its forecast, its bars, and how a row is really run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from foretell import zoo as models

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def table() -> Iterator[tuple[ModuleType, ModuleType]]:
    """benchmarks/zoo.py and what it runs."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("zoo"), importlib.import_module("zoo_run")
    finally:
        sys.path.remove(str(BENCHMARKS))


def config(table: tuple[ModuleType, ModuleType], **given: Any) -> dict[str, Any]:
    return {**table[0].DEFAULTS, "precision": "fp32", **given}


def test_every_module_with_a_paper_has_a_row(table: tuple[ModuleType, ModuleType]) -> None:
    rows = table[0].read_configs(BENCHMARKS / "configs" / "zoo.jsonl")
    asked = [models.get(row["model"]) for row, _ in rows]
    wanted = {(entry.paper, entry.module) for entry in models.ENTRIES.values() if entry.paper}
    assert wanted <= {(entry.paper, entry.module) for entry in asked}
    assert not any(entry.small for entry in asked)
    keys = [table[0].key_of(row) for row, _ in rows]
    assert len(set(keys)) == len(keys)


def test_phases_of_rows_are_phases_of_their_modules(table: tuple[ModuleType, ModuleType]) -> None:
    for row, note in table[0].read_configs(BENCHMARKS / "configs" / "zoo.jsonl"):
        phases = str(row["overrides"].get("phase", "")).split("+")
        if phases != [""]:
            assert set(phases) <= set(models.load(models.get(row["model"])).PHASES)
        assert note or not {"layers", "context", "frames"} & set(row["overrides"]), f"{row['model']} is smaller than its paper's: say so"


def test_a_touched_forecast_is_refused(table: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "forecast.jsonl"
    rows = [{"key": "a", "predicted": {"seconds": 0.1}}, {"key": "b", "predicted": {"seconds": 0.2}}]
    table[0].write_sealed(path, rows)
    assert table[0].rows_of(path) == rows and len(table[0].seal_of(path)) == 64
    path.write_text(path.read_text().replace("0.2", "0.3"))
    with pytest.raises(SystemExit, match="seal"):
        table[0].seal_of(path)


def test_bars_are_median_and_worst_or_ninetieth(table: tuple[ModuleType, ModuleType]) -> None:
    good = [({}, {}, {"allocated": 0.01 * sign, "seconds": size}) for sign, size in ((1, 0.05), (-1, -0.08), (1, 0.09), (9, 0.2))]
    found = table[0].bars_of(good)
    assert found["allocated"]["worst"] == pytest.approx(0.09) and not found["allocated"]["held"]
    assert found["seconds"]["median"] == pytest.approx(0.085) and found["seconds"]["held"]
    assert not table[0].bars_of([*good, *[({}, {}, {"seconds": -0.5})] * 2])["seconds"]["held"]


def test_what_fits_beside_the_others_is_started_next(table: tuple[ModuleType, ModuleType]) -> None:
    rows = [{"predicted": {"reserved": size}} for size in (90 * 2**30, 10 * 2**30)]
    start = table[0]._next
    assert start(rows, 100 * 2**30, alone=False) is rows[0] and start(rows, 20 * 2**30, alone=False) is rows[1]
    assert start(rows, 2**30, alone=False) is None and start(rows, 2**30, alone=True) is rows[0]


def test_large_weights_are_drawn_where_they_go(table: tuple[ModuleType, ModuleType]) -> None:
    with table[1].LaterDraws() as draws:
        large, small = nn.Linear(1024, 1024), nn.Linear(16, 16)
        drawn = small.weight.detach().clone()
    nn.Sequential(large, small)._apply(lambda t: draws.here(t, "cpu", False))
    assert torch.equal(small.weight, drawn)
    assert large.weight.std().item() == pytest.approx(1 / 1024**0.5 / 3**0.5, rel=0.01)
    assert large.weight.abs().max() <= 1 / 1024**0.5


def test_phases_in_turn_train_the_same_weights(table: tuple[ModuleType, ModuleType]) -> None:
    asked = config(table, model="perforated-tiny", micro_batch=2, overrides={"phase": "neuron+dendrite"})
    steps, draws = table[1].built(asked, "cpu")
    table[1].placed(steps, draws, "cpu", False)
    first, second = (dict(step.model.named_parameters()) for step in steps)
    assert all(first[name].data_ptr() == p.data_ptr() for name, p in second.items())
    before = {name: p.detach().clone() for name, p in first.items()}
    table[1].round_of(steps)()
    for name, p in first.items():
        assert torch.equal(p, before[name]) != (p.requires_grad or second[name].requires_grad), name


@pytest.mark.slow(reason="a real row; rows on this CPU run in test_zoo_check.py")
def test_a_row_really_runs(table: tuple[ModuleType, ModuleType]) -> None:
    found = table[1].really(config(table, model="ff-tiny"), "cpu")
    assert found["finite"] and found["steps"] >= 10 and len(found["losses"]) == 8
    assert found["least"] <= found["seconds"] <= found["most"]
    assert json.loads(json.dumps(found)) == found
