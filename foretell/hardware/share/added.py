"""Shared probes that the user added: kept in the cache beside the user's own profiles, found by device.

    added/index.json                      what counts: a file that is not named there is a leftover, and is cleared away
    added/files/<digest>.foretell.json.gz the files as they came
    added/<device>.<digest>.json.gz       the profile fitted to all files of a device

The index is written last and whole, so an addition that is killed leaves things as they were.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.decode import Mismatch, json_of, value_of
from foretell.files import write_atomically
from foretell.hardware.types import Device
from foretell.trace.store import cache

KIND, SCHEMA = "foretell-added", 1
LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class AddedFile:
    """One added file."""

    digest: str
    date: str
    rows: int
    factor: float
    """Its seconds beside the middle of all files of the device."""


@dataclass(frozen=True, kw_only=True)
class Added:
    """A device's added files and the profile that was fitted to them."""

    device: str
    reported_as: str
    torch: str
    backend: str
    profile: str
    """Name of its profile file."""
    known: bool
    """Whether the catalogue has the device."""
    figures: Mapping[str, Any]
    threads: int | None
    sources: tuple[AddedFile, ...]
    low: float = 1.0
    high: float = 1.0
    """Between which factors of the middle the files lie."""
    contradiction: str = ""
    """Which two files contradict each other, where two do."""

    @property
    def words(self) -> str:
        """Where its profile comes from."""
        files = ", ".join(f"{one.digest[:12]} of {one.date}" for one in self.sources)
        many = f"{len(self.sources)} shared probes" if len(self.sources) > 1 else "a shared probe"
        apart = f", which differ by {100 * (self.high / self.low - 1):.1f} %" if len(self.sources) > 1 else ""
        return f"{many} of {self.reported_as} with torch {self.torch}: {files}{apart}"


def folder() -> Path:
    return cache.folder() / "profiles" / "added"


def files_folder() -> Path:
    return folder() / "files"


def index_path() -> Path:
    return folder() / "index.json"


def entries() -> tuple[Added, ...]:
    """What was added; nothing where there is no index or it cannot be read."""
    path = index_path()
    try:
        status = path.stat()
        return _entries(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(maxsize=4)
def _entries(path: Path, _size: int, _changed: int) -> tuple[Added, ...]:
    try:
        data = json_of(path.read_bytes())
        if data["kind"] != KIND or data["schema"] != SCHEMA:
            return ()
        return tuple(value_of(tuple[Added, ...], data["added"], "added"))
    except (ValueError, KeyError, TypeError, Mismatch):
        return ()


def write(found: Iterable[Added]) -> None:
    """Make this what counts, and clear away what no longer does."""
    kept = sorted(found, key=lambda one: (one.device, one.torch, one.reported_as))
    content = {"kind": KIND, "schema": SCHEMA, "added": [asdict(one) for one in kept]}
    write_atomically(index_path(), json.dumps(content, sort_keys=True, indent=1) + "\n")
    clear()


def clear() -> None:
    """Delete leftovers: files that the index does not name."""
    named = {one.profile for one in entries()} | {"index.json", LOCK}
    digests = {source.digest for one in entries() for source in one.sources}
    with contextlib.suppress(OSError):
        for path in (*folder().iterdir(), *(files_folder().iterdir() if files_folder().is_dir() else ())):
            counts = path.name in named if path.parent == folder() else path.name.split(".")[0] in digests
            if path.is_file() and not counts:
                path.unlink()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One addition at a time: another's leftovers are its files until its index is written. The lock goes with the process."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def paths_of(device_name: str) -> list[Path]:
    """Profile files of a device, newest torch first."""
    return [folder() / one.profile for one in entries() if one.device == device_name]


def entry_of(device_name: str) -> Added | None:
    return next((one for one in entries() if one.device == device_name), None)


# ---------------------------------------------------------------- devices that no catalogue has


def devices() -> tuple[Device, ...]:
    """Devices that are known by added files alone."""
    found = {one.device: one for one in entries() if not one.known and one.backend != "cpu"}
    return tuple(_device(one) for one in found.values())


def reported(name: str) -> Device | None:
    """The device that torch calls so, of those known by added files alone."""
    known = {one.reported_as.casefold(): one for one in entries() if not one.known and one.backend != "cpu"}
    found = known.get(name.casefold())
    return _device(found) if found else None


def _device(one: Added) -> Device:
    from foretell.hardware.share.file import device_of

    return device_of(one.figures, f"{one.sources[-1].digest[:12]} of {one.sources[-1].date}")
