"""Where a run's checkpoints in memory are: a folder of the host's memory that is its user's alone, one for each run. No torch.

    /dev/shm/foretell-UID-DIGEST/step-00000120/rank-00000.safetensors ... manifest.json

DIGEST follows from the path of the run folder, so that whoever starts the run again finds it. A host has the files of its own ranks
and, where there are several hosts, those of the host before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.checkpoint import store
from foretell.checkpoint.format import MANIFEST, Manifest, read_manifest
from foretell.errors import FileFormatError, UserError
from foretell.units import GIB, human_bytes

BASE, HOST = "FORETELL_MEMORY", "FORETELL_HOST"
"""Another folder than /dev/shm; what this host is called, where its own name is not it."""
KEEP_FREE = GIB
"""Bytes of host memory that are left to everything else."""


def host() -> str:
    return os.environ.get(HOST) or platform.node()


def folder_of(run: Path) -> Path:
    named = os.environ.get(HOST, "")
    digest = hashlib.sha256(f"{run.resolve()}{chr(0) + named if named else ''}".encode()).hexdigest()[:16]
    return Path(os.environ.get(BASE) or "/dev/shm") / f"foretell-{os.getuid()}-{digest}"


def is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's that nobody else may look into."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def make(folder: Path) -> None:
    """Have it there; what another user has made under that name is refused."""
    with contextlib.suppress(FileExistsError):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise
        except OSError as error:
            raise UserError(f"checkpoints cannot be kept in memory at {folder.parent}: {error.strerror or error}",
                            f"leave out --memory-every, or set {BASE} to a folder of a tmpfs") from None  # fmt: skip
    if not is_own(folder):
        raise UserError(f"{folder} is not a folder of this user's alone", "remove it, or run as whoever owns it")


def remove(folder: Path) -> None:
    if is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def forget(folder: Path) -> None:
    """What an earlier run left under the same name, or a course that was left."""
    if is_own(folder):
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path, nbytes: int, free: int | None) -> None:
    """Raise where so many bytes more have no room: in the file system, or in memory, of which this rank's share is `free`."""
    there = shutil.disk_usage(folder).free
    if free is not None:
        there = min(there, free - KEEP_FREE)
    if nbytes > there:
        raise OSError(28, f"memory has no room: {human_bytes(nbytes)} to write and {human_bytes(max(0, there))} free")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one host has of a checkpoint, every byte of it as it was written."""

    step: int
    generation: str
    ranks: tuple[int, ...]
    """Whose files."""
    all_ranks: int
    damage: tuple[str, ...] = ()
    """What is wrong with files that it has besides."""


def parts(folder: Path) -> dict[str, Part]:
    """Checkpoints that this host has at least a part of, by name."""
    found = {}
    for path in store.candidates(folder) if is_own(folder) else ():
        with contextlib.suppress(FileFormatError, UserError):
            manifest = read_manifest(path)
            good, damage = [], []
            for rank in range(manifest.world):
                name = f"rank-{rank:05d}.safetensors"
                if (path / name).exists():
                    wrong = store.check_file(path, name, manifest)[1]
                    damage += wrong[:1]
                    good += [] if wrong else [rank]
            found[path.name] = Part(
                step=manifest.step, generation=manifest.generation, ranks=tuple(good), all_ranks=manifest.world, damage=tuple(damage)
            )  # fmt: skip
    return found


def newest_step(folder: Path) -> int | None:
    """Of the newest that is whole on this host, as far as names and sizes tell."""
    kept = store.complete(folder) if is_own(folder) else []
    return kept[0].step if kept else None


def rescue(folder: Path, checkpoints: Path) -> Path | None:
    """The newest that is whole and newer than any on disk, copied there: the run ends, and memory does not last. None where there is none."""
    on_disk = store.complete(checkpoints)
    for kept in store.complete(folder) if is_own(folder) else []:
        if on_disk and on_disk[0].step >= kept.step:
            return None
        if store.problems(kept.path):
            continue
        partial, final = checkpoints / f"{kept.path.name}.memory{store.PARTIAL}", checkpoints / kept.path.name
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            for name in _names(kept.manifest):
                handle = os.open(partial / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with (kept.path / name).open("rb") as source, open(handle, "wb") as into:
                    shutil.copyfileobj(source, into, 2**24)
                    into.flush()
                    os.fsync(into.fileno())
            partial.rename(final)
            store.sync(checkpoints)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            return None
        return None if store.problems(final) else final
    return None


def _names(manifest: Manifest) -> Iterator[str]:
    yield from manifest.files
    yield MANIFEST


