"""Profile files: what is written is read back, what is foreign or damaged is refused with both sides named."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import FileFormatError, UserError
from foretell.hardware import find
from foretell.hardware.lookup import find_profile, profile_stamp
from foretell.hardware.probe.cases.blocks import BLOCKS
from foretell.hardware.probe.cases.families import FAMILIES
from foretell.hardware.probe.cases.irregular import RARE
from foretell.hardware.probe.cases.pictures import PICTURES
from foretell.hardware.probe.cases.scattered import SCATTERED
from foretell.hardware.probe.journal import gather
from foretell.hardware.probe.summary import fastest, products, summary
from foretell.hardware.profile import About, Case, Measured, OpRow, Profile, journal_path, load, minor, own_path, save
from foretell.trace.types import TensorSpec

SHIPPED = Path(__file__).resolve().parents[2] / "foretell" / "hardware" / "profiles"


def profile(**changes: object) -> Profile:
    plain = Profile(
        device="H200-SXM-141GB", reported_as="NVIDIA H200", backend="cuda", torch="2.11.0+cu130", python="3.12.1",
        host_cpu="Xeon", date="2026-11-15T00:00:00+00:00", mode="quick",
        ops={"gemm": {"parts": [{"laws": {"": {"one": 0.5}}, "trees": None}], "accuracy": {}}},
        power=({"name": "idle", "watts": 79.4},), copies=({"name": "pin", "bytes": 5, "seconds": 0.1},),
        clocks={"sm_max_mhz": 1980.0}, links=((0.0, 1e9), (2e9, 0.0)), missing=("disk: short",), notes=("a note",),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_what_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    path = save(profile(), tmp_path / "deep" / name)
    assert load(path) == profile()
    assert load(path).partial and not replace(profile(), missing=()).partial
    assert [item.name for item in path.parent.iterdir()] == [name]


def test_a_profile_of_another_device_is_refused_with_both_named(tmp_path: Path) -> None:
    path = save(profile(), tmp_path / "p.json")
    assert load(path, device="H200-SXM-141GB", torch_version="2.11.3") == profile()
    with pytest.raises(UserError, match=r"profile of H200-SXM-141GB \(NVIDIA H200\), and L40S is asked for"):
        load(path, device="L40S")


def test_a_profile_of_another_torch_is_refused_with_both_named(tmp_path: Path) -> None:
    path = save(profile(), tmp_path / "p.json")
    with pytest.raises(UserError, match=r"torch 2\.11\.0\+cu130, and this is torch 2\.13\.0"):
        load(path, torch_version="2.13.0")


@pytest.mark.parametrize(("version", "short"), [("2.11.0+cu130", "2.11"), ("2.13.0a0+git12", "2.13"), ("2.9", "2.9")])
def test_minor_versions(version: str, short: str) -> None:
    assert minor(version) == short


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"kind": "foretell-trace", "schema": 1}', "its kind is 'foretell-trace'"),
        ("[1, 2]", "no profile: its kind is 'list'"),
        ('{"kind": "foretell-profile", "schema": 7}', "schema 7; this foretell reads 1"),
        ('{"kind": "foretell-profile", "schema": 1, "device": "A100"}', "missing: reported_as, backend, torch"),
        ("", "cut short"),
        ("\x00\xff", "cut short or no JSON"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=problem):
        load(path)


def test_a_field_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    data = {**profile().to_dict(), "ops": [1], "power": {}}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match="wrong: ops, power"):
        load(path)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_every_cut_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    path = save(profile(), tmp_path / name)
    whole = path.read_bytes()
    for end in (1, 10, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError):
            load(path)


def test_a_missing_file_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the profile"):
        load(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        save(profile(), tmp_path / "file" / "p.json")
    with pytest.raises(UserError, match="could not be written"):
        save(profile(), "/dev/full/p.json")


# ---------------------------------------------------------------- which one is used


def test_the_users_own_comes_before_the_shipped(cache_dir: Path) -> None:
    shipped = find_profile("H200-SXM-141GB")
    assert shipped is not None and shipped.date.startswith("2026")
    before = profile_stamp("H200-SXM-141GB")
    path = save(profile(date="2027-01-01T00:00:00+00:00"), cache_dir / "profiles" / "H200-SXM-141GB.json")
    found = find_profile("H200-SXM-141GB")
    assert found is not None and found.date.startswith("2027")
    stamped = profile_stamp("H200-SXM-141GB")
    assert stamped != before
    save(profile(date="2028-01-01T00:00:00+00:00"), path)
    assert profile_stamp("H200-SXM-141GB") != stamped


def test_what_is_foreign_damaged_or_without_ops_is_passed_over(cache_dir: Path) -> None:
    place = cache_dir / "profiles"
    assert find_profile("L4-24GB") is None
    save(profile(device="L4-24GB", ops={}), place / "L4-24GB.json")
    save(profile(device="A100"), place / "L4-24GB-2.json")
    (place / "L4-24GB-3.json").write_text("{")
    assert find_profile("L4-24GB") is None
    save(profile(device="L4-24GB"), place / "L4-24GB-4.json")
    assert find_profile("L4-24GB") == profile(device="L4-24GB")
    assert find_profile("L4-24GB", "2.13.0") is None
    assert find_profile("L4-24GB", "2.11.9") is not None


def test_of_several_cpus_the_one_asked_for_is_found(cache_dir: Path) -> None:
    for number, name in enumerate(("Xeon(R) A", "EPYC B")):
        one = profile(device="CPU", backend="cpu", reported_as=name, cores=2, date=f"202{number}-01-01")
        save(one, own_path(one))
    assert sorted(path.name for path in (cache_dir / "profiles").iterdir()) == [
        "CPU-EPYC-B-2-cores.json", "CPU-Xeon-A-2-cores.json",
    ]  # fmt: skip
    first = find_profile("CPU", reported_as="Xeon(R) A")
    assert first is not None and first.reported_as == "Xeon(R) A"
    newest = find_profile("CPU")
    assert newest is not None and newest.reported_as == "EPYC B"


def test_rows_are_kept_beside_the_profile() -> None:
    assert journal_path("a/H200.json") == Path("a/H200.rows.jsonl")
    assert journal_path("a/H200.json.gz") == Path("a/H200.rows.jsonl")
    assert journal_path("a/plain") == Path("a/plain.rows.jsonl")


def test_profiles_and_journals_do_without_torch() -> None:
    names = "foretell.hardware.profile, foretell.hardware.probe, foretell.hardware.probe.journal, foretell.hardware.probe.summary"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, check=False).returncode == 0


# ---------------------------------------------------------------- figures


def row(name: str, seconds: float, *shapes: tuple[int, ...], dtype: str = "float32", attrs: tuple[object, ...] = ()) -> OpRow:
    *inputs, output = (TensorSpec(shape, dtype) for shape in shapes)
    return OpRow(name, tuple(inputs), (output,), attrs, seconds, 0.01, 1e-6)


def test_the_best_product_of_each_dtype() -> None:
    rows = [
        row("aten.mm.default", 1.0, (10, 20), (20, 30), (10, 30)),  # 2*10*20*30 = 12,000
        row("aten.mm.default", 0.5, (10, 20), (20, 30), (10, 30)),
        row("aten.addmm.default", 1.0, (30,), (10, 50), (50, 30), (10, 30)),  # 30,000
        row("aten.bmm.default", 1.0, (2, 4, 8), (2, 8, 16), (2, 4, 16), dtype="bfloat16"),  # 2,048
        row("aten.mm.default", 1e-3, (10, 20), (20, 30), (10, 30), attrs=("tf32",)),
        row("aten.bmm.default", 1e-9, (2, 4, 8), (2, 8, 16), (2, 4, 16), dtype="complex64"),
        row("aten.mul.Tensor", 1e-9, (10, 20), (10, 20), (10, 20)),
    ]
    assert products(rows) == {"tf32": 12e6, "float32": 30_000.0, "bfloat16": 2048.0}


def test_copies_are_told_by_their_largest() -> None:
    copies = [{"name": "pin", "bytes": 10, "seconds": 1.0}, {"name": "pin", "bytes": 100, "seconds": 2.0}]
    assert fastest(copies) == {"pin": 50.0}


def test_a_summary_of_nothing_says_nothing() -> None:
    about = About(device="CPU", reported_as="x", backend="cpu", torch="2", python="3", host_cpu="x", date="")
    found = summary(Measured(about=about, mode="quick", missing=("ops: interrupted",)))
    assert found["partial"] and found["rows"] == 0 and found["memory_bytes_per_second"] is None


def test_groups_say_which_rows_were_measured_together() -> None:
    about = About(device="CPU", reported_as="x", backend="cpu", torch="2", python="3", host_cpu="x", date="")
    one = row("aten.mul.Tensor", 1.0, (1,), (1,))
    cases = (Case("linear", 3, (one, one)), Case("norm", 1, (one,)))
    measured = Measured(about=about, mode="full", cases=cases)
    assert measured.rows == (one, one, one)
    assert measured.groups == (("linear", 3), ("linear", 3), ("norm", 1))


# ---------------------------------------------------------------- what travels with foretell


def test_the_shipped_rows_of_the_h200_agree_with_what_is_known_of_it() -> None:
    """Against figures measured apart from the probe: 737 TFLOP/s in bf16, 4.13 TB/s, 53 GB/s over PCIe."""
    path = SHIPPED / "H200-SXM-141GB.rows.jsonl.gz"
    assert path.stat().st_size < 800_000
    measured = gather(path)
    assert measured.about.device == find("H200").name and minor(measured.about.torch) == "2.11"
    own = {case.family for case in measured.cases if not case.family.startswith("earlier ")}
    assert len(measured.rows) > 15_000 and len(measured.steps) >= 30 and own == {*FAMILIES, *BLOCKS, *RARE, *PICTURES, *SCATTERED}
    found = summary(measured)
    assert 737e12 < found["product_flops_per_second"]["bfloat16"] < find("H200").peak("bfloat16")
    assert 4.0e12 < found["memory_bytes_per_second"] < 4.3e12
    assert 50e9 < found["copy_bytes_per_second"]["h2d-pinned"] < 60e9
    assert 60 < found["idle_watts"] < 160 and 600 < found["most_watts"] < 750
    assert 1e-6 < found["launch"]["device_seconds"] < 4e-6


def test_shipped_profiles_can_be_read_and_fit_their_journals() -> None:
    profiles = [path for path in SHIPPED.iterdir() if path.name.endswith((".json", ".json.gz"))]
    assert profiles
    for path in profiles:
        known = load(path)
        assert path.name.startswith(find(known.device).name)
        rows = gzip.decompress(journal_path(path).with_name(journal_path(path).name + ".gz").read_bytes())
        assert json.loads(rows.split(b"\n", 1)[0])["device"] == known.device


def test_a_correction_of_another_probe_corrects_something(tmp_path: Path) -> None:
    trees = {"features": ["law"], "base": 0.1, "questions": [], "thresholds": [], "leaves": []}
    own = {"parts": [{"laws": {"": {"one": 1.0}}, "trees": None}], "accuracy": {}}
    corrected = {"parts": [{"laws": {}, "trees": trees}], "accuracy": {}, "basis": own}
    path = save(replace(profile(), ops={"gemm": corrected}), tmp_path / "p.json")
    assert load(path).ops["gemm"]["basis"]["parts"][0]["laws"] == {"": {"one": 1.0}}
    for wrong in (
        {**corrected, "basis": corrected}, {**corrected, "parts": [{"laws": {}, "trees": None}]}, {**corrected, "basis": {}},
        {"parts": corrected["parts"], "accuracy": {}},
    ):  # fmt: skip
        save(replace(profile(), ops={"gemm": wrong}), path)
        with pytest.raises(FileFormatError, match="ops"):
            load(path)
