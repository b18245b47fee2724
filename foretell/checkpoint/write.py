"""One rank's file: laid out, copied aside, written by a few threads with a checksum of every chunk, and synced."""

from __future__ import annotations

import functools
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoint.boxes import Box, Shape, whole
from foretell.checkpoint.format import (
    CHUNK_BYTES,
    OWN,
    CheckpointFile,
    FileEntry,
    Header,
    data_sum,
    dump_header,
    entry_key,
    itemsize,
)
from foretell.checkpoint.store import THREADS
from foretell.checkpoint.tree import Outline, dtype_name
from foretell.errors import UserError
from foretell.units import DTYPE_BYTES, human_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorPiece:
    """A box of a whole tensor, and this rank's tensor with what is in it."""

    name: str
    """Of the whole: `model/NAME` or `optimizer/NAME/KEY`."""
    shape: Shape
    box: Box
    tensor: Tensor
    read: Callable[[int, int], Tensor] | None = None
    """Gives the bytes from one place to another, as uint8 in host memory, where the tensor itself has none."""


class FileLayout:
    """Where every tensor of a rank's file lies. Larger items come first, so that none begins at an odd place."""

    def __init__(self, pieces: Sequence[TensorPiece], own: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        outline = Outline(own, OWN)
        self.own, self.extra = outline.tree, dict(extra)
        shapes: list[tuple[str, str, Shape, Box, Tensor, Callable[[int, int], Tensor] | None]] = [
            (name, "", tuple(tensor.shape), whole(tensor.shape), tensor, None) for name, tensor in outline.tensors.items()
        ]
        shapes += [(entry_key(p.name, p.shape, p.box), p.name, p.shape, p.box, p.tensor, p.read) for p in pieces]
        shapes.sort(key=lambda one: (-_size(one[4]), one[0]))
        self.entries: list[FileEntry] = []
        self.tensors: list[Tensor] = []
        self.reads: list[Callable[[int, int], Tensor] | None] = []
        at = 0
        for key, name, shape, box, tensor, read in shapes:
            dtype = dtype_name(tensor.dtype)
            if dtype not in DTYPE_BYTES:
                raise UserError(f"{key} is of {dtype}, which cannot be saved", "keep it in another dtype")
            end = at + box.volume * itemsize(dtype)
            self.entries.append(FileEntry(key=key, name=name, dtype=dtype, shape=shape, box=box, start=at, end=end))
            self.tensors.append(tensor.detach())
            self.reads.append(read)
            at = end
        self.bytes = at

    @property
    def form(self) -> Any:
        """Equal where an image made for one layout will do for another."""
        return [(entry.key, entry.dtype, entry.box) for entry in self.entries]

    def elsewhere(self, *, host: bool) -> frozenset[int]:
        """Entries whose bytes are read from where they are kept; with `host` also those that are in host memory already."""
        return frozenset(
            number
            for number, (entry, tensor, read) in enumerate(zip(self.entries, self.tensors, self.reads, strict=True))
            if read is not None or (host and entry.name and tensor.device.type == "cpu")
        )


def _size(tensor: Tensor) -> int:
    return tensor.element_size()


class Image:
    """Host memory as large as a rank's tensors; kept from save to save, pinned where they come from a GPU.

    Entries in `direct` have no place in it: they are written from where they are, and may not change until then."""

    def __init__(self, layout: FileLayout, *, pin: bool, direct: frozenset[int] = frozenset()) -> None:
        self.form, self.direct = layout.form, direct
        self._at, size = {}, 0
        for number, entry in enumerate(layout.entries):
            if number not in direct:
                self._at[number] = size
                size += entry.end - entry.start
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        self.memory.fill_(0)  # pages are given out when first touched: now, and not in the middle of a save
        self._live: Live | None = None

    def take(self, layout: FileLayout, *, own: bool) -> None:
        """Copy what the rank keeps for itself, or everything else, as it is now. On a GPU it is only asked for."""
        self._live = Live(layout)
        for number, (entry, tensor) in enumerate(zip(layout.entries, layout.tensors, strict=True)):
            if tensor.numel() and own == (not entry.name) and number in self._at:
                start = self._at[number]
                into = self.memory[start : start + entry.end - entry.start].view(tensor.dtype).view(entry.box.size)
                into.copy_(tensor, non_blocking=True)

    def bytes_of(self, layout: FileLayout, number: int, first: int, last: int) -> Any:
        if number in self.direct:
            assert self._live is not None
            return self._live.bytes_of(layout, number, first, last)
        start = self._at[number]
        return self.memory[start + first : start + last].numpy()

    def forget(self, layout: FileLayout, *, direct: bool) -> None:
        """Let go of tensors that are copied, or of those that were written from where they are."""
        for number in range(len(layout.tensors)):
            if direct == (number in self.direct):
                layout.tensors[number] = torch.empty(0)
        self._live = None if direct else self._live


class Live:
    """Bytes of tensors as they are now, a chunk at a time: slower than an image for those who wait, but no copy of all."""

    def __init__(self, layout: FileLayout) -> None:
        self.layout = layout
        self._flat = functools.lru_cache(maxsize=2 * THREADS)(self._flattened)

    def _flattened(self, number: int) -> Tensor:
        return self.layout.tensors[number].contiguous().reshape(-1).view(torch.uint8)

    def bytes_of(self, layout: FileLayout, number: int, first: int, last: int) -> Any:
        read = layout.reads[number]
        if read is not None:
            return read(first, last).numpy()
        return self._flat(number)[first:last].to("cpu").numpy()


def write_file(
    path: Path, layout: FileLayout, *, rank: int, step: int, generation: str, source: Image | Live, checks: bool = True,
    free: Callable[[], None] = lambda: None,
) -> CheckpointFile:  # fmt: skip
    """Write, sync and tell what must be there. An error of any thread is raised here. `checks` is off in measurements; `free`
    is called as soon as what is written from where it is may change again."""
    header = Header(
        rank=rank, generation=generation, step=step, entries=tuple(layout.entries), own=layout.own, extra=layout.extra
    )
    base = len(dump_header(header))
    check_room(path.parent, base + layout.bytes)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        job = _Job(handle, base, layout, source)
        direct = frozenset(range(len(layout.entries))) if isinstance(source, Live) else source.direct
        extents = list(_extents(layout.entries, direct))
        with ThreadPoolExecutor(THREADS) as pool:
            # what is copied for writing is summed up at once
            _all(pool, job.write_and_sum if checks else job.write, [extent for extent in extents if extent[0][0] in direct])
            free()
            if isinstance(source, Live):
                os.fsync(handle)
            else:  # sums are made while the disk is busy
                extents = [extent for extent in extents if extent[0][0] not in direct]
                _all(pool, job.write, extents)
                synced = pool.submit(os.fsync, handle)
                _all(pool, job.sum, extents if checks else [])
                synced.result()
        entries = tuple(
            replace(entry, crc32=tuple(job.sums.get((number, chunk), 0) for chunk in range(_chunks(entry))))
            for number, entry in enumerate(layout.entries)
        )
        head = dump_header(replace(header, entries=entries))
        pwrite(handle, head, 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    return CheckpointFile(bytes=base + layout.bytes, header_bytes=base, header_crc32=zlib.crc32(head), crc32=data_sum(entries))


Extent = list[tuple[int, int, int]]
"""What is written at a time, in a row: (entry, from, to) of one large tensor's chunk or of many small tensors."""


class _Job:
    """A file under way; its methods run in several threads."""

    def __init__(self, handle: int, base: int, layout: FileLayout, source: Image | Live) -> None:
        self.handle, self.base, self.layout, self.source = handle, base, layout, source
        self.sums: dict[tuple[int, int], int] = {}

    def _views(self, extent: Extent) -> list[memoryview]:
        return [memoryview(self.source.bytes_of(self.layout, number, at, end)) for number, at, end in extent]

    def write(self, extent: Extent) -> None:
        self._write(extent, self._views(extent))

    def sum(self, extent: Extent) -> None:
        self._sum(extent, self._views(extent))

    def write_and_sum(self, extent: Extent) -> None:
        views = self._views(extent)
        self._sum(extent, views)
        self._write(extent, views)

    def _write(self, extent: Extent, views: list[memoryview]) -> None:
        number, at, _ = extent[0]
        content = views[0] if len(views) == 1 else b"".join(views)
        pwrite(self.handle, content, self.base + self.layout.entries[number].start + at)

    def _sum(self, extent: Extent, views: list[memoryview]) -> None:
        for (number, at, _), view in zip(extent, views, strict=True):
            self.sums[number, at // CHUNK_BYTES] = zlib.crc32(view)


def _all(pool: ThreadPoolExecutor, work: Callable[[Extent], None], extents: list[Extent]) -> None:
    """Do it for all of them in threads; the first error of any is raised, and what has not begun is left."""
    asked = [pool.submit(work, extent) for extent in extents]
    try:
        for one in asked:
            one.result()
    except BaseException:
        for one in asked:
            one.cancel()
        raise


def _chunks(entry: FileEntry) -> int:
    return -(-(entry.end - entry.start) // CHUNK_BYTES)


def _extents(entries: Sequence[FileEntry], direct: frozenset[int]) -> Iterator[Extent]:
    """In one row only what is written from where it is, or only what is not."""
    row: Extent = []
    size = 0
    for number, entry in enumerate(entries):
        for at in range(0, entry.end - entry.start, CHUNK_BYTES):
            end = min(entry.end - entry.start, at + CHUNK_BYTES)
            if row and (size + end - at > CHUNK_BYTES or (row[0][0] in direct) != (number in direct)):
                yield row
                row, size = [], 0
            row.append((number, at, end))
            size += end - at
    if row:
        yield row


def pwrite(handle: int, content: Any, offset: int) -> None:
    view = memoryview(content)
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(28, f"the disk is full: {human_bytes(size)} to write and {human_bytes(free)} free")
