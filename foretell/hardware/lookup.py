"""Which profile stands for a device: the user's own, an added one, the shipped one, or public tables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from foretell.errors import UserError
from foretell.hardware import silicon
from foretell.hardware.profile import JSON_ENDS, Profile, folder, load, refuse_other
from foretell.hardware.share import added


def find_profile(
    device_name: str, torch_version: str | None = None, *, reported_as: str | None = None, threads: int | None = None
) -> Profile | None:
    """The profile of a device: the user's own, else what others shared and the user added, else the one that travels with
    foretell, else what was measured elsewhere, else None. One of a CPU that was added counts for the same CPU alone.

    Of several, one measured on `reported_as` comes before others, one of several threads before one of a single thread, and a
    newer before an older. With `torch_version`, only those measured with that minor version; with `threads`, with so many.
    Passed over: files that cannot be read, and own ones without fitted ops.
    """
    for own, paths in ((True, _own(device_name)), (True, added.paths_of(device_name)), (False, _shipped(device_name))):
        found = [profile for path in paths if (profile := _readable(path, device_name, torch_version, own)) is not None]
        found = [profile for profile in found if threads is None or profile.threads == threads]
        found = [profile for profile in found if not profile.shared or profile.backend != "cpu" or profile.reported_as == reported_as]
        if found:
            return max(found, key=lambda profile: (profile.reported_as == reported_as, profile.threads != 1, profile.date))
    return _elsewhere(device_name, torch_version)


@functools.lru_cache(maxsize=8)
def _elsewhere(device_name: str, torch_version: str | None) -> Profile | None:
    """The profile of the device that public tables of this one are told relative to, with those tables."""
    known = silicon.measured_elsewhere(device_name)
    found = [_readable(path, known.basis, torch_version, False) for path in _shipped(known.basis)] if known else []
    basis = next((profile for profile in found if profile is not None), None)
    if known is None or basis is None:
        return None
    accuracy = {"elsewhere": {group: one["accuracy"] for group, one in known.groups.items()}}
    told = f"kernels measured elsewhere: {known.source}, {known.date}, with {', '.join(known.stacks)}"
    lacks = tuple(f"{what}: not in that table, carried over from {known.basis}" for what in known.lacks)
    return replace(
        basis, device=device_name, reported_as=device_name, date=known.date, notes=(told,), missing=lacks, clocks={}, power=(),
        levels=(), latency=(), rates=(), accuracy=accuracy, elsewhere=known.to_dict(),
    )  # fmt: skip


def shipped_profile(device_name: str) -> Profile | None:
    """The full probe of a device that travels with foretell; of two of a CPU, the one of several threads."""
    found = [profile for path in _shipped(device_name) if (profile := _readable(path, device_name, None, False)) is not None]
    return max(found, key=lambda profile: profile.threads != 1, default=None)


def profile_stamp(device_name: str) -> str:
    """Changes whenever `find_profile` may answer differently; nothing is read for it."""
    found = []
    for path in (*_own(device_name), *added.paths_of(device_name), *_shipped(device_name)):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return ";".join(found)


def _own(device_name: str) -> list[Path]:
    try:
        return _named(list(folder().iterdir()), device_name)
    except OSError:
        return []


def _shipped(device_name: str) -> list[Path]:
    place = Path(str(resources.files("foretell.hardware") / "profiles"))
    return _named(place.iterdir(), device_name) if place.is_dir() else []


def _named(paths: Iterable[Path], device_name: str) -> list[Path]:
    return sorted(path for path in paths if path.name.startswith(device_name) and path.name.endswith(JSON_ENDS))


def _readable(path: Path, device_name: str, torch_version: str | None, own: bool) -> Profile | None:
    """None where the file cannot be used, or would only hide a better one."""
    try:
        status = path.stat()
        profile = _once(path, status.st_size, status.st_mtime_ns)
        refuse_other(profile, path, device=device_name, torch_version=torch_version)
    except (UserError, OSError):
        return None
    return profile if profile.ops or not own else None


@functools.lru_cache(maxsize=8)
def _once(path: Path, _size: int, _changed: int) -> Profile:
    """Megabytes of JSON, read once for as long as the file is the same: a prediction asks again and again."""
    return load(path)
