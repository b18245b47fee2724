"""`foretell probe --share`: measure within five minutes, keep nothing that tells whose machine it was, check it, write one file.

The rows are in a journal in the user's cache until the file is written; a probe that was stopped resumes from there.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import InternalError, UserError
from foretell.files import write_atomically
from foretell.hardware.catalog import devices as catalogue
from foretell.hardware.probe import journal, machine, ops, run
from foretell.hardware.profile import folder
from foretell.hardware.share.check import complaints
from foretell.hardware.share.file import END, MOST_BYTES, SharedProbe, read, shared_of, write

Progress = Callable[[str, float], None]
RANKS_SECONDS = 40.0
"""That collectives between the GPUs of a machine may take; what takes longer is left out and said to be missing."""
ALL_SECONDS = 290.0
"""After which no ranks are begun any more."""
_MACHINES = ("x86_64", "aarch64", "arm64")


def share(device: str, *, out: Path | None = None, resume: bool = False, force: bool = False, progress: Progress) -> tuple[SharedProbe, Path]:
    """Measure this machine and write the file."""
    began = time.monotonic()
    kind = machine.choose(device)
    if kind == "cuda" and not force:
        machine.refuse_busy()  # before CUDA runs here
    name = machine.device_of(kind).name
    out = out or Path(default_name(name))
    _writable(out)
    rows = folder() / f"{name}.share.rows.jsonl"
    cards = _cards() if kind == "cuda" else 1
    budget = run.BUDGET_SECONDS[kind, "share"] - (RANKS_SECONDS if cards > 1 else 0.0)
    measured = run.probe(kind, "share", journal=rows, seconds=budget, resume=resume, force=True, progress=progress)
    fabric: dict[str, Any] = {"collectives": (), "links": None}
    if cards > 1:
        progress("collectives between GPUs", 0.95)
        found = _ranks(cards, ALL_SECONDS - (time.monotonic() - began))
        fabric = found or fabric
        measured = measured if found else replace(measured, missing=(*measured.missing, "ranks: could not be measured"))
    known = any(one.name == measured.about.device for one in catalogue())
    made = shared_of(measured, known=known, seed=ops.ORDER_SEED, **fabric)
    progress("checking", 0.98)
    content = write(made)
    shared = read(content, str(out))
    wrong = next(complaints(shared), None)
    if wrong is not None:
        raise UserError(f"nothing was written, since the measurements cannot be right: {wrong}", "run it again when the machine is idle")
    _anonymous(shared)
    if len(content) > MOST_BYTES:
        raise InternalError(f"a shared probe of {len(content):,} bytes, and at most {MOST_BYTES:,} are allowed")
    _kept(out, content)
    for path in (rows, journal.packed_path(rows)):
        with contextlib.suppress(OSError):
            path.unlink()
    return shared, out


def default_name(device: str) -> str:
    """Where the file goes unless told: named after the device alone."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", device) + END


def _writable(out: Path) -> None:
    """Five minutes are too long to find out afterwards."""
    place = out.parent if str(out.parent) else Path()
    if out.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"'{out}' cannot be written", "give a file in a folder that is there and yours")


def _kept(out: Path, content: bytes) -> None:
    try:
        write_atomically(out, content)
    except OSError as error:
        raise UserError(f"the shared probe could not be written to '{out}': {error.strerror}", "free some space, then resume with --resume") from None


# ---------------------------------------------------------------- nobody's machine


def _anonymous(shared: SharedProbe) -> None:
    """The file's alphabet has no paths, and its other texts are words of the probe; this looks for the names of this machine and of
    its user among what the machine says of itself."""
    about = shared.measured.about
    text = " ".join((about.torch, about.python, about.driver or "", about.reported_as, about.host_cpu)).casefold()
    for name in _names():
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text):
            raise InternalError("the shared probe names this machine, its user or a folder of it; nothing was written")


def _names() -> Iterator[str]:
    """What this machine and its user are called; a name that is a word for processors tells nothing."""
    found = {platform.node(), platform.node().partition(".")[0], str(Path.home()), os.getcwd()}
    with contextlib.suppress(KeyError, OSError, ImportError):
        found.add(getpass.getuser())
    common = {"nvidia", "amd", "intel", "arm", "cpu", "gpu", "root", "apple", "xeon", "ryzen", "epyc", "linux", *_MACHINES}
    yield from (name.casefold() for name in found if name.casefold() not in common and len(name) > 2)


# ---------------------------------------------------------------- several GPUs


def _cards() -> int:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return len(names) if len(set(names)) == 1 else 1


def _ranks(count: int, seconds: float) -> dict[str, Any] | None:
    """Collectives and links between the GPUs here, by the probe of ranks in processes of its own; None where it fails."""
    import torch

    if seconds < RANKS_SECONDS / 2:
        return None
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "cluster.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", "foretell", "probe",
                 "--force", "--out", str(target)]  # fmt: skip
        mine = {**os.environ, "FORETELL_CACHE": place, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.suppress(OSError, subprocess.SubprocessError, UserError, ValueError, KeyError):
            subprocess.run(words, env=mine, timeout=min(seconds, RANKS_SECONDS), check=True, capture_output=True)
            entries = journal.read(target.with_name("cluster.rows.jsonl.gz"))[1]
            matrix = json_of(target.read_bytes())["matrix"]
            rows = tuple(entry.content for entry in entries if entry.stage == "collective")
            return {"collectives": rows, "links": tuple(tuple(row) for row in matrix)}
    return None
