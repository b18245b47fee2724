"""`foretell probe --share` and `foretell hardware add`: measurements that people give each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.plan.text import shell_word

if TYPE_CHECKING:
    from foretell.hardware.share.added import Added
    from foretell.hardware.share.file import SharedProbe


def share(device: str, out: Path | None, *, resume: bool, force: bool, json: bool) -> int:
    """Measure, check, write; what was stopped stays and resumes."""
    from foretell.api import share_machine
    from foretell.cli.machine.progress import bar

    try:
        with bar(lines=True) as progress:
            shared, path = share_machine(device, out=out, resume=resume, force=force, progress=progress)
    except KeyboardInterrupt:
        given = [*([shell_word(out)] if out else []), *(["--device", device] if device != "auto" else [])]
        again = " ".join(["foretell probe --share", *given, "--resume"])
        common.emit(f"stopped; no file was written, and what was measured is kept; resume with: {again}", sys.stderr)
        raise
    return _tell(shared, path, json=json)


def _tell(shared: SharedProbe, path: Path, *, json: bool) -> int:
    from foretell.hardware.probe.summary import summary

    measured, size = shared.measured, path.stat().st_size
    found = summary(measured)
    if json:
        content = {
            "file": str(path), "bytes": size, "digest": shared.digest, "device": measured.about.device, "torch": measured.about.torch,
            "rows": found["rows"], "cases": found["cases"], "reference_steps": found["reference_steps"], "missing": found["missing"],
            "product_flops_per_second": found["product_flops_per_second"], "memory_bytes_per_second": found["memory_bytes_per_second"],
            "collectives": len(shared.collectives),
        }  # fmt: skip
        return common.emit_json({"assumptions": [], "share": content})
    best = max(found["product_flops_per_second"].items(), key=lambda item: item[1], default=None)
    lines = [
        f"{measured.about.device}  {found['rows']:,} ops in {found['cases']:,} cases, {found['reference_steps']} reference steps"
        + (f", {len(shared.collectives)} collectives" if shared.collectives else ""),
        *([f"  fastest products    {best[1] / 1e12:,.1f} TFLOP/s in {best[0]}"] if best else []),
        *([f"  memory              {found['memory_bytes_per_second'] / 1e9:,.0f} GB/s"] if found["memory_bytes_per_second"] else []),
        *(f"not measured: {stage}" for stage in found["missing"]),
        *(["note: other programs used this machine meanwhile"] if shared.disturbed else []),
        f"file: {path} ({size / 1e3:,.0f} kB): no host name, user, path, serial number or UUID is in it",
        f"Next:  foretell hardware add {shell_word(path)}      use it here",
        "       put it into the folder hub/ of foretell's repository, and everybody's predictions rest on it (docs/share.md)",
    ]
    common.emit("\n".join(lines))
    return common.YES


# --- adding ----------------------------------------------------------------------------------------------------------


def add(paths: list[str], *, json: bool) -> int:
    """Check and keep files that others measured."""
    from foretell.api import add_shared
    from foretell.cli.machine.progress import bar
    from foretell.errors import UserError

    if not paths:
        raise UserError("no file to add", "foretell hardware add FILE, a file that `foretell probe --share` wrote, or a folder of them")
    with bar(lines=True) as progress:
        done = add_shared(paths, progress)
    if json:
        return common.emit_json({"assumptions": [], "added": [as_json(one) for one in done.added], "again": done.again})
    lines = [line for one in done.added for line in _added_lines(one)]
    if done.again:
        lines.append(f"{done.again} {'file was' if done.again == 1 else 'files were'} added before: nothing changes")
    common.emit("\n".join(lines))
    return common.YES


def as_json(one: Added) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(one), "words": one.words}


def _added_lines(one: Added) -> list[str]:
    new = "" if one.known else ", which the catalogue does not have: its figures are those of the file"
    on = one.device if one.backend != "cpu" else "auto"
    return [
        f"added {one.device}{new}",
        f"  profile from {one.words}",
        *([f"  note: {one.contradiction}"] if one.contradiction else []),
        f"Next:  foretell fit gpt2 --on {on}" if one.backend != "cpu" else "Next:  foretell hardware CPU",
    ]
