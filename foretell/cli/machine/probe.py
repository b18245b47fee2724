"""`foretell probe`: measure this machine into a profile; under torchrun, measure what joins the ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.machine.progress import bar
from foretell.errors import UserError
from foretell.plan.text import shell_word

if TYPE_CHECKING:
    from foretell.hardware.probe.ranks import MeasuredLinks
    from foretell.hardware.profile import Measured, Profile

CLUSTER_FILE = "cluster.json"


def probe(
    file: Path | None = typer.Argument(None, metavar="FILE", help="With --share: where to write the file; named after the device by default."),
    share: bool = typer.Option(False, "--share", help="Within five minutes write one small anonymous file for others (docs/share.md)."),
    quick: bool = typer.Option(False, "--quick", help="About half a minute (the default)."),
    full: bool = typer.Option(False, "--full", help="Some minutes: more cases, better predictions."),
    device: str = typer.Option("auto", "--device", metavar="auto|cpu|cuda", help="What to measure."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Where to keep the profile (or the cluster file)."
    ),
    resume: bool = typer.Option(False, "--resume", help="Resume a probe that was stopped."),
    force: bool = typer.Option(False, "--force", help="Measure a GPU that somebody else is using."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Measure this machine: what ops, copies, launches and watts cost here. Predictions then rest on it.

    Under torchrun every pair of ranks and the collectives between them are measured into one hardware file:
    torchrun --nproc-per-node 8 -m foretell probe
    """
    if quick and full:
        raise UserError("--quick and --full exclude each other", "give one of them, or none for --quick")
    if share or file is not None:
        others = {"--quick": quick, "--full": full, "--out": out is not None}
        return _share(file, share=share, others=others, device=device, resume=resume, force=force, json=json)
    mode = "full" if full else "quick"
    from foretell.api import probe_machine
    from foretell.hardware.probe import under_torchrun

    if under_torchrun():
        return _ranks(device, out, force=force, json=json)
    from foretell.runtime.observe import machine_load as load

    meter = load.LoadMeter()
    try:
        with bar() as progress:
            measured, profile, path = probe_machine(
                device, mode, out=out, resume=resume, force=force, progress=progress
            )
    except KeyboardInterrupt:
        _stopped(mode, out)
        raise
    return _tell(measured, profile, path, load.words(meter.read()), json=json)


def _share(file: Path | None, *, share: bool, others: dict[str, bool], device: str, resume: bool, force: bool, json: bool) -> int:
    from foretell.cli.machine.share import share as run
    from foretell.hardware.probe import under_torchrun

    if not share:
        raise UserError(f"'{file}' is given without --share", "give --share FILE to write a file for others, or --out FILE for the profile")
    beside = [name for name, given in others.items() if given]
    if beside:
        raise UserError(f"{beside[0]} does not go with --share", "foretell probe --share FILE is all there is to it")
    if under_torchrun():
        raise UserError("--share under torchrun", "start it once without torchrun: it measures between the GPUs of a machine by itself")
    return run(device, file, resume=resume, force=force, json=json)


# --- while it runs ---------------------------------------------------------------------------------------------------



def _stopped(mode: str, out: Path | None) -> None:
    """What stays of a probe that was interrupted."""
    again = " ".join(["foretell probe", f"--{mode}", *(["--out", shell_word(out)] if out else []), "--resume"])
    common.emit(f"stopped; no profile was written, and what was measured is kept; resume with: {again}", sys.stderr)


# --- what came of it -------------------------------------------------------------------------------------------------


def _tell(measured: Measured, profile: Profile, path: Path, busy: str, *, json: bool) -> int:
    """`busy`: who else used the machine; what is measured beside others is too slow, and so are predictions from it."""
    from foretell.hardware.probe.summary import summary

    found = summary(measured)
    if busy:
        found["notes"] = [*found["notes"], f"{busy}; probe again when it is quiet, predictions from this profile will be too slow"]
    if json:
        content = {
            **found,
            "profile": str(path),
            "accuracy": dict(profile.accuracy),
            "torch": profile.torch,
            "date": profile.date,
        }
        return common.emit_json({"assumptions": found["notes"], "probe": content})
    common.emit("\n".join(_lines(found, path)))
    return common.YES


def _lines(found: dict[str, Any], path: Path) -> list[str]:
    rows = [(f"matrix products, {dtype}", _rate(rate)) for dtype, rate in found["product_flops_per_second"].items()]
    if found["memory_bytes_per_second"]:
        rows.append(("memory, read + write", _speed(found["memory_bytes_per_second"])))
    if found["cache_bytes_per_second"] and found["cache_bytes_per_second"] > 1.2 * found["memory_bytes_per_second"]:
        rows.append(("caches, read + write", _speed(found["cache_bytes_per_second"])))
    launch = found["launch"]
    if launch:
        rows.append(("an empty op", f"{launch['device_seconds'] * 1e6:.1f} µs"))
        if launch["host_seconds"]:
            rows.append(("the host's asking for it", f"{launch['host_seconds'] * 1e6:.1f} µs"))
    names = {
        "h2d-pinned": "host to device, pinned", "d2h-pinned": "device to host, pinned", "duplex": "both ways at once",
        "h2d-pageable": "host to device, pageable", "d2h-pageable": "device to host, pageable", "pin": "pinning memory",
        "adamw": "AdamW on the host, read + write", "adamw-beside": "the same while copies go both ways", "duplex-beside": "those copies",
        "host-copy": "host memory, read + write", "disk-write": "disk, write", "disk-read": "disk, read",
        "disk-both": "disk, both at once",
    }  # fmt: skip
    rows += [(names.get(name, name), _speed(rate)) for name, rate in found["copy_bytes_per_second"].items()]
    if found["most_watts"]:
        rows.append(("power, idle to most", f"{found['idle_watts']:.0f} to {found['most_watts']:.0f} W"))
    wide = max((len(name) for name, _ in rows), default=0)
    steps = f", {found['reference_steps']} reference steps" if found["reference_steps"] else ""
    return [
        f"{found['device']}  {found['reported_as']}, {found['mode']} probe: {found['rows']:,} ops in {found['cases']:,} cases{steps}",
        *(f"  {name:<{wide}}  {value}" for name, value in rows),
        *(f"not measured: {sentence}" for sentence in found["missing"]),
        *(f"note: {sentence}" for sentence in found["notes"]),
        f"profile: {path}",
        "Next:  foretell fit gpt2 --on auto          now with measured times"
        if found["device"] != "CPU"
        else "Next:  foretell zoo check gpt-tiny         a small step here, predicted and measured",
        *(
            ["       foretell probe --full --resume      more cases, better predictions"]
            if found["mode"] == "quick"
            else []
        ),
    ]


def _rate(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GB/s" if rate >= 1e11 else f"{rate / 1e9:,.2f} GB/s"


# --- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(device: str, out: Path | None, *, force: bool, json: bool) -> int:
    """Every rank measures, rank 0 writes and tells."""
    from foretell.hardware.probe.ranks import probe_ranks, write

    try:
        with bar() as progress:
            fabric = probe_ranks(device, force=force, progress=progress)
    except UserError as error:
        if not common.speaks():  # the others would be silent, and this one knows why
            print(f"rank {os.environ.get('RANK')}: {error}", file=sys.stderr, flush=True)
        raise
    if fabric is None:
        return common.YES
    path = write(fabric, out or CLUSTER_FILE)
    profile = _attach(fabric)
    if json:
        content = {
            "file": str(path), "profile": str(profile) if profile else None, "ranks": fabric.cluster.count,
            "nodes": fabric.cluster.nodes, "backend": fabric.backend, "collectives": list(fabric.collectives),
            "pairs": list(fabric.pairs),
        }  # fmt: skip
        return common.emit_json({"assumptions": list(fabric.notes), "probe": content})
    common.emit("\n".join(_rank_lines(fabric, path, profile)))
    return common.YES


def _attach(fabric: MeasuredLinks) -> Path | None:
    """Add collectives and links to the user's own profile of the device, if there is one."""
    from foretell.hardware.probe.ranks import attached
    from foretell.hardware.profile import load, own_path, save

    path = own_path(fabric.about)
    try:
        return save(attached(load(path, device=fabric.about.device), fabric), path)
    except UserError:
        return None


def _rank_lines(fabric: MeasuredLinks, path: Path, profile: Path | None) -> list[str]:
    cluster = fabric.cluster
    rates = [row["bytes_per_second"] for row in fabric.pairs]
    latency = [row["latency_seconds"] for row in fabric.pairs]
    largest: dict[str, dict[str, Any]] = {}
    for row in fabric.collectives:
        if row["bytes"] >= largest.get(row["op"], row)["bytes"]:
            largest[row["op"]] = row
    return [
        f"{cluster.count} ranks on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.device.name}, through {fabric.backend}",
        f"  between two ranks  {_speed(min(rates))} to {_speed(max(rates))}, {min(latency) * 1e6:.0f} to {max(latency) * 1e6:.0f} µs",
        *(
            f"  {op:<17}  {_speed(row['bytes'] / row['seconds'])} of {row['bytes'] / 2**20:.0f} MiB"
            for op, row in largest.items()
        ),
        *(f"note: {sentence}" for sentence in fabric.notes),
        f"hardware file: {path}",
        *(
            [f"profile: {profile}, with these collectives"]
            if profile
            else ["no own profile of the device yet: run `foretell probe` once"]
        ),
        f"Next:  foretell fit gpt2 --on {shell_word(path)}",
    ]
