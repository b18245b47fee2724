"""Pointer chases and product rates: the cycle is one, what is measured is plausible, and it survives journal, profile and shared file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.cli import main
from foretell.errors import FileFormatError
from foretell.hardware.probe import chase, journal
from foretell.hardware.probe.summary import dtype_rates, loads
from foretell.hardware.profile import load, save
from foretell.hardware.share import check, file
from foretell.units import KIB, MIB

SHIPPED = Path(__file__).resolve().parents[2] / "foretell" / "hardware" / "profiles" / "H200-SXM-141GB.json"
HUB = Path(__file__).resolve().parents[2] / "hub" / "H200-SXM-141GB.foretell.json.gz"
LATENCY = ({"working_set_bytes": 16384, "seconds": 1.7e-8, "spread": 0.01}, {"working_set_bytes": 1 << 30, "seconds": 4.1e-7, "spread": 0.02})
RATES = ({"dtype": "bfloat16", "side": 8192, "seconds": 1.5e-3, "spread": 0.01},)


@pytest.mark.parametrize("size", [4 * KIB, 16 * KIB, 1 * MIB])
def test_a_cycle_meets_every_line_once(size: int) -> None:
    made = chase.cycle(size, "cpu")
    seen, at = [], int(made.order[0])
    for _ in range(len(made.order)):
        seen.append(at)
        at = int(made.table[at])
    lines = size // chase.LINE_BYTES["cpu"]
    assert at == seen[0] and sorted(seen) == [8 * line for line in range(lines)]
    steps = np.diff(seen)
    assert len(set(steps.tolist())) > lines // 4, "a regular stride would be guessed by the prefetcher"


def test_memory_takes_longer_than_the_first_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chase.WORKING_SETS, "cpu", (16 * KIB, 64 * MIB))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that seconds are those of this thread
    try:
        small, large = chase.latencies("cpu")
    finally:
        torch.set_num_threads(threads)
    assert 5e-10 < small["seconds"] < 5e-8
    assert 3 * small["seconds"] < large["seconds"] < 2e-6


def test_rates_are_of_dtypes_this_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chase.SIDES, "cpu", (64, 128))
    found = {row["dtype"]: chase.flops_per_second(row) for row in chase.rates("cpu")}
    assert {"float32", "float64"} <= found.keys()
    assert all(1e6 < rate < 1e14 for rate in found.values())


def test_a_dtype_without_products_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(side: int) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(chase, "_products", lambda kind: [("float4", none), ("float32", chase._plain("cpu", torch.float32))])
    monkeypatch.setitem(chase.SIDES, "cpu", (64,))
    assert [row["dtype"] for row in chase.rates("cpu")] == ["float32"]


# ---------------------------------------------------------------- kept


def test_journal_and_profile_keep_them_and_older_ones_lack_them(tmp_path: Path) -> None:
    old = load(SHIPPED)
    save(replace(old, latency=LATENCY, rates=RATES), tmp_path / "new.json")
    again = load(tmp_path / "new.json")
    assert again.latency == LATENCY and again.rates == RATES
    assert replace(again, latency=(), rates=()) == replace(old, latency=(), rates=())
    about, entries = journal.read(SHIPPED.with_name("H200-SXM-141GB.rows.jsonl.gz"))
    few = [entry for entry in entries if entry.stage in ("level", "launch")]
    more = [*few, *(journal.JournalEntry("latency", 0.1, row) for row in LATENCY), *(journal.JournalEntry("rate", 0.1, row) for row in RATES)]
    journal.write(tmp_path / "rows.jsonl", about, more)
    found = journal.gather(tmp_path / "rows.jsonl")
    assert found.latency == LATENCY and found.rates == RATES
    assert not any(text.startswith(("latency", "rates")) for text in journal.measured(about, few, "full", journal.stages("cuda")).missing)
    assert loads(found.latency) == {16384: 1.7e-8, 1 << 30: 4.1e-7}
    assert dtype_rates(found.rates)["bfloat16"] == pytest.approx(2 * 8192**3 / 1.5e-3)


@pytest.mark.slow(reason="a whole file written and read; journals and profiles are above, files in test_share.py")
def test_a_shared_file_has_them_where_they_were_measured() -> None:
    content = HUB.read_bytes()
    old = file.read(content, "hub")
    assert file.write(old) == content, "a file without them is written as it was"
    new = replace(old, measured=replace(old.measured, latency=LATENCY, rates=RATES))
    again = file.read(file.write(new), "new")
    assert again.measured.latency == LATENCY and again.measured.rates == RATES
    assert list(check.complaints(again)) == list(check.complaints(old)) == []
    slow = replace(new, measured=replace(new.measured, latency=({**LATENCY[0], "seconds": 17.0},)))
    quick = replace(new, measured=replace(new.measured, rates=({**RATES[0], "seconds": 1e-4},)))
    assert "in other units" in next(check.complaints(slow))
    assert "a product in bfloat16" in next(check.complaints(quick))


def test_wrong_ones_are_refused(tmp_path: Path) -> None:
    data = json.loads(SHIPPED.read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**data, "rates": [{"dtype": "float32", "side": 0, "seconds": 1.0}]}))
    with pytest.raises(FileFormatError, match="rates"):
        load(tmp_path / "bad.json")


def test_the_page_of_a_device_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    save(replace(load(SHIPPED), latency=LATENCY, rates=RATES), tmp_path / "profiles" / "H200-SXM-141GB.json")
    assert main(["hardware", "H200"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured 733 TFLOP/s, 74 %" in shown and "1.0 GiB 410 ns" in shown
    assert main(["hardware", "H200", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["hardware"]["measured"]
    assert measured["load_seconds"]["16384"] == 1.7e-8
