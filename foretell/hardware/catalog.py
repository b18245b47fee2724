"""The catalogue: `catalog/*.toml` read once, and names as people write them.

A bare name means the usual part (`H100` is the SXM part with 80 GB; where sizes differ and
none is usual, the smallest). Case, '-', '_' and spaces do not matter.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import InternalError, UnknownName, UserError
from foretell.hardware.share import added
from foretell.hardware.types import Device
from foretell.units import GIB, MIB, gib

_PRINTED_DIGIT = 0.005
"""CUDA's message prints two digits: the true figure may lie half a digit lower."""

GENERIC_CPU = "CPU"
_OTHERS = {
    **dict.fromkeys(("tpu", "v5e", "v5p", "trillium", "ironwood"), "a TPU"), **dict.fromkeys(("jetson", "orin", "xavier", "thor"), "a Jetson board"),
    **dict.fromkeys(("trainium", "trn", "inferentia", "inf1", "inf2"), "an accelerator of AWS"), "gaudi": "a Gaudi", "hpu": "a Gaudi",
    "ascend": "an Ascend",
}  # fmt: skip
"""How names of devices begin that are known, and for which nothing can be said."""


def devices() -> tuple[Device, ...]:
    """Every device of the catalogue, in file order."""
    return tuple(_catalogue()[0])


def find(name: str) -> Device:
    """The device a name means, of the catalogue or of an added probe; `UnknownName` with near names otherwise."""
    known = _catalogue()[1]
    device = known.get(normalise(name)) or next((one for one in added.devices() if normalise(one.name) == normalise(name)), None)
    if device is None:
        if other := next((what for start, what in _OTHERS.items() if normalise(name).startswith(start)), None):
            raise UserError(
                f"{name} is {other}, and what is predicted are PyTorch's kernels on CUDA and ROCm",
                "name a GPU; `foretell hardware` lists them, and a .toml or .json file describes one that is not there",
            )
        raise UnknownName("device", name, names(), remedy="`foretell hardware` lists all; or give a .toml or .json hardware file, or 'auto'")
    return device


def find_reported(name: str) -> Device | None:
    """The device torch calls `name` (`NVIDIA H100 80GB HBM3`), if the catalogue or an added probe has it."""
    return _catalogue()[2].get(normalise(name)) or added.reported(name)


def names() -> list[str]:
    """Every name worth proposing, full names first."""
    return [item.name for item in (*devices(), *added.devices())] + [alias for item in devices() for alias in aliases(item)]


def aliases(device: Device) -> tuple[str, ...]:
    """Other names of a device of the catalogue, without those that only quote somebody's table."""
    row = next((row for row in _rows() if row["name"] == device.name), {})
    return tuple(alias for alias in row.get("aliases", ()) if "(" not in alias)


def meaning(asked: str, device: Device) -> tuple[str, ...]:
    """Sentences to print about what a name was taken to mean."""
    notes = []
    if normalise(asked) != normalise(device.name):
        notes.append(f"{asked} means {device.name} ({gib(device.memory_bytes)} usable)")
    if device.assumed("memory_bytes"):
        notes.append(f"usable memory of {device.name}, {gib(device.memory_bytes)}, is assumed, not reported by torch")
    return tuple(notes)


def normalise(name: str) -> str:
    return "".join(character for character in name.casefold() if character not in "-_ \t")


@cache
def _files() -> tuple[dict[str, Any], ...]:
    folder = resources.files("foretell.hardware") / "catalog"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)
    return tuple(tomllib.loads(item.read_text(encoding="utf-8")) for item in files)


def table(name: str, needed: Mapping[str, type], optional: Mapping[str, type] | None = None) -> tuple[dict[str, Any], ...]:
    """Rows of a table of the catalogue; InternalError where there is none, or one lacks a field, has one that is not known or a value of
    another type. Numbers are above zero."""
    kinds, rows = {**needed, **(optional or {})}, tuple(row for file in _files() for row in file.get(name, ()))
    for row in rows:
        wrong = [*(set(needed) - set(row)), *(set(row) - set(kinds))]
        wrong += [key for key in row if key in kinds and not _is(row[key], kinds[key])]
        if wrong:
            raise InternalError(f"the catalogue's table '{name}' has a row with {', '.join(sorted(wrong))} missing, unknown or wrong: {row}")
    if not rows:
        raise InternalError(f"the catalogue has no table '{name}'")
    return rows


def _is(value: object, kind: type) -> bool:
    if kind in (float, int):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool) and value > 0
    return isinstance(value, kind)


def _rows() -> tuple[dict[str, Any], ...]:
    return tuple(row for table in _files() for row in table.get("device", ()))


@cache
def _launch() -> dict[str, dict[str, Any]]:
    return {row["backend"]: row for table in _files() for row in table.get("launch", ())}


@cache
def _catalogue() -> tuple[list[Device], dict[str, Device], dict[str, Device]]:
    found: list[Device] = []
    by_name: dict[str, Device] = {}
    by_report: dict[str, Device] = {}
    for row in _rows():
        device = _device(row)
        found.append(device)
        for table, keys in ((by_name, [device.name, *row.get("aliases", ())]), (by_report, row["reported_as"])):
            for key in map(normalise, keys):
                if key in table:
                    raise InternalError(f"the catalogue gives '{key}' to {table[key].name} and to {device.name}")
                table[key] = device
    return found, by_name, by_report


def _device(row: dict[str, Any]) -> Device:
    """One TOML row (units in its key names) as a Device in bytes, seconds and FLOP/s."""
    if "memory_bytes" in row:
        memory = row["memory_bytes"]
    elif "memory_gib_as_printed" in row:
        memory = int((row["memory_gib_as_printed"] - _PRINTED_DIGIT) * GIB)
    else:
        memory = int(row["memory_gib"] * GIB)
    capability = row.get("compute_capability")
    figures = ("memory_nominal_bytes", "memory_bandwidth_bytes_per_second", "peak_flops_per_second", "l2_bytes")
    launch = _launch()[row["backend"]]
    sources = {
        **dict.fromkeys((*figures, "sm_count", "tdp_watts"), row["source"]),
        "memory_bytes": row["memory_source"],
        "launch_overhead_seconds": launch["source"],
    }
    return Device(
        name=row["name"],
        vendor=row["vendor"],
        backend=row["backend"],
        compute_capability=(capability[0], capability[1]) if capability else None,
        memory_bytes=memory,
        memory_nominal_bytes=int(row["memory_nominal_gib"] * GIB),
        memory_bandwidth_bytes_per_second=row["memory_bandwidth_gb_per_s"] * 1e9,
        peak_flops_per_second={dtype: rate * 1e12 for dtype, rate in row["peak_tflops"].items()},
        l2_bytes=int(row["l2_mib"] * MIB) if "l2_mib" in row else None,
        sm_count=row["sm_count"],
        tdp_watts=row.get("tdp_w"),
        usual_per_node=row.get("usual_per_node", 8),
        verified=row.get("verified", False),
        launch_overhead_seconds=row.get("launch_overhead_seconds", launch["seconds"]),
        sources={**sources, **row.get("sources", {})},
    )
