"""Add shared probes: read, checked, combined with what was added before of the same device, fitted once, and kept.

    files ──read, check──► of each device: the middle of all its files ──fit──► profile, then the index that makes it count
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretell.errors import UserError
from foretell.files import write_atomically
from foretell.hardware import catalog
from foretell.hardware.profile import minor, save
from foretell.hardware.share import added, file
from foretell.hardware.share.added import Added, AddedFile
from foretell.hardware.share.check import refuse
from foretell.hardware.share.combine import combined
from foretell.hardware.share.file import SharedProbe
from foretell.hardware.types import Device
from foretell.price import bands
from foretell.search.profiles.fit import fit_profile

Progress = Callable[[str, float], None]
MOST_FILES = 200


@dataclass(frozen=True, kw_only=True)
class Addition:
    """What came of adding files."""

    added: tuple[Added, ...]
    again: int = 0
    """Files that had been added before."""


def add(paths: Iterable[str | Path], progress: Progress = lambda doing, share: None) -> Addition:
    """Check every file, then fit and keep them; an error leaves everything as it was."""
    given: dict[str, tuple[SharedProbe, bytes]] = {}
    for path in _files(paths):
        shared = file.load(path)
        refuse(shared, str(path))
        given[shared.digest] = (shared, path.read_bytes())
    try:
        with added.alone():
            return _kept(given, progress)
    except OSError as error:
        why = f"the shared probe could not be kept in '{added.folder()}': {error.strerror}"
        raise UserError(why, "free some space, or set FORETELL_CACHE to another folder") from None


def _kept(given: Mapping[str, tuple[SharedProbe, bytes]], progress: Progress) -> Addition:
    known = {source.digest for one in added.entries() for source in one.sources}
    fresh = {digest: pair for digest, pair in given.items() if digest not in known}
    groups: dict[tuple[str, ...], list[SharedProbe]] = {}
    for shared, _ in fresh.values():
        groups.setdefault(_group(shared), []).append(shared)
    entries = {_key(one): one for one in added.entries()}
    found = []
    try:
        for place, (key, files) in enumerate(groups.items()):
            part = lambda doing, share, place=place: progress(doing, (place + share) / len(groups))  # noqa: E731
            for shared in files:
                write_atomically(added.files_folder() / f"{shared.digest}{file.END}", fresh[shared.digest][1])
            entries[key] = _fitted([*_before(entries.get(key)), *files], part)
            found.append(entries[key])
        if found:
            added.write(entries.values())
    finally:
        added.clear()
    return Addition(added=tuple(found), again=len(given) - len(fresh))


def _files(paths: Iterable[str | Path]) -> list[Path]:
    """Files as given, and those of folders whose names end as shared probes' do."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob(f"*{file.END}")) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"the folder '{path}' has no file that ends with {file.END}", "give the file itself, or another folder")
        found += inside
    if len(found) > MOST_FILES:
        raise UserError(f"{len(found)} files at once", f"add at most {MOST_FILES} at a time")
    return found


def _group(shared: SharedProbe) -> tuple[str, ...]:
    """Files that one profile is fitted to: of one device, one minor version of torch, one model of CPU."""
    about = shared.measured.about
    own = (about.reported_as, str(about.cores), str(about.threads)) if about.backend == "cpu" else ()
    return (about.device, minor(about.torch), *own)


def _key(one: Added) -> tuple[str, ...]:
    own = (one.reported_as, str(one.figures.get("sm_count")), str(one.threads)) if one.backend == "cpu" else ()
    return (one.device, minor(one.torch), *own)


def _before(entry: Added | None) -> list[SharedProbe]:
    """Files of the same device that were added earlier, read again and checked again."""
    found = []
    for source in entry.sources if entry is not None else ():
        path = added.files_folder() / f"{source.digest}{file.END}"
        shared = file.load(path)
        refuse(shared, str(path))
        found.append(shared)
    return found


def device_for(shared: SharedProbe) -> Device:
    """The catalogue's where it has it; a CPU, and a device that nobody knows, as its file says."""
    known = next((one for one in catalog.devices() if one.name == shared.measured.about.device), None)
    return shared.device if known is None or known.backend == "cpu" else known


def _fitted(files: Sequence[SharedProbe], progress: Progress) -> Added:
    band = bands.factors(bands.Evidence(device=bands.CPU if files[0].device.backend == "cpu" else bands.OWN))
    middle = combined(files, band)
    newest = max(files, key=lambda one: one.measured.about.date)
    device, about = device_for(newest), newest.measured.about
    sources = tuple(
        AddedFile(digest=one.digest, date=one.measured.about.date, rows=len(one.measured.rows), factor=round(factor, 4))
        for one, factor in zip(files, middle.factors, strict=True)
    )
    generation = hashlib.sha256("".join(sorted(one.digest for one in files)).encode()).hexdigest()[:12]
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', about.device)}.{generation}.json.gz"
    entry = Added(
        device=about.device, reported_as=about.reported_as, torch=about.torch, backend=about.backend, profile=name, sources=sources,
        known=any(one.name == about.device for one in catalog.devices()), low=round(middle.low, 4), high=round(middle.high, 4),
        contradiction=middle.contradiction, figures=dict(about.figures), threads=about.threads,
    )  # fmt: skip
    profile = fit_profile(middle.measured, device, progress)
    told = {"words": entry.words, "low": entry.low, "high": entry.high, "contradiction": entry.contradiction, "files": len(files)}
    ranks = max(files, key=lambda one: len(one.collectives))
    save(replace(profile, shared=told, collectives=ranks.collectives, links=ranks.links), added.folder() / name)
    return entry
