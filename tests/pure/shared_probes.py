"""Files of shared probes for tests, out of the shipped journal's rows; ways to change them; a fit that takes no minutes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware.lookup import find_profile
from foretell.hardware.probe import journal
from foretell.hardware.profile import Measured, Profile
from foretell.hardware.share import check, file
from foretell.search.profiles import shared

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "foretell" / "hardware" / "profiles" / "H200-SXM-141GB.rows.jsonl.gz"
HUB = ROOT / "hub"
H200 = "H200-SXM-141GB"
Change = Callable[[dict[str, Any]], None]


# ---------------------------------------------------------------- files out of the shipped rows


@pytest.fixture(scope="session", name="whole")
def whole_probe() -> Measured:
    return journal.gather(SHIPPED)


def few(whole: Measured, more: int = 4) -> Measured:
    """As few cases as a file may have, and some; reference steps of small models."""
    kept = []
    for family, least in check.LEAST_CASES.items():
        kept += [case for case in whole.cases if case.family == family][: least + more]
    small = [step for step in whole.steps if str(step["config"]["model"]).endswith("-tiny")]
    return replace(whole, cases=tuple(kept), steps=tuple(small[:5]))


@pytest.fixture(scope="session", name="small")
def small_file(whole: Measured) -> bytes:
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


@pytest.fixture(name="quick_fit")
def quick_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile without the minutes of fitting: ops of the shipped one, those of a model of language."""
    shipped = find_profile(H200)
    assert shipped is not None
    ops = {kind: shipped.ops[kind] for kind in ("attention", "gemm", "stream")}

    def fit(measured: Measured, device: Any, progress: Any = None) -> Profile:
        made = measured.profile(ops=ops, host=shipped.host, fitted=shipped.fitted)
        return replace(made, figures=device.to_dict())

    monkeypatch.setattr(shared, "fit_profile", fit)


@pytest.fixture(name="bare_fit")
def bare_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile with one kind of ops, which is written and read at once: for what only asks whose it is."""
    shipped = find_profile(H200)
    assert shipped is not None
    ops = {"recurrent": shipped.ops["recurrent"]}

    def fit(measured: Measured, device: Any, progress: Any = None) -> Profile:
        return replace(measured.profile(ops=ops), figures=device.to_dict())

    monkeypatch.setattr(shared, "fit_profile", fit)


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"{name}.foretell.json.gz"
    path.write_bytes(content)
    return path
