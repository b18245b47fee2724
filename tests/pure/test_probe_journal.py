"""Journals: what was added stays, whatever happens next; only a torn last line is forgiven."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import FileFormatError, UserError
from foretell.hardware.probe import journal
from foretell.hardware.profile import About, OpRow
from foretell.trace.types import TensorSpec

ROOT = Path(__file__).resolve().parents[2]
ABOUT = About(
    device="CPU", reported_as="Xeon", backend="cpu", torch="2.13.0", python="3.11", host_cpu="Xeon",
    date="2026-11-15T00:00:00+00:00", cores=2, threads=2, figures={"name": "CPU"},
)  # fmt: skip
ROW = OpRow("aten.mm.default", (TensorSpec((2, 3), "float32"),), (TensorSpec((2, 2), "float32"),), (True, "x"), 1e-3, 0.1, 0.0)


def ops(number: int, seconds: float = 1e-3) -> dict[str, object]:
    return {"case": ["linear", number], "rows": [ROW._replace(seconds=seconds).to_list()]}


def begun(path: Path) -> Path:
    with journal.begin(path, ABOUT, resume=False) as book:
        book.add("ops", 0.5, ops(0))
        book.add("copy", 0.25, {"name": "pin", "bytes": 4, "seconds": 1.0})
    return path


def test_what_was_added_is_read(tmp_path: Path) -> None:
    about, entries = journal.read(begun(tmp_path / "j.rows.jsonl"))
    assert about == ABOUT
    assert [entry.stage for entry in entries] == ["ops", "copy"]
    found = journal.measured(about, entries, "quick", ("copies", "ops"))
    assert found.rows == (ROW,) and found.copies[0]["name"] == "pin"
    assert found.missing == ("copies: interrupted", "ops: interrupted")


def test_resuming_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    with journal.begin(path, replace(ABOUT, date="later"), resume=True) as book:
        assert book.spent == pytest.approx(0.75)
        assert book.about.date == ABOUT.date
        book.add("ops", 0.1, ops(1))
    assert len(journal.read(path)[1]) == 3


def test_without_resume_it_starts_anew(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    journal.begin(path, ABOUT, resume=False).close()
    assert journal.read(path)[1] == []


def test_a_packed_journal_can_be_gone_on_with(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    packed = journal.pack(path)
    assert packed.name == "j.rows.jsonl.gz" and not path.exists()
    with journal.begin(path, ABOUT, resume=True) as book:
        book.add("ops", 0.1, ops(1))
    assert len(journal.read(path)[1]) == 3


def test_every_torn_last_line_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert [entry.stage for entry in journal.read(path)[1]] == ["ops"]
    with journal.begin(path, ABOUT, resume=True) as book:
        book.add("launch", 0.0, {"device_seconds": 1.0})
    assert [entry.stage for entry in journal.read(path)[1]] == ["ops", "launch"]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    lines = path.read_bytes().split(b"\n")
    for number, text in ((2, b'["ops", 0.5'), (2, b'{"a": 1}'), (2, b'["ops", 0.5]'), (1, b"[]"), (1, b'{"kind": "x"}')):
        damaged = list(lines)
        damaged[number - 1] = text
        path.write_bytes(b"\n".join(damaged))
        with pytest.raises(FileFormatError, match=rf"line {number}|no journal"):
            journal.begin(path, ABOUT, resume=True)
        assert path.read_bytes() == b"\n".join(damaged)


def test_an_empty_or_cut_packed_journal_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "j.rows.jsonl"
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="not even a first line"):
        journal.begin(path, ABOUT, resume=True)
    packed = tmp_path / "k.rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x" * 5000)[:-6])
    with pytest.raises(FileFormatError, match="cut short"):
        journal.read(packed)
    packed.write_bytes(b"not gzip at all")
    with pytest.raises(FileFormatError, match="damaged"):
        journal.read(packed)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":9', 1))
    with pytest.raises(FileFormatError, match="schema 9; this foretell reads 1"):
        journal.read(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.14.0"}, "torch 2.13.0, and this is 2.14.0"),
        ({"device": "H200-SXM-141GB"}, "device CPU, and this is H200-SXM-141GB"),
        ({"reported_as": "EPYC"}, "processor Xeon, and this is EPYC"),
        ({"cores": 8}, "cores 2, and this is 8"),
    ],
)
def test_a_journal_of_another_machine_is_refused_with_both_named(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = begun(tmp_path / "j.rows.jsonl")
    before = path.read_bytes()
    with pytest.raises(UserError, match=told):
        journal.begin(path, replace(ABOUT, **change), resume=True)  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_of_what_was_measured_twice_the_later_counts() -> None:
    entries = [
        journal.JournalEntry("ops", 0.1, ops(1, 1.0)), journal.JournalEntry("ops", 0.1, ops(2, 2.0)), journal.JournalEntry("ops", 0.1, ops(1, 3.0)),
        journal.JournalEntry("copy", 0.1, {"name": "pin", "bytes": 4, "seconds": 1.0}),
        journal.JournalEntry("copy", 0.1, {"name": "pin", "bytes": 8, "seconds": 1.0}),
        journal.JournalEntry("copy", 0.1, {"name": "pin", "bytes": 4, "seconds": 2.0}),
        journal.JournalEntry("clocks", 0.0, {"sm_before_mhz": 1.0, "sm_max_mhz": 9.0}),
        journal.JournalEntry("clocks", 0.0, {"sm_after_mhz": 2.0, "sm_max_mhz": 9.0}),
        journal.JournalEntry("failed", 0.0, {"case": ["norm", 1], "why": "RuntimeError: no"}),
        journal.JournalEntry("skipped", 0.0, {"stage": "disk", "why": "full"}),
        journal.JournalEntry("skipped", 0.0, {"stage": "power", "why": "no driver"}),
        journal.JournalEntry("finished", 0.0, {"stage": "disk", "mode": "quick"}),
    ]  # fmt: skip
    found = journal.measured(ABOUT, entries, "quick")
    assert sorted(row.seconds for row in found.rows) == [2.0, 3.0]
    assert sorted((row["bytes"], row["seconds"]) for row in found.copies) == [(4, 2.0), (8, 1.0)]
    assert found.clocks == {"sm_before_mhz": 1.0, "sm_after_mhz": 2.0, "sm_max_mhz": 9.0}
    assert found.missing == ("power: no driver",)
    assert found.notes == ("1 cases could not run here, most often norm: RuntimeError: no",)


_FILL = """
import resource, sys
from pathlib import Path
from foretell.errors import UserError
from foretell.hardware.probe import journal
sys.path.insert(0, {tests!r})
from test_probe_journal import ABOUT, ops
book = journal.begin(Path(sys.argv[1]), ABOUT, resume=False)
room = Path(sys.argv[1]).stat().st_size + 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
kept = 0
try:
    while True:
        book.add("ops", 0.0, ops(kept))
        kept += 1
except UserError as error:
    print(kept, error)
"""


def test_a_disk_that_fills_up_keeps_every_whole_line(tmp_path: Path) -> None:
    """The limit on a file's size fails a write half-way, as a full disk does."""
    path = tmp_path / "j.rows.jsonl"
    code = _FILL.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    kept, _, told = done.stdout.partition(" ")
    assert int(kept) > 3
    assert f"{kept} measured cases are kept" in told and "the disk is full" in told and "--resume" in told
    assert path.read_bytes().endswith(b"\n")
    assert len(journal.read(path)[1]) == int(kept)


def test_a_journal_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="nothing was measured"):
        journal.begin(tmp_path / "file" / "j.rows.jsonl", ABOUT, resume=False)
