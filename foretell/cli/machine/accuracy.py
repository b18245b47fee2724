"""`foretell hardware --accuracy`: how far the seconds of measured devices are off, each measurement held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli import common

if TYPE_CHECKING:
    from foretell.hardware import Device
    from foretell.hardware.profile import Profile

_FIGURES = (("median", "_median"), ("mean", "_mean"), ("90 %", "_p90"))
_ORDER = ("plain", "trees")


def accuracy(devices: Sequence[Device], *, json: bool) -> int:
    """Print the errors of every one of these devices that has a profile."""
    from foretell.hardware.lookup import find_profile

    found = [profile for device in devices if (profile := find_profile(device.name)) is not None]
    if json:
        return common.emit_json({"profiles": [as_json(profile) for profile in found]})
    common.emit("\n".join(_pages(found, devices)))
    return common.YES


def _pages(profiles: Sequence[Profile], devices: Sequence[Device]) -> list[str]:
    if not profiles:
        told = f"no profile of {devices[0].name}" if len(devices) == 1 else "no device has a profile"
        return [
            f"{told}: times rest on rates of the catalogue and on the nearest measured device",
            "Next:  foretell probe    on the machine itself measures it",
        ]
    lines: list[str] = []
    for profile in profiles:
        lines += ["", *page(profile)] if lines else page(profile)
    if all(profile.elsewhere for profile in profiles):
        return [*lines, "", "Errors of single kernels in %, on a third of the rows, held out: the median, and what 9 of 10 stay below."]
    return [
        *lines, "",
        "Errors of single ops in %: the median, the mean, and what 9 of 10 stay below.",
        "plain  laws: sums of physical terms (tiles, bytes, rows), their coefficients fitted op by op",
        "trees  the laws, and boosted trees that correct them; for both, each row was held out when predicted",
        "R²     of the logarithm of seconds, by trees",
        "used   whichever has the lower mean error",
    ]  # fmt: skip


def page(profile: Profile) -> list[str]:
    """What is known of one device."""
    told = as_json(profile)
    if profile.elsewhere:
        return _elsewhere(profile)
    lines = [f"{profile.device}  {profile.mode} probe of {profile.date[:10]}, torch {profile.torch}; {profile.reported_as}"]
    lines += _table(told["ops"]) if told["ops"] else ["no errors of single ops are recorded"]
    host, power = told["host"], told["power"]
    if host is None:
        lines.append("host   not measured: usual values are assumed")
    else:
        lines.append(f"host   {host['references']} reference steps, median error {_percent(host['error'])} %, each held out")
    if power is not None:
        lines.append(f"power  median error {_percent(power['error'])} %, each reading held out")
    return [*lines, *(f"not measured: {what}" for what in profile.missing)]


KERNELS = {"16-bit": "16-bit products", "8-bit": "8-bit products", "flash-2": "attention, forward"}


def _elsewhere(profile: Profile) -> list[str]:
    """What public tables say of a device that nobody here has probed."""
    from foretell.hardware import wires

    known = profile.elsewhere
    lines = [f"{profile.device}  kernels measured elsewhere: {known['source']}, {known['date']}; {', '.join(known['stacks'])}"]
    lines.append(f"{'kernels':<20}{'rows held out':>15}{'median':>8}{'90 %':>8}")
    for group, entry in known["groups"].items():
        errors = entry["accuracy"]
        lines.append(f"{KERNELS.get(group, group):<20}{errors['rows']:>15,.0f}{_percent(errors['median']):>8}{_percent(errors['p90']):>8}")
    table = wires.table(profile.device)
    if table is not None:
        ranks = sorted({count for by_ranks in table.curves.values() for count in by_ranks})
        lines.append(f"collectives of {ranks[0]} to {ranks[-1]} over {table.link}: {table.software}, the same source")
    return [*lines, f"carried over from {known['basis']}: {', '.join(known['lacks'])}"]


def as_json(profile: Profile) -> dict[str, Any]:
    host = profile.host
    power = getattr(profile, "fitted", {}).get("power")
    told = {
        "device": profile.device, "reported_as": profile.reported_as, "torch": profile.torch, "date": profile.date,
        "mode": profile.mode, "missing": list(profile.missing),
        "ops": {family: _errors(entry) for family, entry in sorted(profile.ops.items()) if _errors(entry)},
        "host": {"references": host["references"], "error": host["error"]} if "error" in host else None,
        "power": {"error": power["error"]} if power and "error" in power else None,
    }  # fmt: skip
    if not profile.elsewhere:
        return told
    known = {name: value for name, value in profile.elsewhere.items() if name != "groups"}
    kernels = {group: entry["accuracy"] for group, entry in profile.elsewhere["groups"].items()}
    return {**told, "elsewhere": {**known, "kernels": kernels}}


def _used(errors: Mapping[str, Any]) -> str:
    """The estimator with the lower mean error on held-out rows, which is the one that is kept."""
    return "trees" if errors.get("trees_mean", float("inf")) < errors.get("plain_mean", 0.0) else "plain"


def _errors(entry: Any) -> dict[str, Any]:
    """Rows and errors of one family, and which estimator is used; empty where nothing is recorded."""
    found = entry.get("accuracy") if isinstance(entry, Mapping) else None
    if not found:
        return {}
    return {**found, "rows": int(found.get("rows", 0)), "used": _used(found)}


def _table(ops: Mapping[str, Mapping[str, Any]]) -> list[str]:
    named = {key.removesuffix("_median") for errors in ops.values() for key in errors if key.endswith("_median")}
    estimators = [*(name for name in _ORDER if name in named), *sorted(named.difference(_ORDER))]
    columns = [(name, title, f"{name}{key}") for name in estimators for title, key in _FIGURES]
    rows = [
        ["", "", *(name if title == "median" else "" for name, title, _ in columns), "", ""],
        ["family", "rows", *(title for _, title, _ in columns), "R²", "used"],
    ]
    for family, errors in ops.items():
        figures = [_percent(errors.get(key)) for _, _, key in columns]
        r2 = errors.get("r2")
        rows.append([family, f"{errors['rows']:,}", *figures, "-" if r2 is None else f"{r2:.3f}", errors["used"]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(cell.ljust(wide) if column in (0, last) else cell.rjust(wide)
                  for column, (cell, wide) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
