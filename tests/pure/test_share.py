"""Shared probes: written, read back, refused where they lie, combined, added whole or not at all. Rows are the shipped journal's."""

from __future__ import annotations

import getpass
import gzip
import json
import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.cli import main
from foretell.errors import FileFormatError, UserError
from foretell.hardware.probe import ops, run
from foretell.hardware.probe import share as measuring
from foretell.hardware.profile import Case, Measured, OpRow
from foretell.hardware.share import added, check, file, pack
from foretell.trace.types import TensorSpec
from tests.pure.shared_probes import H200, UNKNOWN, Change, changed, few, renamed, small_file, times, whole_probe

FIXTURES = (small_file, whole_probe)

# ---------------------------------------------------------------- round trip


def test_what_is_written_is_read(whole: Measured, small: bytes) -> None:
    found = file.read(small, "f")
    check.refuse(found, "f")
    before = few(whole)
    assert [(case.family, case.number) for case in found.measured.cases] == [(case.family, case.number) for case in before.cases]
    for then, now in zip(before.rows, found.measured.rows, strict=True):
        assert then[:4] == now[:4]
        assert now.seconds == pytest.approx(then.seconds, rel=1e-3, abs=1e-9)
        assert now.host_seconds == pytest.approx(then.host_seconds, rel=1e-2, abs=1e-9)
    assert len(found.measured.steps) == 5 and found.measured.copies and found.measured.power
    assert found.measured.about.date == whole.about.date[:10] and found.device.name == H200


def test_the_same_measurements_give_the_same_bytes(whole: Measured, small: bytes) -> None:
    again = file.write(file.shared_of(few(whole), known=True))
    assert again == small and small[4:8] == bytes(4), "no time stands in the header"
    assert file.write(file.read(small, "f")) == small


def test_the_same_seed_gives_the_same_cases() -> None:
    first = ops.order("cuda", mode="share")
    assert first == ops.order("cuda", mode="share") and set(first) < set(ops.order("cuda"))
    begun = first[: len(first) // 3]
    assert {family for family, _ in first} == {family for family, _ in begun}, "any beginning has every family"


@pytest.mark.slow(reason="a whole probe twice as long; files are written and read above")
def test_a_whole_probe_within_five_minutes_stays_below_the_limit(whole: Measured) -> None:
    """Nearly twice as many cases as there is time for."""
    known = {(case.family, case.number): case for case in whole.cases}
    cases = tuple(known[key] for key in ops.order("cuda", mode="share") if key in known)[:4000]
    content = file.write(file.shared_of(replace(whole, cases=cases), known=True))
    assert len(content) <= file.MOST_BYTES
    assert run.BUDGET_SECONDS["cuda", "share"] <= 255 and run.BUDGET_SECONDS["cpu", "share"] <= 255


_SPEC = st.builds(
    TensorSpec, st.lists(st.integers(0, 10**6), max_size=4).map(tuple), st.sampled_from(("float32", "bfloat16", "int64", "bool"))
)  # fmt: skip
_ROW = st.builds(
    OpRow, st.sampled_from(("aten.mm.default", "aten.add.Tensor")), st.lists(_SPEC, max_size=3).map(tuple), st.lists(_SPEC, max_size=2).map(tuple),
    st.lists(st.one_of(st.integers(-5, 5), st.booleans(), st.sampled_from(("layout:cc", "tf32"))), max_size=3).map(tuple),
    st.floats(1e-8, 10), st.floats(0, 5), st.floats(0, 1),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.builds(Case, st.sampled_from(("linear", "norm")), st.integers(0, 99), st.lists(_ROW, max_size=4).map(tuple)), max_size=5))
def test_any_rows_survive_packing(cases: list[Case]) -> None:
    found = pack.unpacked(json.loads(json.dumps(pack.packed(cases))))
    assert [(case.family, case.number, [row[:4] for row in case.rows]) for case in found] == [
        (case.family, case.number, [row[:4] for row in case.rows]) for case in cases
    ]
    for then, now in zip((row for case in cases for row in case.rows), (row for case in found for row in case.rows), strict=True):
        assert math.isclose(now.seconds, then.seconds, rel_tol=1e-3, abs_tol=1e-9)
        assert [type(one) for one in now.attrs] == [type(one) for one in then.attrs], "true is not 1"


# ---------------------------------------------------------------- nobody's machine


def test_nothing_tells_whose_machine_it_was(whole: Measured) -> None:
    """Even where notes, reasons and figures name it."""
    private = ["/home/alice/run", "alice", "gpu-box-17", "GPU-8c1f9a3e-1111-2222-3333-444455556666", os.getcwd(), str(Path.home())]
    about = replace(whole.about, figures={**whole.about.figures, "sources": {"memory_bytes": f"read on {private[2]}"}})
    told = replace(few(whole), about=about, notes=tuple(private), missing=(f"disk: 3 GiB free at {private[0]}",))
    text = gzip.decompress(file.write(file.shared_of(told, known=True))).decode()
    for name in (*private, platform.node(), getpass.getuser() if getpass.getuser() != "root" else "alice"):
        assert name not in text
    assert "/" not in re.sub(r'"units":\{[^}]*\}', "", text) and "\\" not in text
    assert json.loads(text)["missing"] == ["disk"]


@pytest.mark.parametrize("text", ["/home/a", "C:\\x", "a\nb", "GPU-8c1f9a3e", "8c1f9a3e-1111-2222-3333-444455556666", "aa:bb:cc:dd:ee:ff", "x" * 200])
def test_a_text_that_tells_more_is_refused(small: bytes, text: str) -> None:
    with pytest.raises(FileFormatError, match=r"about\.host_cpu|name"):
        file.read(changed(small, lambda data: data["about"].__setitem__("host_cpu", text)), "f")


def test_a_host_name_in_the_file_stops_the_writing(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    found = file.read(changed(small, lambda data: data["about"].__setitem__("python", "gpu-box-17")), "f")
    measuring._anonymous(found)
    monkeypatch.setattr(platform, "node", lambda: "gpu-box-17.example.org")
    with pytest.raises(Exception, match="names this machine"):
        measuring._anonymous(found)


# ---------------------------------------------------------------- lies and damage


def _drop(family: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        kept = pack.unpacked(data["ops"])
        data["ops"] = pack.packed([case for case in kept if case.family != family])

    return change


def _set(path: str, value: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for name in way:
            data = data[int(name) if name.isdigit() else name]
        data[int(last) if last.isdigit() else last] = value

    return change


def _nested(data: dict[str, Any]) -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    data["clocks"] = deep


LIES: dict[str, tuple[Change, str]] = {
    "twice as fast as the peak": (times(0.4), "TFLOP/s, and H200-SXM-141GB reaches|GB/s, and"),
    "milliseconds as seconds": (times(1000.0), "% of the peak|other units"),
    "microseconds as seconds": (times(1e-3), "reaches"),
    "other units declared": (_set("units.seconds", "ms"), "units"),
    "another device by name": (renamed("A100-SXM-80GB"), "is that of H200"),
    "another device, torch's name too": (renamed("A100-SXM-80GB", "NVIDIA A100-SXM4-80GB"), "A100-SXM-80GB has"),
    "another device's figures": (_set("about.figures.sm_count", 108), "sm_count is 108"),
    "a device beyond physics": (renamed("Magic-1", "Magic", peak_flops_per_second={"float32": 1e19}), "peak of Magic-1"),
    "a negative row": (_set("ops.ns.3", -5), "not negative"),
    "a row that is no number": (_set("ops.ns.3", "5"), "ops.ns"),
    "a fraction": (_set("ops.ns.3", 0.5), "whole numbers"),
    "a negative step": (_set("steps.0.seconds", -1.0), "not positive"),
    "a negative copy": (_set("copies.0.seconds", 0.0), "not positive"),
    "no products": (_drop("linear"), "linear .0 of"),
    "no attention": (_drop("attention"), "attention .0 of"),
    "no steps": (_set("steps", []), "0 reference steps"),
    "no copies": (_set("copies", []), "copies were not measured"),
    "a step of somebody's code": (_set("steps.0.config.model", "evil.py:main"), "none that a probe runs|a text"),
    "a newer schema": (_set("schema", 2), "update foretell"),
    "an older schema": (_set("schema", 0), "schema 0"),
    "another kind": (_set("kind", "foretell-profile"), "no shared probe"),
    "a field too many": (_set("hostname", "box"), "hostname is no field"),
    "a figure too many": (_set("about.figures.serial", "17"), "serial is no field"),
    "a column cut": (_set("ops.host_ns", [1]), "columns of"),
    "a case without pattern": (_set("ops.patterns", []), "no case of these columns"),
    "a time stamp": (_set("about.date", "2026-11-15T07:56:25"), "should be a day"),
    "nested deep": (_nested, "nested too deep"),
    "watts of a power plant": (_set("power.1.watts", 1e5), "draws"),
    "an impossible collective": (
        _set("collectives", [{"op": "all_reduce", "bytes": 1e9, "ranks": 8, "nodes": 1, "backend": "nccl", "seconds": 1e-6}]), "all_reduce moves"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_one_line_and_nothing_is_kept(
    lie: str, small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, told = LIES[lie]
    path = tmp_path / "x.foretell.json.gz"
    path.write_bytes(changed(small, change))
    assert main(["hardware", "add", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1
    assert re.search(told, said.err) and "try:" in said.err, said.err
    assert not added.entries() and not added.folder().exists()


def _bomb() -> bytes:
    return gzip.compress(b"[" + b"0," * 30_000_000 + b"0]", 9)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "changed without a new digest": (lambda c: changed(c, UNKNOWN, sign=False), "digest does not match"),
    "cut short": (lambda c: c[: len(c) // 2], "cut short"),
    "one byte short": (lambda c: c[:-1], "cut short"),
    "empty": (lambda c: b"", "cut short|damaged"),
    "not gzip": (lambda c: gzip.decompress(c), "not compressed"),
    "more after the end": (lambda c: c + b"x", "after its end"),
    "a second member": (lambda c: c + c, "after its end"),
    "NaN": (lambda c: gzip.compress(gzip.decompress(c).replace(b'"seed":1', b'"seed":NaN')), "NaN"),
    "infinite": (lambda c: gzip.compress(gzip.decompress(c).replace(b'"seed":1', b'"seed":1e999')), "not finite"),
    "a number of 5000 digits": (lambda c: gzip.compress(b'{"kind":' + b"1" * 5000 + b"}"), "no JSON"),
    "brackets without end": (lambda c: gzip.compress(b"[" * 500_000), "nested too deep|no JSON"),
    "a bomb": (lambda c: _bomb(), "unpacks to more"),
    "a large file": (lambda c: os.urandom(1_100_000), "more than 1,000,000 bytes"),
    "a list": (lambda c: gzip.compress(b"[]"), "no shared probe"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_one_line(
    damage: str, small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, told = DAMAGE[damage]
    path = tmp_path / "x.foretell.json.gz"
    path.write_bytes(change(small))
    assert main(["hardware", "add", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1 and re.search(told, said.err), said.err
    assert not added.folder().exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_any_flipped_byte_is_refused_or_harmless(small: bytes, place: int, flip: int) -> None:
    spoiled = bytearray(small)
    spoiled[place % len(small)] ^= flip
    try:
        found = file.read(bytes(spoiled), "f")
    except UserError:
        return
    assert file.write(found) == small, "only the header of gzip has bytes that mean nothing"


@pytest.mark.parametrize(("words", "told"), [
    (["hardware", "add"], "no file to add"), (["hardware", "add", "nowhere.foretell.json.gz"], "is no file"),
    (["hardware", "H200", "x"], "beside"), (["probe", "out.gz"], "without --share"), (["probe", "--share", "--full"], "--full does not go"),
    (["probe", "--share", "nowhere/x.gz"], "cannot be written"),
])  # fmt: skip
def test_a_slip_of_the_command_is_one_line(words: list[str], told: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_an_empty_folder_is_told(tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "add", str(tmp_path)]) == 2
    assert "has no file that ends with .foretell.json.gz" in capsys.readouterr().err
