"""Memory levels, copies between device and host, launches and the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from foretell.hardware.probe.clock import Clock
from foretell.units import GIB, KIB, MIB, human_bytes

Found = dict[str, Any]
COPY_BYTES = {"quick": (1 * MIB, 64 * MIB), "full": (64 * KIB, 1 * MIB, 16 * MIB, 256 * MIB)}
LEVEL_BYTES = {
    ("cuda", "quick"): (4 * MIB, 32 * MIB, 128 * MIB, 1 * GIB),
    ("cuda", "full"): (1 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 512 * MIB, 2 * GIB),
    ("cpu", "quick"): (32 * KIB, 1 * MIB, 16 * MIB, 128 * MIB),
    ("cpu", "full"): (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
"""Working sets: what is read and what is written, together."""
DISK_BYTES, DISK_ROOM = 256 * MIB, 4
"""Size of the file that is written and read, and how many times that must be free."""


def launch(kind: str) -> Found:
    """Of an op that does next to nothing: start to start on the device, and the host's asking."""
    x = torch.zeros(1, device=kind)
    timing = Clock(kind, budget=4e-3, bursts=5).measure(lambda: x.add_(1.0))
    return {"device_seconds": timing.seconds, "host_seconds": timing.host_seconds, "spread": round(timing.spread, 3)}


def levels(kind: str, mode: str) -> Iterator[Found]:
    """How fast memory of growing size is read and written, each element once."""
    clock = Clock(kind, budget=10e-3)
    for size in LEVEL_BYTES[kind, mode]:
        if kind == "cuda" and size > torch.cuda.mem_get_info()[0] // 4:
            continue
        source, target = (torch.ones(size // 8, device=kind) for _ in range(2))
        timing = clock.measure(lambda source=source, target=target: target.copy_(source))  # type: ignore[misc]
        yield {
            "working_set_bytes": size, "bytes_per_second": size / timing.seconds, "spread": round(timing.spread, 3),
        }  # fmt: skip


# ---------------------------------------------------------------- copies


def copies(kind: str, mode: str) -> Iterator[Found]:
    """Host memory to host memory; with a GPU also each way, pinned and pageable, both ways at once, and pinning."""
    for size in COPY_BYTES[mode]:
        plain = torch.ones(size, dtype=torch.uint8)
        other = torch.empty_like(plain)
        yield _row("host-copy", 2 * size, _seconds("cpu", lambda plain=plain, other=other: other.copy_(plain)))  # type: ignore[misc]
        if kind == "cuda":
            yield from _across(size, plain)


def _across(size: int, plain: torch.Tensor) -> Iterator[Found]:
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    before = time.perf_counter()
    pinned = torch.empty(size, dtype=torch.uint8).pin_memory()
    yield _row("pin", size, time.perf_counter() - before)
    yield _row("h2d-pinned", size, _seconds("cuda", lambda: device.copy_(pinned, non_blocking=True)))
    yield _row("d2h-pinned", size, _seconds("cuda", lambda: pinned.copy_(device, non_blocking=True)))
    yield _row("h2d-pageable", size, _seconds("cuda", lambda: device.copy_(plain)))
    yield _row("d2h-pageable", size, _seconds("cuda", lambda: plain.copy_(device)))
    second, back = torch.empty_like(device), torch.empty(size, dtype=torch.uint8).pin_memory()
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            device.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            back.copy_(second, non_blocking=True)

    yield _row("duplex", 2 * size, _seconds("cuda", both))


def _seconds(kind: str, call: Callable[[], Any], rounds: int = 3) -> float:
    """Wall seconds of one call among several, the best of some rounds."""
    call()
    found = []
    for _ in range(rounds):
        if kind == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(4):
            call()
        if kind == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - before) / 4)
    return min(found)


def _row(name: str, size: int, seconds: float) -> Found:
    return {"name": name, "bytes": size, "seconds": float(f"{seconds:.4g}")}


# ---------------------------------------------------------------- disk


def disk(place: Path, size: int = DISK_BYTES) -> tuple[list[Found], str | None]:
    """Write a file until it is on the disk, and read it back past the memory that holds copies of it.

    Returns what was measured, or nothing and why.
    """
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return [], str(error.strerror)
    if free < DISK_ROOM * size:
        return [], f"{human_bytes(free)} free at {place}, {human_bytes(DISK_ROOM * size)} wanted"
    try:
        return _written_and_read(place, size), None
    except OSError as error:
        return [], str(error.strerror)


def _written_and_read(place: Path, size: int) -> list[Found]:
    """Written, read, and both at once: a disk may do that without loss, or in turn."""
    piece = os.urandom(16 * MIB)
    with _file(place) as first, _file(place) as second, ThreadPoolExecutor(1) as pool:
        rows = [_row("disk-write", size, _clocked(_write, first, piece, size))]
        if not _drop(first.fileno()):
            return rows
        rows.append(_row("disk-read", size, _clocked(_read, first, len(piece))))
        _drop(first.fileno())
        before = time.perf_counter()
        writing = pool.submit(_write, second, piece, size)
        _read(first, len(piece))
        writing.result()
        return [*rows, _row("disk-both", 2 * size, time.perf_counter() - before)]


@contextlib.contextmanager
def _file(place: Path) -> Iterator[FileIO]:
    handle, name = tempfile.mkstemp(dir=place, prefix=".probe-")
    try:
        with FileIO(handle, "r+b") as stream:
            yield stream
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _write(stream: FileIO, piece: bytes, size: int) -> None:
    for _ in range(size // len(piece)):
        left = memoryview(piece)
        while left:
            left = left[stream.write(left) :]
    os.fsync(stream.fileno())


def _read(stream: FileIO, length: int) -> None:
    stream.seek(0)
    while stream.read(length):
        pass


def _clocked(work: Callable[..., None], *args: object) -> float:
    before = time.perf_counter()
    work(*args)
    return time.perf_counter() - before


def _drop(handle: int) -> bool:
    """Whether the system could be asked to forget what it holds of the file in memory."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
