"""Folders of checkpoints: which are there, whether every byte is as it was written, which may go. No torch."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.checkpoint.boxes import Box, uncovered
from foretell.checkpoint.finite import NONFINITE, is_finite
from foretell.checkpoint.format import (
    CHUNK_BYTES,
    MANIFEST,
    OLDER,
    CheckpointFile,
    Damaged,
    FileEntry,
    Header,
    Manifest,
    opened,
    parse_header,
    read_manifest,
)
from foretell.errors import FileFormatError, UserError

THREADS = min(4, os.cpu_count() or 1)
PARTIAL = ".partial"
_NAME = re.compile(r"step-([0-9]{1,18})(?:-[0-9a-f]{1,32})?")
"""A save that takes the place of one of the same step moves that one aside under a longer name."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that has everything it should have, as far as names and sizes tell."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def about(self) -> Mapping[str, Any]:
        return self.manifest.about

    @property
    def files(self) -> Mapping[str, CheckpointFile]:
        return self.manifest.files

    @property
    def bytes(self) -> int:
        return self.manifest.bytes


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def candidates(folder: Path) -> list[Path]:
    """Everything that is named like a checkpoint, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append((-int(match[1]), "-" in path.name.removeprefix("step-"), path.name, path))
    return [path for *_, path in sorted(found)]


def look(path: Path) -> SavedCheckpoint:
    """A checkpoint whose manifest can be trusted and whose files are there in full; raises what is wrong."""
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        try:
            size = (path / name).lstat().st_size
        except OSError:
            raise Damaged(f"{path / name} is missing", OLDER) from None
        if size != file.bytes:
            raise Damaged(f"{path / name} has {size} bytes and was written with {file.bytes}", OLDER)
    return SavedCheckpoint(path=path, manifest=manifest)


def complete(folder: Path) -> list[SavedCheckpoint]:
    """Checkpoints that have everything, the newest first; not a byte of their tensors is read."""
    found = []
    for path in candidates(folder):
        with contextlib.suppress(FileFormatError):
            found.append(look(path))
    return found


def every(path: Path) -> list[Path]:
    """All checkpoints that a path stands for, the newest first: itself, or those of a run or of a folder of checkpoints."""
    if path.is_file():
        raise UserError(f"{path} is a file and no checkpoint", "give the folder of a run or of a checkpoint")
    if not path.is_dir():
        raise UserError(f"there is no folder {path}", "give the folder of a run or of a checkpoint")
    if (path / MANIFEST).exists():
        return [path]
    found = candidates(folder_of(path))
    if found or _NAME.fullmatch(path.name):
        return found or [path]
    raise UserError(f"{path} has no checkpoint", "give the folder of a run or of a checkpoint")


def resolve(path: Path) -> Path:
    """The newest of them that has everything, as far as names and sizes tell; without any, the newest."""
    found = every(path)
    for one in found:
        with contextlib.suppress(FileFormatError):
            return look(one).path
    return found[0]


def folder_of(path: Path) -> Path:
    """The folder of checkpoints: a run has one within it."""
    if path.is_file():
        raise UserError(f"{path} is a file and no folder of checkpoints", "give the folder of a run")
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


# --- headers and bytes -----------------------------------------------------------------------------------------------


def read_header(folder: Path, name: str, manifest: Manifest) -> Header:
    """What a file holds, checked against the manifest."""
    file, path = manifest.files[name], folder / name
    try:
        handle = opened(path)
    except OSError as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise Damaged(f"{path} {problem}", OLDER) from error
    try:
        size = os.fstat(handle).st_size
        raw = os.pread(handle, file.header_bytes, 0) if size == file.bytes else b""
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}", OLDER) from error
    finally:
        os.close(handle)
    if size != file.bytes:
        raise Damaged(f"{path} has {size} bytes and was written with {file.bytes}", OLDER)
    if zlib.crc32(raw) != file.header_crc32:
        _tell_other_generation(raw, path, manifest)
        raise Damaged(f"{path} is damaged: its header is not what was written", OLDER)
    header = parse_header(raw, str(path), file.bytes - file.header_bytes)
    if header.generation != manifest.generation or header.step != manifest.step:
        raise Damaged(f"{path} belongs to another save ({header.generation}, not {manifest.generation})", OLDER)
    if name != f"rank-{header.rank:05d}.safetensors":
        raise Damaged(f"{path} was written by rank {header.rank}", OLDER)
    return header


def _tell_other_generation(raw: bytes, path: Path, manifest: Manifest) -> None:
    """A header that can be read but is not the one: most likely of another save."""
    found = re.search(rb'"generation":\s?"([0-9a-f]{1,64})"', raw)
    if found and found[1].decode() != manifest.generation:
        raise Damaged(f"{path} belongs to another save ({found[1].decode()}, not {manifest.generation})", OLDER)


def headers(saved: SavedCheckpoint) -> dict[str, Header]:
    """All of them; the first that is not as written is raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda name: read_header(saved.path, name, saved.manifest), saved.files)
        return dict(zip(saved.files, found, strict=True))


def loose(about: Mapping[str, Any]) -> frozenset[str]:
    """Names of tensors, and keys of what a rank keeps for itself, that may hold NaN or infinity."""
    listed = about.get(NONFINITE)
    return frozenset(map(str, listed)) if isinstance(listed, list) else frozenset()


def read_chunks(
    handle: int, base: int, entry: FileEntry, first: int, into: memoryview, where: Path, loose: frozenset[str] = frozenset()
) -> None:
    """Fill `into` with the bytes of an entry from chunk `first` on, and check every chunk against its checksum. Values that
    are not finite are damage too, but for tensors in `loose`."""
    for number, at in enumerate(range(0, len(into), CHUNK_BYTES), start=first):
        piece = into[at : at + CHUNK_BYTES]
        offset = base + entry.start + number * CHUNK_BYTES
        try:
            got = 0
            while got < len(piece):
                more = os.preadv(handle, [piece[got:]], offset + got)
                if not more:
                    raise Damaged(f"{where} ends within {entry.key}", OLDER)
                got += more
        except OSError as error:
            raise Damaged(f"{where} cannot be read: {error.strerror or error}", OLDER) from error
        if zlib.crc32(piece) != entry.crc32[number]:
            raise Damaged(f"{where} is damaged: bytes {offset} to {offset + len(piece) - 1}, of {entry.key}, are not what was written", OLDER)
        if entry.name not in loose and entry.key not in loose and not is_finite(piece, entry.dtype):
            raise Damaged(f"{entry.key} holds NaN or infinity in {where}", OLDER)


# --- every byte ------------------------------------------------------------------------------------------------------


def check_file(folder: Path, name: str, manifest: Manifest) -> tuple[Header | None, list[str]]:
    """Read all of one file. What is in it, and everything that is wrong with it."""
    try:
        header = read_header(folder, name, manifest)
        handle = opened(folder / name)
    except FileFormatError as error:
        return None, [error.problem]
    except OSError as error:
        return None, [f"{folder / name} cannot be read: {error.strerror or error}"]
    found = []
    buffer, exempt = memoryview(bytearray(CHUNK_BYTES)), loose(manifest.about)
    try:
        for entry in header.entries:
            for number in range(len(entry.crc32)):
                size = min(CHUNK_BYTES, entry.end - entry.start - number * CHUNK_BYTES)
                try:
                    read_chunks(handle, manifest.files[name].header_bytes, entry, number, buffer[:size], folder / name, exempt)
                except Damaged as error:
                    found.append(error.problem)
    finally:
        os.close(handle)
    return header, found


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint; empty where every byte is as it was written."""
    try:
        saved = look(path)
    except Damaged as error:
        return [error.problem]
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda name: check_file(path, name, saved.manifest), saved.files))
    found = [problem for _, some in read for problem in some]
    if not found:
        found = missing(saved.manifest, [header for header, _ in read if header is not None])
    return [f"{path}: {problem}" if str(path) not in problem else problem for problem in found]


def missing(manifest: Manifest, written: Iterable[Header]) -> list[str]:
    """Which tensors the files do not hold in full, every element once."""
    boxes: dict[str, list[Box]] = {name: [] for name in manifest.tensors}
    found = []
    for header in written:
        for entry in header.entries:
            if not entry.name:
                continue
            spec = manifest.tensors.get(entry.name)
            if spec is None or (spec.shape, spec.dtype) != (entry.shape, entry.dtype):
                found.append(f"{entry.key} of rank {header.rank} is not in the manifest so")
            else:
                boxes[entry.name].append(entry.box)
    for name, some in boxes.items():
        why = uncovered(manifest.tensors[name].shape, some)
        if why:
            found.append(f"{name} is not whole: {why}")
    return found


# --- which may go ----------------------------------------------------------------------------------------------------


def prune(folder: Path, keep: int, is_good: Callable[[Path], bool]) -> list[Path]:
    """Take away what is older than `keep` checkpoints that are known to be good; what went."""
    gone, good = [], 0
    for path in candidates(folder):
        if good >= keep:
            remove(path)
            gone.append(path)
        elif is_good(path):
            good += 1
    return gone


def remove(path: Path) -> None:
    """Renamed first: what is half gone must not look like a checkpoint."""
    with contextlib.suppress(OSError):
        path = path.rename(path.with_name(f"{path.name}.old{PARTIAL}"))
    shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
