"""`foretell hardware`: which devices are known by name, and where every figure of one comes from."""

from __future__ import annotations

import contextlib
import textwrap
from importlib import resources
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.hardware import Cluster, Device, Link

PROFILES = "profiles"
"""Folder of the hardware room; a file `H200-SXM-141GB*.json*` in it is a profile of that device."""

Row = tuple[str, str, str]
"""What, how much, and how that is known."""


def hardware(
    name: str | None = typer.Argument(None, metavar="NAME|add", help="A device, H100:8, 2x8xH100@IB400, auto or a file; or `add`."),
    files: list[str] | None = typer.Argument(None, metavar="[FILE|FOLDER]...", help="With `add`: probes that others shared."),
    accuracy: bool = typer.Option(False, "--accuracy", help="Show time-prediction error of measured devices."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """List the devices known by name, or show one with the source of every figure.

    `foretell hardware add FILE|FOLDER` takes probes that others shared (`foretell probe --share`): they are checked, fitted and kept.
    """
    if name == "add":
        from foretell.cli.machine.share import add

        return add(files or [], json=json)
    if files:
        raise UserError(f"'{files[0]}' beside '{name}'", "give one name, or `foretell hardware add FILE`")
    if accuracy:
        return _accuracy(name, json=json)
    if name is None:
        return _list(json=json)
    return _show(name, json=json)


def _list(*, json: bool) -> int:
    from foretell.hardware import devices
    from foretell.hardware.share import added

    found = (*devices(), *added.devices())
    if json:
        return common.emit_json({"devices": [_as_json(device) for device in found]})
    common.emit("\n".join(_table(found)))
    return common.YES


def _show(name: str, *, json: bool) -> int:
    from foretell.hardware import parse

    cluster = common.call(lambda: parse(name), f"looking at {name}")
    if json:
        content = {**cluster.to_dict(), "count": cluster.count, "device": _as_json(cluster.device)}
        content["per_device_network_bytes_per_second"] = cluster.per_device_network_bytes_per_second
        content["carbon"] = _carbon(cluster)
        content["measured"] = _measured(cluster.device)
        return common.emit_json({"assumptions": list(cluster.notes), "hardware": content})
    common.emit("\n".join(_page(cluster)))
    return common.YES


def _accuracy(name: str | None, *, json: bool) -> int:
    from foretell.cli.machine.accuracy import accuracy
    from foretell.hardware import devices, parse

    found = devices() if name is None else (common.call(lambda: parse(name), f"looking at {name}").device,)
    return accuracy(found, json=json)


def profiled(device: Device) -> bool:
    """Whether a profile of this device travels with foretell."""
    folder = resources.files("foretell.hardware") / PROFILES
    return folder.is_dir() and any(item.name.startswith(device.name) for item in folder.iterdir())


def profile_source(device: Device) -> tuple[str, str]:
    """Where the profile of a device comes from: in a word, and in full."""
    from foretell.hardware import profile, silicon
    from foretell.hardware.share import added

    with contextlib.suppress(OSError):
        start = f"{device.name}-" if device.backend == "cpu" else f"{device.name}.json"
        if any(path.name.startswith(start) and path.name.endswith(".json") for path in profile.folder().iterdir()):
            return "own", "measured on this machine by `foretell probe`"
    shared = added.entry_of(device.name)
    if shared is not None:
        return "shared", f"{shared.words}{'; ' + shared.contradiction if shared.contradiction else ''}"
    if profiled(device):
        return "yes", "measured; travels with foretell"
    told = silicon.measured_elsewhere(device.name)
    if told is not None:
        return "elsewhere", f"products measured by others: {told.source}, {told.date}; `--accuracy` shows how well they are met"
    return "none", "times rest on the rates above and on the nearest measured device"


# --- JSON ------------------------------------------------------------------------------------------------------------


def _as_json(device: Device) -> dict[str, Any]:
    from dataclasses import asdict

    from foretell.hardware import footprint, price_per_hour
    from foretell.hardware.catalog import aliases
    from foretell.hardware.links import usual

    known, making = usual(device, device.usual_per_node), footprint(device)
    price, source = price_per_hour(device)
    return {
        **device.to_dict(),
        "aliases": list(aliases(device)),
        "profiled": profiled(device),
        "profile": dict(zip(("kind", "source"), profile_source(device), strict=True)),
        "price": {"dollars_per_hour": price, "source": source},
        "usual_links": {
            "intra": known.intra.to_dict(),
            "host_link": known.host.to_dict() if known.host else None,
            "inter": known.network.to_dict(),
            "cards_per_node": known.cards,
            "devices_per_domain": known.domain,
            "source": known.source,
        },
        "footprint": asdict(making) if making else None,
    }


def _measured(device: Device) -> dict[str, Any]:
    """Latency by working set and FLOP/s by dtype, where this very device's profile has them; empty in older ones."""
    from foretell.hardware.lookup import find_profile
    from foretell.hardware.probe.summary import dtype_rates, loads

    profile = find_profile(device.name) if device.backend != "cpu" or profile_source(device)[0] == "own" else None
    if profile is None or profile.elsewhere:
        return {"load_seconds": {}, "flops_per_second": {}}
    return {"load_seconds": loads(profile.latency), "flops_per_second": dtype_rates(profile.rates)}


def _carbon(cluster: Cluster) -> dict[str, Any]:
    from foretell.hardware import carbon_of

    grams, source = carbon_of(cluster)
    return {"g_per_kwh": grams, "source": source}


# --- a table of all --------------------------------------------------------------------------------------------------


def _table(devices: tuple[Device, ...]) -> list[str]:
    head = ("name", "GiB", "GB/s", "bf16 TF", "W", "link", "$/h", "profile")
    rows = [head, *(_summary(device) for device in devices)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    left = (0, 5, 7)
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append(
            "  ".join(cell.ljust(wide) if column in left else cell.rjust(wide) for column, (cell, wide) in cells)
        )
    return [
        *(line.rstrip() for line in lines),
        "",
        "GiB  memory that torch can use, and GB/s how fast it is       bf16 TF  dense TFLOP/s of bfloat16",
        "$/h  a list price on demand: yours may differ                 ~        assumed: no document, no report",
        "Next:  foretell hardware H100                 where every figure comes from",
        "       foretell hardware 2x8xH100@IB400       the same of a cluster, with its links",
        "       foretell fit gpt2 --on H100            does it fit?",
    ]


def _summary(device: Device) -> tuple[str, ...]:
    from foretell.hardware import price_per_hour
    from foretell.hardware.links import usual
    from foretell.units import GIB

    def figure(value: float | None, digits: int, field: str) -> str:
        if value is None:
            return "-"
        return f"{'~' if device.assumed(field) else ''}{value:,.{digits}f}"

    price, _ = price_per_hour(device)
    rate = device.peak_flops_per_second.get("bfloat16")
    return (
        device.name,
        figure(device.memory_bytes / GIB, 1, "memory_bytes"),
        figure(device.memory_bandwidth_bytes_per_second / 1e9, 0, "memory_bandwidth_bytes_per_second"),
        figure(rate and rate / 1e12, 0 if rate and rate >= 1e14 else 1, "peak_flops_per_second"),
        figure(device.tdp_watts, 0, "tdp_watts"),
        usual(device, device.usual_per_node).intra.name,
        "-" if price is None else f"{price:.2f}",
        kind if (kind := profile_source(device)[0]) in ("own", "shared", "yes") else "-",
    )


# --- a page of one ---------------------------------------------------------------------------------------------------


def _page(cluster: Cluster) -> list[str]:
    from foretell.hardware.catalog import aliases

    device = cluster.device
    capability = (
        f", compute capability {'.'.join(map(str, device.compute_capability))}" if device.compute_capability else ""
    )
    others = aliases(device)
    lines = [f"{device.name}  {device.vendor}, {device.backend}{capability}"]
    if others:
        lines.append(f"also called {', '.join(others)}")
    if cluster.groups:
        lines.append("the device with the least memory of: " + ", ".join(_counted(group) for group in cluster.groups))
    elif cluster.count > 1:
        lines.append(f"{cluster.count} devices: {_counted(cluster)}")
    lines.append("")
    rows = [*_device_rows(device), *_link_rows(cluster), *_tier_rows(cluster), *_other_rows(cluster)]
    lines += _laid_out(rows)
    if cluster.notes:
        lines += ["", *(f"note: {note}" for note in cluster.notes)]
    return lines


def _counted(cluster: Cluster) -> str:
    plural = "node" if cluster.nodes == 1 else "nodes"
    return f"{cluster.nodes} {plural} of {cluster.devices_per_node} {cluster.device.name}"


def _laid_out(rows: list[Row]) -> list[str]:
    """Columns; a long source goes on below itself."""
    name, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    room = max(30, common.width() - name - value - 4)
    lines = []
    for row in rows:
        first, *more = textwrap.wrap(row[2], room, break_on_hyphens=False) or [""]
        lines.append(f"{row[0]:<{name}}  {row[1]:<{value}}  {first}".rstrip())
        lines += [" " * (name + value + 4) + line for line in more]
    return lines


def _device_rows(device: Device) -> list[Row]:
    from foretell.units import gib, human_bytes

    def source(field: str) -> str:
        return device.sources.get(field, "assumed")

    measured = _measured(device)
    rates = [
        (f"peak {dtype}", f"{rate / 1e12:,.4g} TFLOP/s" if rate < 1e15 else f"{rate / 1e12:,.0f} TFLOP/s", "")
        for dtype, rate in device.peak_flops_per_second.items()
    ]
    rates[0] = (*rates[0][:2], source("peak_flops_per_second"))
    rates[1:] = [(what, much, "as above") for what, much, _ in rates[1:]]
    rates = [(what, much, said + _reached(device, what.removeprefix("peak "), measured["flops_per_second"])) for what, much, said in rates]
    launch = device.launch_overhead_seconds
    units = {"cuda": "multiprocessors", "rocm": "compute units"}.get(device.backend, "cores")
    bandwidth = f"{device.memory_bandwidth_bytes_per_second / 1e9:,.0f} GB/s"
    return [
        ("memory, usable", gib(device.memory_bytes), source("memory_bytes")),
        ("memory, nominal", gib(device.memory_nominal_bytes), source("memory_nominal_bytes")),
        ("memory bandwidth", bandwidth, source("memory_bandwidth_bytes_per_second")),
        *rates,
        *_load_rows(device, measured["load_seconds"]),
        ("L2 cache", human_bytes(device.l2_bytes) if device.l2_bytes else "unknown", source("l2_bytes")),
        (units, f"{device.sm_count:,}", source("sm_count")),
        ("power", f"{device.tdp_watts:,.0f} W" if device.tdp_watts else "unknown", source("tdp_watts")),
        ("kernel start", f"{launch * 1e6:g} µs" if launch else "unknown", source("launch_overhead_seconds")),
        ("profile", *profile_source(device)),
    ]  # fmt: skip


def _reached(device: Device, dtype: str, measured: dict[str, float]) -> str:
    """What the best square product of the probe reached of a peak."""
    if dtype not in measured:
        return ""
    return f"; measured {measured[dtype] / 1e12:,.4g} TFLOP/s, {100 * measured[dtype] / device.peak_flops_per_second[dtype]:.0f} %"


def _load_rows(device: Device, measured: dict[int, float]) -> list[Row]:
    """Latency of the levels, one working set of each: the smallest, the largest in the L2 cache, the largest."""
    from foretell.units import human_bytes

    if not measured:
        return []
    sizes = list(measured)
    inside = [size for size in sizes if size <= 0.7 * (device.l2_bytes or 0)]
    chosen = sorted({sizes[0], *inside[-1:], sizes[-1]})
    each = ", ".join(f"{human_bytes(size)} {measured[size] * 1e9:,.3g} ns" for size in chosen)
    return [("latency", f"{measured[sizes[-1]] * 1e9:,.3g} ns", f"measured by pointer chase: {each}")]


def _link_rows(cluster: Cluster) -> list[Row]:
    from foretell.hardware.links import usual

    device = cluster.device
    known = usual(device, cluster.devices_per_node)
    rows = [_link_row("between devices", cluster.intra, 1)]
    if cluster.intra is not None and cluster.devices_per_domain:
        rows.append(("joined devices", f"{cluster.devices_per_domain}", known.source))
    rows.append(_link_row("to the host", cluster.host_link, 1))
    inter, cards = cluster.inter, cluster.cards_per_node
    if inter is None and cluster.count == 1:
        inter, cards = known.network, known.cards
    rows.append(_link_row("between nodes", inter, cards))
    return [row for row in rows if row[1]]


def _link_row(what: str, link: Link | None, cards: int) -> Row:
    if link is None:
        return what, "", ""
    name = f"{cards}x{link.name}" if what == "between nodes" else link.name
    pair = f", {link.pair_bytes_per_second / 1e9:g} GB/s between two" if link.pair_bytes_per_second else ""
    rate = f"{link.bytes_per_second * cards / 1e9:,.4g} GB/s one way{pair}, {link.latency_seconds * 1e6:g} µs"
    source = (
        f"{link.sources.get('bytes_per_second', 'assumed')}; latency {link.sources.get('latency_seconds', 'assumed')}"
    )
    return what, name, f"{rate}; {source}"


def _tier_rows(cluster: Cluster) -> list[Row]:
    from foretell.units import gib

    return [(f"{tier.name} memory", gib(tier.bytes), tier.sources.get("bytes", "assumed")) for tier in cluster.tiers]


def _other_rows(cluster: Cluster) -> list[Row]:
    from foretell.hardware import carbon_of, footprint, price_per_hour

    price, source = price_per_hour(cluster.device)
    grams, origin = carbon_of(cluster)
    rows = [
        ("price", "unknown" if price is None else f"${price:.2f} an hour", source),
        ("electricity", f"{grams:g} g CO2/kWh", origin),
    ]
    making = footprint(cluster.device)
    if making is not None:
        rows += [
            ("mass", f"{making.mass_kg:g} kg", making.sources["mass_kg"]),
            ("embodied carbon", f"{making.embodied_kg_co2:g} kg CO2e", making.sources["embodied_kg_co2"]),
        ]
    return rows
