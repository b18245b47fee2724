"""Shared probes that are added: found by device, combined, whole or not at all; measured by the command; the hub."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UnknownName
from foretell.hardware import catalog, parse
from foretell.hardware.lookup import find_profile, profile_stamp
from foretell.hardware.probe import run
from foretell.hardware.probe import share as measuring
from foretell.hardware.profile import Measured
from foretell.hardware.share import added, check, file
from foretell.hardware.share.combine import combined
from foretell.price import bands
from foretell.price.machine import machine
from foretell.price.speeds import alone
from foretell.search.profiles import fit, shared
from tests import forks
from tests.pure.shared_probes import (
    H200,
    HUB,
    ROOT,
    UNKNOWN,
    bare_fitting,
    changed,
    few,
    put,
    quick_fitting,
    small_file,
    times,
    whole_probe,
)

FIXTURES = (bare_fitting, quick_fitting, small_file, whole_probe)


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


def test_adding_again_changes_nothing(small: bytes, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str], bare_fit: None) -> None:
    path = put(tmp_path, "x", small)
    assert main(["hardware", "add", str(path)]) == 0
    stamp = profile_stamp(H200)
    assert main(["hardware", "add", str(tmp_path)]) == 0
    assert "1 file was added before" in capsys.readouterr().out and profile_stamp(H200) == stamp


def test_own_comes_before_added_and_added_before_shipped(small: bytes, tmp_path: Path, cache_dir: Path, bare_fit: None) -> None:
    shipped = find_profile(H200)
    assert shipped is not None and not shipped.shared
    shared.add([put(tmp_path, "x", small)])
    found = find_profile(H200)
    assert found is not None and found.shared and found.mode == "share"
    from foretell.hardware.profile import own_path, save

    save(replace(shipped, mode="full", date="2020-01-01", ops=found.ops), own_path(shipped))
    found = find_profile(H200)
    assert found is not None and not found.shared and found.date == "2020-01-01"


def test_an_added_cpu_speaks_for_the_same_cpu_alone(tmp_path: Path, cache_dir: Path, bare_fit: None, small: bytes) -> None:
    plain = find_profile("CPU", reported_as="Some CPU")
    shared.add([put(tmp_path, "x", small)])
    entry = added.entries()[0]
    added.write([replace(entry, device="CPU", backend="cpu", reported_as="Other CPU")])
    assert find_profile("CPU", reported_as="Some CPU") == plain


# ---------------------------------------------------------------- several of one device


def two(small: bytes, factor: float) -> list[file.SharedProbe]:
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


@pytest.mark.slow(reason="two additions of whole profiles; what two files say together is tested above")
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


@pytest.mark.parametrize(
    "where", ["added.write", pytest.param("save", marks=pytest.mark.slow(reason="an earlier moment, with less to clear away"))]
)
def test_killed_in_the_middle_nothing_half_is_left(where: str, small: bytes, tmp_path: Path, cache_dir: Path, bare_fit: None) -> None:
    """Killed as by SIGKILL before the index is written: nothing counts, and the next addition clears it away."""
    path = put(tmp_path, "x", small)
    code = (
        "import os, signal, dataclasses\n"
        "from foretell.search.profiles import shared\n"
        "from foretell.hardware.share import added\n"
        "kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "shared.fit_profile = lambda measured, device, progress: dataclasses.replace(measured.profile(ops={}), figures=device.to_dict())\n"
        f"shared.{where} = kill\n"
        f"shared.add([{str(path)!r}])\n"
    )
    child = forks.run(code=code, env={**os.environ, "PYTHONPATH": str(ROOT), "FORETELL_CACHE": str(cache_dir)})
    assert child.returncode == -signal.SIGKILL
    assert added.entries() == () and not added.index_path().exists()
    found = find_profile(H200)
    assert found is not None and not found.shared
    shared.add([path])
    assert len(added.entries()) == 1 and len(list(added.files_folder().iterdir())) == 1
    names = {one.name for one in added.folder().iterdir() if one.is_file()}
    assert names == {"index.json", added.LOCK, added.entries()[0].profile}


def test_two_additions_at_once_keep_both(small: bytes, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first has written its index; neither clears away what the other is writing."""
    first, second = put(tmp_path, "x", small), put(tmp_path, "y", changed(small, UNKNOWN))
    code = (
        "import dataclasses, sys, time\n"
        "from foretell.search.profiles import shared\n"
        "def fit(measured, device, progress):\n"
        "    print('fitting', flush=True)\n"
        "    time.sleep(1)\n"
        "    return dataclasses.replace(measured.profile(ops={}), figures=device.to_dict())\n"
        "shared.fit_profile = fit\n"
        f"shared.add([{str(first)!r}])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FORETELL_CACHE": str(cache_dir)}
    quick = lambda measured, device, progress: replace(measured.profile(ops={}), figures=device.to_dict())  # noqa: E731
    monkeypatch.setattr(shared, "fit_profile", quick)
    child = forks.Command(code=code, env=env)
    while child.said() != "fitting\n":
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.01)
    shared.add([second])
    assert child.communicate()[1] == "" and child.returncode == 0
    assert {one.device for one in added.entries()} == {H200, "Hopper-X-141GB"}
    for one in added.entries():
        assert (added.folder() / one.profile).is_file()
        assert all((added.files_folder() / f"{source.digest}{file.END}").is_file() for source in one.sources)


def test_an_error_in_the_middle_clears_what_was_written(small: bytes, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "fit_profile", stop)
    with pytest.raises(KeyboardInterrupt):
        shared.add([put(tmp_path, "x", small)])
    assert not added.entries() and not list(added.files_folder().iterdir())


def test_a_spoiled_index_counts_for_nothing(small: bytes, tmp_path: Path, cache_dir: Path, bare_fit: None) -> None:
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
    assert any("basis" in one for one in profile.ops.values()), "what so few rows cannot say is the full probe's"
    assert profile.host["weights"] and done.added[0].sources[0].rows == len(file.read(small, "f").measured.rows)
    known = machine(catalog.find(H200), profile)
    assert known is not None and known.provenance == "measured"


def test_what_a_shared_probe_corrects_is_the_full_one_of_its_backend() -> None:
    nearest, other, cpu = (fit.basis_of(catalog.find(name)) for name in (H200, "A100", "CPU"))
    assert nearest is not None and other is not None and cpu is not None
    assert nearest.families["gemm"].to_dict() == other.families["gemm"].to_dict() != cpu.families["gemm"].to_dict()
    assert other.device.name == "A100-SXM-80GB", "told at its own rates"


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
