"""Shared probes: written, read back, refused where they lie, combined, added whole or not at all. Rows are the shipped journal's."""

from __future__ import annotations

import getpass
import gzip
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell.cli import main
from foretell.errors import FileFormatError, UnknownName, UserError
from foretell.hardware import catalog, parse
from foretell.hardware.probe import journal, ops, run
from foretell.hardware.probe import share as measuring
from foretell.hardware.profile import Case, Measured, OpRow, Profile, find_profile, profile_stamp
from foretell.hardware.share import added, check, file, pack
from foretell.hardware.share.combine import combined
from foretell.price import bands, shared
from foretell.price.machine import machine
from foretell.price.speeds import alone
from foretell.trace.types import TensorSpec

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "foretell" / "hardware" / "profiles" / "H200-SXM-141GB.rows.jsonl.gz"
HUB = ROOT / "hub"
H200 = "H200-SXM-141GB"
Change = Callable[[dict[str, Any]], None]


# ---------------------------------------------------------------- files out of the shipped rows


@pytest.fixture(scope="session")
def whole() -> Measured:
    return journal.gather(SHIPPED)


def few(whole: Measured, more: int = 4) -> Measured:
    """As few cases as a file may have, and some; reference steps of small models."""
    kept = []
    for family, least in check.LEAST_CASES.items():
        kept += [case for case in whole.cases if case.family == family][: least + more]
    small = [step for step in whole.steps if str(step["config"]["model"]).endswith("-tiny")]
    return replace(whole, cases=tuple(kept), steps=tuple(small[:5]))


@pytest.fixture(scope="session")
def small(whole: Measured) -> bytes:
    return file.write(file.shared_of(few(whole), known=True))


def changed(content: bytes, change: Change, *, sign: bool = True) -> bytes:
    """The file with its content changed, and with a digest that fits unless told."""
    data = json.loads(gzip.decompress(content))
    change(data)
    data |= {"digest": file.digest_of(data)} if sign else {}
    return gzip.compress(file.canonical(data), mtime=0)


def times(factor: float) -> Change:
    """All measured times, so many times as long."""

    def change(data: dict[str, Any]) -> None:
        for name in ("ns", "host_ns"):
            data["ops"][name] = [max(1, round(value * factor)) for value in data["ops"][name]]
        for part in ("steps", "copies"):
            for entry in data[part]:
                for name in ("seconds", "host_seconds", "busy_seconds"):
                    if entry.get(name):
                        entry[name] *= factor
        for entry in data["levels"]:
            entry["bytes_per_second"] /= factor

    return change


def renamed(name: str, reported: str = "", **figures: Any) -> Change:
    def change(data: dict[str, Any]) -> None:
        data["about"]["device"] = data["about"]["figures"]["name"] = name
        data["about"]["reported_as"] = reported or data["about"]["reported_as"]
        data["about"]["figures"] |= figures

    return change


UNKNOWN = renamed("Hopper-X-141GB", "NVIDIA Hopper X")
"""The same rows said to be of a device that no catalogue has."""


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


@settings(max_examples=60, deadline=None)
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


# ---------------------------------------------------------------- added


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile without the minutes of fitting: ops of the shipped one."""
    shipped = find_profile(H200)
    assert shipped is not None

    def fit(measured: Measured, device: Any, progress: Any = None) -> Profile:
        made = measured.profile(ops=shipped.ops, host=shipped.host, fitted=shipped.fitted)
        return replace(made, figures=device.to_dict())

    monkeypatch.setattr(shared, "fit_profile", fit)


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"{name}.foretell.json.gz"
    path.write_bytes(content)
    return path


def test_a_device_that_no_catalogue_has_is_known_from_then_on(
    small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str], quick_fit: None
) -> None:
    with pytest.raises(UnknownName):
        parse("Hopper-X-141GB")
    path = put(tmp_path, "x", changed(small, UNKNOWN))
    assert main(["hardware", "add", str(path)]) == 0
    said = capsys.readouterr().out
    assert "added Hopper-X-141GB, which the catalogue does not have" in said and "--on Hopper-X-141GB" in said
    device = parse("2xhopper-x-141gb").device
    assert device.sm_count == 132 and "shared probe" in device.sources["sm_count"]
    assert catalog.find_reported("NVIDIA Hopper X") == device
    profile = find_profile("Hopper-X-141GB")
    assert profile is not None and profile.shared["files"] == 1
    known = machine(device, profile)
    assert known is not None and known.provenance == "measured" and "a shared probe of NVIDIA Hopper X" in known.notes[0]
    assert main(["hardware"]) == 0
    assert re.search(r"Hopper-X-141GB .* shared", capsys.readouterr().out)
    assert main(["hardware", "Hopper-X-141GB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["hardware"]["device"]["profile"]
    assert told["kind"] == "shared" and file.read(path.read_bytes(), "f").short in told["source"]
    assert main(["fit", "gpt-tiny", "--on", "Hopper-X-141GB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hardware"]["name"] == "Hopper-X-141GB" and any("shared probe" in line for line in answer["assumptions"])


def test_adding_again_changes_nothing(small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str], quick_fit: None) -> None:
    path = put(tmp_path, "x", small)
    assert main(["hardware", "add", str(path)]) == 0
    stamp = profile_stamp(H200)
    assert main(["hardware", "add", str(tmp_path)]) == 0
    assert "1 file was added before" in capsys.readouterr().out and profile_stamp(H200) == stamp


def test_own_comes_before_added_and_added_before_shipped(small: bytes, tmp_path: Path, cache_dir: Path, quick_fit: None) -> None:
    shipped = find_profile(H200)
    assert shipped is not None and not shipped.shared
    shared.add([put(tmp_path, "x", small)])
    found = find_profile(H200)
    assert found is not None and found.shared and found.mode == "share"
    from foretell.hardware.profile import own_path, save

    save(replace(shipped, mode="full", date="2020-01-01"), own_path(shipped))
    found = find_profile(H200)
    assert found is not None and not found.shared and found.date == "2020-01-01"


def test_an_added_cpu_speaks_for_the_same_cpu_alone(tmp_path: Path, cache_dir: Path, quick_fit: None, small: bytes) -> None:
    plain = find_profile("CPU", reported_as="Some CPU")
    shared.add([put(tmp_path, "x", small)])
    entry = added.entries()[0]
    added.write([replace(entry, device="CPU", backend="cpu", reported_as="Other CPU")])
    assert find_profile("CPU", reported_as="Some CPU") == plain


# ---------------------------------------------------------------- several of one device


def two(small: bytes, factor: float) -> list[file.Shared]:
    def later(data: dict[str, Any]) -> None:
        times(factor)(data)
        data["about"]["date"] = "2026-11-16"

    second = file.write(file.read(changed(small, later), "b"))  # with as many digits as a file has
    return [file.read(small, "a"), file.read(second, "b")]


def test_two_files_give_their_middle_and_their_spread(small: bytes) -> None:
    first, second = two(small, 1.05)
    found = combined([first, second], (0.9, 1.1))
    assert found.contradiction == ""
    assert found.factors == pytest.approx((1.05**-0.5, 1.05**0.5), rel=2e-3)
    assert found.low == found.factors[0] and found.high == found.factors[1]
    for a, b, both in zip(first.measured.rows, second.measured.rows, found.measured.rows, strict=True):
        if a.seconds > 1e-6:
            assert both.seconds == pytest.approx(math.sqrt(a.seconds * b.seconds))
    assert len(found.measured.steps) == 5
    assert found.measured.steps[0]["seconds"] == pytest.approx(1.025 * first.measured.steps[0]["seconds"], rel=1e-3)


def test_rows_of_one_file_alone_are_scaled_to_the_middle(small: bytes) -> None:
    first, second = two(small, 1.2)
    fewer = replace(first, measured=replace(first.measured, cases=first.measured.cases[:-3]))
    found = combined([fewer, second], (0.8, 1.3))
    alone_now, before = found.measured.cases[-1].rows[0], second.measured.cases[-1].rows[0]
    assert alone_now.seconds == pytest.approx(before.seconds / math.sqrt(1.2), rel=5e-3)


def test_three_files_take_the_middle_one(small: bytes) -> None:
    first, second = two(small, 1.04)
    found = combined([first, second, two(small, 1.5)[1]], (0.9, 1.1))
    assert found.factors[1] == pytest.approx(1.0, abs=2e-3) and found.high == pytest.approx(1.5 / 1.04, rel=5e-3)


def test_files_that_contradict_each_other_are_named_and_the_band_holds_both(
    small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str], quick_fit: None
) -> None:
    first, second = two(small, 1.6)
    assert main(["hardware", "add", str(put(tmp_path, "a", small))]) == 0
    before = find_profile(H200)
    assert main(["hardware", "add", str(put(tmp_path, "b", file.write(second)))]) == 0
    said = capsys.readouterr().out
    assert f"note: {second.short} (2026-11-16) takes 1.60 times as long as {first.short}" in said
    profile = find_profile(H200)
    assert before is not None and profile is not None and profile.shared["files"] == 2
    device = catalog.find(H200)
    narrow, wide = machine(device, before), machine(device, profile)
    assert narrow is not None and wide is not None
    low, high = bands.factors(bands.Evidence())
    assert alone(narrow).band() == (low, high)
    assert alone(wide).band() == pytest.approx((low / math.sqrt(1.6), high * math.sqrt(1.6)), rel=5e-3)
    assert any("do not meet" in note for note in wide.notes)
    assert len(list(added.folder().glob("*.json.gz"))) == 1, "the older profile is cleared away"
    assert main(["hardware", H200]) == 0
    assert "2 shared probes" in capsys.readouterr().out


# ---------------------------------------------------------------- killed in the middle


@pytest.mark.parametrize("where", ["save", "added.write"])
def test_killed_in_the_middle_nothing_half_is_left(where: str, small: bytes, tmp_path: Path, cache_dir: Path, quick_fit: None) -> None:
    """Killed as by SIGKILL before the index is written: nothing counts, and the next addition clears it away."""
    path = put(tmp_path, "x", small)
    code = (
        "import os, signal, dataclasses\n"
        "from foretell.price import shared\n"
        "from foretell.hardware.share import added\n"
        "kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "shared.fit_profile = lambda measured, device, progress: dataclasses.replace(measured.profile(ops={}), figures=device.to_dict())\n"
        f"shared.{where} = kill\n"
        f"shared.add([{str(path)!r}])\n"
    )
    child = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT), "FORETELL_CACHE": str(cache_dir)}, check=False)
    assert child.returncode == -signal.SIGKILL
    assert added.entries() == () and not added.index_path().exists()
    found = find_profile(H200)
    assert found is not None and not found.shared
    shared.add([path])
    assert len(added.entries()) == 1 and len(list(added.files_folder().iterdir())) == 1
    assert len([one for one in added.folder().iterdir() if one.is_file()]) == 2, "the index and one profile"


def test_an_error_in_the_middle_clears_what_was_written(small: bytes, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "fit_profile", stop)
    with pytest.raises(KeyboardInterrupt):
        shared.add([put(tmp_path, "x", small)])
    assert not added.entries() and not list(added.files_folder().iterdir())


def test_a_spoiled_index_counts_for_nothing(small: bytes, tmp_path: Path, cache_dir: Path, quick_fit: None) -> None:
    shared.add([put(tmp_path, "x", small)])
    head = b'{"kind":"foretell-added","schema":'
    for text in (b"", b"[]", head + b'9,"added":[]}', head + b'1,"added":[{"device":3}]}', b"[" * 99999):
        added.index_path().write_bytes(text)
        assert added.entries() == () and find_profile(H200) is not None


# ---------------------------------------------------------------- fitted for real, and measured


@pytest.mark.slow(reason="fits a profile; test_calibrate.py has the fitting itself, and tests above all that is around it")
def test_rows_of_a_shared_file_are_fitted_as_a_probe_is(small: bytes, tmp_path: Path, cache_dir: Path) -> None:
    done = shared.add([put(tmp_path, "x", small)])
    profile = find_profile(H200)
    assert profile is not None and {"gemm", "stream", "attention", "convolution"} <= set(profile.ops)
    assert profile.host["weights"] and done.added[0].sources[0].rows == len(file.read(small, "f").measured.rows)
    known = machine(catalog.find(H200), profile)
    assert known is not None and known.provenance == "measured"


def test_measuring_writes_one_anonymous_file_or_says_what_is_wrong(
    whole: Measured, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`foretell probe --share` with the measuring itself replaced: checked before it is written."""
    monkeypatch.setattr(measuring.machine, "choose", lambda asked: "cpu")
    monkeypatch.setattr(measuring.run, "probe", lambda *_, **__: few(whole))
    out = tmp_path / "h200.foretell.json.gz"
    assert main(["probe", "--share", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["share"]
    assert told["device"] == H200 and told["bytes"] == out.stat().st_size <= file.MOST_BYTES
    assert file.load(out).digest == told["digest"]
    out.unlink()
    cut = replace(few(whole), cases=few(whole).cases[:20])
    monkeypatch.setattr(measuring.run, "probe", lambda *_, **__: cut)
    assert main(["probe", "--share", str(out)]) == 2
    assert "nothing was written" in capsys.readouterr().err and not out.exists()


def test_ctrl_c_tells_how_to_resume(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.run, "probe", stop)
    out = tmp_path / "x.foretell.json.gz"
    assert main(["probe", "--share", str(out), "--device", "cpu"]) == 130
    assert f"resume with: foretell probe --share {out} --device cpu --resume" in capsys.readouterr().err


# ---------------------------------------------------------------- the hub


HUB_FILES = sorted(HUB.glob("*"))


@pytest.mark.parametrize("path", [path for path in HUB_FILES if path.name != "README.md"], ids=lambda path: path.name)
def test_every_file_of_the_hub_can_be_believed(path: Path) -> None:
    assert path.name.endswith(file.END) and path.stat().st_size <= file.MOST_BYTES
    found = file.load(path)
    check.refuse(found, str(path))
    assert path.name.startswith(found.measured.about.device) and file.write(found) == path.read_bytes()


def test_the_hub_says_how_to_share() -> None:
    text = (HUB / "README.md").read_text()
    assert "foretell probe --share" in text and "foretell hardware add" in text


# ---------------------------------------------------------------- several GPUs, and ones that nobody knows


def test_several_gpus_add_what_joins_them(whole: Measured, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of ranks gets its share of the five minutes; where it fails the file says so."""
    one = {"op": "all_reduce", "ranks": 8, "nodes": 1, "backend": "nccl", "spread": 0.1}
    rows = tuple({**one, "bytes": 2**20 * n, "seconds": 1e-4 * n} for n in (1, 4))
    links = tuple(tuple(0.0 if a == b else 4e11 for b in range(8)) for a in range(8))
    asked: list[float] = []

    def probe(*_: Any, seconds: float, **__: Any) -> Measured:
        asked.append(seconds)
        return few(whole)

    monkeypatch.setattr(measuring.machine, "choose", lambda asked: "cuda")
    monkeypatch.setattr(measuring.machine, "refuse_busy", lambda: None)
    monkeypatch.setattr(measuring.machine, "device_of", lambda kind: catalog.find(H200))
    monkeypatch.setattr(measuring.run, "probe", probe)
    monkeypatch.setattr(measuring, "_cards", lambda: 8)
    for found, missing in (({"collectives": rows, "links": links}, ()), (None, ("ranks",))):
        monkeypatch.setattr(measuring, "_ranks", lambda count, seconds, found=found: found)
        made, _ = measuring.share("auto", out=tmp_path / "x.foretell.json.gz", progress=lambda doing, share: None)
        assert made.measured.missing == missing and len(made.collectives) == (2 if found else 0)
    assert made.links is None and asked[0] + measuring.RANKS_SECONDS <= run.BUDGET_SECONDS["cuda", "share"] + 1e-9


def test_an_unknown_gpu_has_a_name_of_its_own() -> None:
    from foretell.hardware.probe.unfamiliar import name_of

    assert name_of("NVIDIA GeForce RTX 4060 Ti", 16 * 2**30) == "RTX-4060-Ti-16GB"
    assert name_of("AMD Radeon PRO W7900 (gfx1100)", 48 * 2**30) == "PRO-W7900-48GB"
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name_of("NVIDIA", 2**30))
