"""Rings of ranks, read and checked: live ones, and those of processes that are gone. No torch.

Whatever the bytes are, nothing here raises but a `UserError` for a file that is no ring; a row that was being written when it was
read, or that makes no sense, is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foretell.decode import json_of, value_of
from foretell.errors import FileFormatError, UserError
from foretell.runtime.detect.hangs import RECENT, Entry, GroupPosition, RankPosition, deadline
from foretell.runtime.detect.layout import (
    ASIDE,
    DTYPES,
    FOLDER,
    FORMAT,
    HEADER_BYTES,
    OPS,
    PHASES,
    RECORD_SLOTS,
    RECORDS_AT,
    RECV,
    SEND,
    SIZE,
    STEP_SLOTS,
    STEPS_AT,
    SUFFIX,
)

RECORD_ROW = np.dtype({
    "names": ["number", "sequence", "enter", "wait", "exit", "bytes", "step", "shape", "group", "op", "dtype", "phase", "flags", "peer"],
    "formats": ["<u8", "<u8", "<i8", "<i8", "<i8", "<u8", "<u4", "<u4", "<u2", "u1", "u1", "u1", "u1", "<i2"],
})  # fmt: skip
_TIMES = ("end", "whole", "waited", "data", "other", "delayed")
STEP_ROW = np.dtype([("number", "<u8"), ("step", "<u8"), *((name, "<i8") for name in _TIMES)])
assert RECORD_ROW.itemsize == STEP_ROW.itemsize == 64
_DAMAGED = "delete the file; a run writes it anew"
_MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class RingHeader:
    """Who wrote a ring."""

    format: str
    rank: int
    world: int
    host: str = ""
    device: str = ""
    pid: int = 0
    role: str = ""
    """Ranks of one role do the same work: their times may be compared."""
    session: str = ""
    """The same for all processes that were started together."""

    @property
    def place(self) -> str:
        return f"{self.host}, {self.device}"


@dataclass(frozen=True, kw_only=True)
class GroupName:
    """A process group, as a ring names it."""

    group: int
    """Its number in this ring."""
    key: str
    """The same on every rank."""
    name: str
    """For people: the axis of the mesh, or what it is for."""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class RingContent:
    """What one rank has written."""

    header: RingHeader
    groups: Mapping[int, GroupName]
    records: np.ndarray
    """`RECORD_ROW`, the oldest first."""
    steps: np.ndarray
    """`STEP_ROW`, the oldest first."""
    path: Path = field(default_factory=Path)


def read_ring(path: Path) -> RingContent:
    """One file; a `UserError` where it is none."""
    (data,) = _read(path, (0, SIZE))
    records = _rows(np.frombuffer(data, RECORD_ROW, RECORD_SLOTS, RECORDS_AT), RECORD_SLOTS)
    sane = (records["op"] < len(OPS)) & (records["dtype"] < len(DTYPES)) & (records["phase"] < len(PHASES)) & (records["enter"] > 0)
    sane &= (records["exit"] == 0) | ((records["exit"] >= records["wait"]) & (records["wait"] >= records["enter"]))
    return RingContent(_header(data, path), _groups(data[HEADER_BYTES:RECORDS_AT]), records[sane], _steps(data[STEPS_AT:]), path)


def read_steps(path: Path) -> RingContent:
    """The same without collectives and groups, in a fifth of the time."""
    head, tail = _read(path, (0, HEADER_BYTES), (STEPS_AT, SIZE - STEPS_AT))
    return RingContent(_header(head, path), {}, np.zeros(0, RECORD_ROW), _steps(tail), path)


def _read(path: Path, *parts: tuple[int, int]) -> list[bytes]:
    """Of a file that has the size of a ring: so many bytes from there."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size != SIZE:
                raise FileFormatError(f"{path} is no record of collectives: it should be a file of {SIZE} bytes", _DAMAGED)
            return [os.pread(handle, count, at) for at, count in parts]
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions") from None


def _header(data: bytes, path: Path) -> RingHeader:
    try:
        header: RingHeader = value_of(RingHeader, json_of(data[:HEADER_BYTES].rstrip(b"\0")))
    except ValueError as error:
        raise FileFormatError(f"{path} is no record of collectives: {error}", _DAMAGED) from None
    if header.format != FORMAT or not 0 <= header.rank < header.world <= _MOST_RANKS:
        raise FileFormatError(f"{path} is no record of collectives of a rank: format {header.format[:40]!a}, rank {header.rank}", _DAMAGED)
    return header


def _steps(data: bytes) -> np.ndarray:
    rows = _rows(np.frombuffer(data, STEP_ROW, STEP_SLOTS), STEP_SLOTS)
    return rows[np.all([(rows[name] >= 0) & (rows[name] < 2**55) for name in _TIMES], axis=0)]


def _rows(rows: np.ndarray, slots: int) -> np.ndarray:
    """Those that are where their number says, in order, and of one go: nothing older than a whole ring."""
    numbers = rows["number"]
    found = rows[(numbers > 0) & (numbers < 2**62) & (numbers % slots == np.arange(slots))]
    found = found[np.argsort(found["number"])]
    return found[found["number"] + slots > found["number"][-1]] if len(found) else found


def _groups(text: bytes) -> dict[int, GroupName]:
    found = {}
    for line in text.rstrip(b"\0").split(b"\n"):
        with suppress(ValueError):
            name = value_of(GroupName, json_of(line))
            found[name.group] = name
    return found


def read_all(run: Path, read: Callable[[Path], RingContent] = read_ring) -> list[RingContent]:
    """Rings of the processes that were last started together in a run folder, by rank; files that are none are passed over."""
    found: dict[str, dict[int, RingContent]] = {}
    newest: dict[str, float] = {}
    for path in sorted(Path(run, FOLDER).glob(f"rank-*{SUFFIX}")):
        with suppress(UserError, OSError):
            content = read(path)
            session = content.header.session
            found.setdefault(session, {})[content.header.rank] = content
            newest[session] = max(newest.get(session, 0.0), path.stat().st_mtime)
    if not found:
        return []
    chosen = found[max(found, key=lambda session: newest[session])]
    world = max(content.header.world for content in chosen.values())
    return [chosen[rank] for rank in sorted(chosen) if chosen[rank].header.world == world]


# --- where ranks were last ---------------------------------------------------------------------------------------------


def positions_of(rings: Sequence[RingContent]) -> dict[int, RankPosition]:
    """Where each rank was when its ring was last written: of processes that are gone, where they ended."""
    return {ring.header.rank: _position(ring) for ring in rings}


def _position(ring: RingContent) -> RankPosition:
    rows, groups = ring.records[ring.records["flags"] & ASIDE == 0], []
    for number, name in ring.groups.items():
        own = rows[rows["group"] == number][-RECENT:]
        if len(own):
            groups.append(GroupPosition(name.key, name.name, name.ranks, int(own["sequence"][-1]), tuple(_entry(row) for row in own)))
    waits = rows[(rows["wait"] > 0) & (rows["exit"] == 0)]
    if not len(waits) or int(waits["group"][-1]) not in ring.groups:
        return RankPosition(tuple(groups), place=ring.header.place)
    last = waits[-1]
    like = rows[(rows["exit"] > 0) & (rows["group"] == last["group"]) & (rows["op"] == last["op"]) & (rows["bytes"] == last["bytes"])]
    limit = deadline([float(one) / 1e9 for one in like["exit"] - like["wait"]])
    return RankPosition(tuple(groups), ring.groups[int(last["group"])].key, int(last["sequence"]), 0.0, limit, ring.header.place)


def _entry(row: Any) -> Entry:
    op = int(row["op"])
    return Entry(int(row["sequence"]), "p2p" if op in (SEND, RECV) else OPS[op], DTYPES[int(row["dtype"])], int(row["bytes"]), int(row["shape"]))


# --- steps of all ranks, side by side -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepTable:
    """Steps that every rank has done, a row of each array for a rank and a column for a step; seconds."""

    steps: np.ndarray
    whole: np.ndarray
    waited: np.ndarray
    """In collectives: for other ranks, and for what was sent."""
    own: np.ndarray
    """Everything else, but for time without a core."""
    data: np.ndarray
    """Of that, for the next samples."""
    other: np.ndarray
    """Evaluation and checkpoints."""
    delayed: np.ndarray
    """Ready to run, and without a core."""

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, where: Any) -> StepTable:
        """Some of the steps."""
        return StepTable(self.steps[where], *(getattr(self, name)[:, where] for name in ("whole", "waited", "own", "data", "other", "delayed")))


def joined(tables: Sequence[StepTable]) -> StepTable:
    """One after the other."""
    names = ("whole", "waited", "own", "data", "other", "delayed")
    columns = [np.concatenate([getattr(one, name) for one in tables], axis=1) for name in names]
    return StepTable(np.concatenate([one.steps for one in tables]), *columns)


def step_table(rows: Iterable[np.ndarray], *, after: int = 0) -> StepTable:
    """Steps after `after` that all ranks have; `rows` are `STEP_ROW`s of each rank."""
    ranks = list(rows) or [np.zeros(0, STEP_ROW)]
    common = ranks[0]["step"]
    for each in ranks[1:]:
        common = np.intersect1d(common, each["step"])
    common = common[common > after]
    places = [_last_places(each["step"], common) for each in ranks]
    columns = {
        name: np.array([each[name][place] for each, place in zip(ranks, places, strict=True)], dtype=float).reshape(len(ranks), -1) / 1e9
        for name in ("whole", "waited", "data", "other", "delayed")
    }
    own = np.maximum(0.0, columns["whole"] - columns["waited"] - columns["other"] - columns["delayed"])
    return StepTable(common, columns["whole"], columns["waited"], own, columns["data"], columns["other"], columns["delayed"])


def _last_places(steps: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each wanted step is; the later one of a step that was done again."""
    order = np.argsort(steps, kind="stable")
    return order[np.searchsorted(steps[order], wanted, side="right") - 1] if len(steps) else np.zeros(0, int)


def clean(table: StepTable, warm_up: int) -> StepTable:
    """Without the first steps, those with an evaluation or a checkpoint in them, and the one after each."""
    if not len(table):
        return table
    apart = table.other.max(axis=0) > 0.05 * table.whole.min(axis=0)
    apart[1:] |= apart[:-1].copy()
    return table.at(~apart & (table.steps > warm_up))
