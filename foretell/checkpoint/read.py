"""Any boxes out of any checkpoint, whatever ranks wrote it: every byte that is used is checked first."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoint import store
from foretell.checkpoint.boxes import Box, whole
from foretell.checkpoint.format import CHUNK_BYTES, OLDER, Damaged, FileEntry, Header, TensorMeta, itemsize, opened
from foretell.checkpoint.store import THREADS, SavedCheckpoint
from foretell.checkpoint.tree import dtype_of, filled, names
from foretell.errors import InternalError, UserError
from foretell.units import human_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Want:
    """A box of a whole tensor, and memory of this rank's own to put it in. Nothing live: it is filled piece by piece."""

    name: str
    box: Box
    into: Tensor
    """On the CPU, of the box's size and the tensor's dtype."""


@dataclass(frozen=True)
class _Source:
    path: Path
    base: int
    entry: FileEntry
    loose: frozenset[str]


class Reader:
    """A checkpoint whose manifest and headers are as they were written, and whose files hold every tensor in full: no more
    memory is asked for than there are bytes."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self.saved, self._loose = saved, store.loose(saved.about)
        self.headers: Mapping[int, Header] = {h.rank: h for h in store.headers(saved).values()}
        lacking = store.missing(saved.manifest, self.headers.values())
        if lacking:
            raise Damaged(f"{saved.path}: {lacking[0]}", OLDER)
        self._sources: dict[str, list[_Source]] = defaultdict(list)
        for header in self.headers.values():
            for entry in header.entries:
                if entry.name:
                    self._sources[entry.name].append(self._source(header.rank, entry))

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        return self.saved.manifest.tensors

    def read(self, wants: Sequence[Want]) -> None:
        """Fill all of them, or raise what is damaged or missing."""
        jobs: dict[int, tuple[_Source, list[tuple[Want, Box]]]] = {}
        for want in wants:
            if not want.box.volume:
                continue
            spec = self.tensors.get(want.name)
            if spec is None or dtype_of(spec.dtype) != want.into.dtype or tuple(want.into.shape) != want.box.size:
                raise InternalError(f"{want.name} was asked for as what it is not")
            found = 0
            for source in self._sources[want.name]:
                common = source.entry.box.meet(want.box)
                if common is not None:
                    jobs.setdefault(id(source), (source, []))[1].append((want, common))
                    found += common.volume
            if found != want.box.volume:
                raise Damaged(f"{self.saved.path} has not all of {want.name}", OLDER)
        _in_threads(jobs.values())

    def whole(self, name: str) -> Tensor:
        """All of one tensor."""
        spec = self.tensors[name]
        into = _memory(spec, name)
        self.read([Want(name=name, box=whole(spec.shape), into=into)])
        return into

    def own(self, rank: int, *, only: str | None = None) -> Any:
        """What a rank kept for itself, or one part of that."""
        header = self.headers.get(rank)
        if header is None:
            raise UserError(f"{self.saved.path} has nothing of rank {rank}", "it was saved by fewer ranks")
        outline = header.own
        if only is not None:
            outline = next((part for key, part in outline["{"] if key == only), None)
            if not isinstance(outline, dict) or "{" not in outline:
                raise Damaged(f"{self.saved.path} has no {only} of rank {rank}", OLDER)
        needed = names(outline)
        entries = [entry for entry in header.entries if not entry.name and entry.key in needed]
        tensors = {entry.key: _memory(TensorMeta(entry.box.size, entry.dtype), entry.key) for entry in entries}
        jobs = [
            (self._source(rank, entry), [(Want(name=entry.key, box=entry.box, into=tensors[entry.key]), entry.box)])
            for entry in entries
        ]
        _in_threads(jobs)
        return filled(outline, tensors)

    def check_own(self, rank: int, ranks: int) -> None:
        """Read what other ranks kept for themselves and nobody may need now: rank `rank` of `ranks` does its share, so
        that together they have seen every byte."""
        for writer in sorted(self.headers):
            if writer % ranks == rank:
                self.own(writer)

    def _source(self, rank: int, entry: FileEntry) -> _Source:
        name = f"rank-{rank:05d}.safetensors"
        return _Source(self.saved.path / name, self.saved.files[name].header_bytes, entry, self._loose)


def _memory(spec: TensorMeta, name: str) -> Tensor:
    try:
        return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"{name} has {human_bytes(item_bytes(spec))}, for which there is no memory", "use a machine with more") from error


def _in_threads(jobs: Iterable[tuple[_Source, list[tuple[Want, Box]]]]) -> None:
    """Read file by file, one part of a file to a thread; the first thing that is wrong is raised."""
    ordered = sorted(jobs, key=lambda job: (job[0].path, job[0].entry.start))
    handles: dict[Path, int] = {}
    try:
        for source, _ in ordered:
            if source.path not in handles:
                handles[source.path] = _opened(source.path)
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(_fill, handles[source.path], source, some) for source, some in ordered]:
                done.result()
    finally:
        for handle in handles.values():
            os.close(handle)


def _opened(path: Path) -> int:
    try:
        return opened(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}", OLDER) from error


def _fill(handle: int, source: _Source, wants: list[tuple[Want, Box]]) -> None:
    """Read what is needed of an entry, whole chunks of it, check them, and put every box where it belongs."""
    entry = source.entry
    size = entry.end - entry.start
    if not size:
        return
    if len(wants) == 1 and wants[0][1] == entry.box:
        into = wants[0][0].into[entry.box.within(wants[0][0].box).slices()]
        if into.is_contiguous():
            memory = memoryview(into.reshape(-1).view(torch.uint8).numpy())
            store.read_chunks(handle, source.base, entry, 0, memory, source.path, source.loose)
            return
    row = size // entry.box.size[0] if entry.box.size else size
    blocks = [common.within(entry.box) for _, common in wants]
    first = min(block.offset[0] for block in blocks) if entry.box.size else 0
    last = max(block.end[0] for block in blocks) if entry.box.size else 1
    low = first * row // CHUNK_BYTES * CHUNK_BYTES
    high = min(size, -(-last * row // CHUNK_BYTES) * CHUNK_BYTES)
    raw = torch.empty(high - low, dtype=torch.uint8)
    store.read_chunks(handle, source.base, entry, low // CHUNK_BYTES, memoryview(raw.numpy()), source.path, source.loose)
    rows = raw[first * row - low : last * row - low].view(dtype_of(entry.dtype)).view(last - first, *entry.box.size[1:])
    for (want, common), block in zip(wants, blocks, strict=True):
        inner = Box((block.offset[0] - first, *block.offset[1:]), block.size) if block.size else Box((0,), (1,))
        want.into[common.within(want.box).slices()] = rows[inner.slices()].reshape(common.size)


def differences(wanted: Mapping[str, TensorMeta], found: Mapping[str, TensorMeta]) -> tuple[str, ...]:
    """How the tensors of a model and of a checkpoint differ, in words; names without their first part."""
    told = []
    for name in dict.fromkeys((*wanted, *found)):
        mine, theirs = wanted.get(name), found.get(name)
        short = name.partition("/")[2]
        if theirs is None:
            told.append(f"{short} ({mine}) is not in the checkpoint")
        elif mine is None:
            told.append(f"{short} ({theirs}) is not in the model")
        elif mine != theirs:
            told.append(f"{short} is {theirs} in the checkpoint and {mine} in the model")
    return tuple(told)


def item_bytes(spec: TensorMeta) -> int:
    size = itemsize(spec.dtype)
    for length in spec.shape:
        size *= length
    return size
