"""Slow links from what collectives took once their last rank was there. Pure: records in, findings out.

Of a collective, the rank that comes last waits least, and its wait is the transfer itself: no clocks are compared. A slow rank makes
the others wait and leaves transfers as they were; a slow link makes every transfer longer, and nobody late. Which link it is, a
matrix of transfers between pairs of ranks tells (`read_matrix`): one cell a link, a row a sender, a column a receiver, all of it the
fabric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretell.runtime.detect.layout import ASIDE, OPS, PHASES, RECV, SEND
from foretell.runtime.detect.records import RingContent
from foretell.units import human_bytes

LINK, SENDER, RECEIVER, NETWORK, FABRIC = "link", "sender", "receiver", "network of a rank", "fabric"
_STEP_PHASES = [PHASES.index(name) for name in ("step", "data", "log")]
CONTROL = "control"
"""Name of groups whose messages are not the model's."""


@dataclass(frozen=True)
class TransferClass:
    """Collectives that should take alike."""

    group: str
    op: str
    bytes: int

    def words(self) -> str:
        return f"{self.op} of {human_bytes(self.bytes)} over {self.group}"


@dataclass(frozen=True, eq=False)
class Transfers:
    """Collectives that all ranks of their group have left, of one class."""

    kind: TransferClass
    steps: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LinkLimits:
    """From when on a transfer is slow."""

    least: int = 30
    """Transfers at the beginning that are the measure of the later ones."""
    window: int = 25
    """Steps that are looked at together."""
    windows: int = 3
    quantile: float = 0.2
    """Of a window's transfers: a slow link slows the quickest, a busy machine does not."""
    ratio: float = 1.5
    cost: float = 0.03
    """Of a step, at least."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Transfers that take longer than at the beginning of the run."""

    kind: TransferClass
    before_seconds: float
    seconds: float
    a_step: float
    """Seconds a step that it costs, all collectives of its group together."""
    step_seconds: float
    last_step: int

    @property
    def cost(self) -> float:
        return self.a_step / self.step_seconds if self.step_seconds > 0 else 0.0


def transfers(rings: Sequence[RingContent], *, after: int = 0, before: int | None = None) -> list[Transfers]:
    """Of the steps after `after` and before `before`, class by class."""
    found: dict[TransferClass, list[tuple[int, float]]] = defaultdict(list)
    by_key: dict[str, list[tuple[RingContent, int]]] = defaultdict(list)
    for ring in rings:
        for number, group in ring.groups.items():
            if not group.name.startswith(CONTROL):
                by_key[group.key].append((ring, number))
    for parts in by_key.values():
        name = parts[0][0].groups[parts[0][1]]
        if len(parts) < 2 or (name.ranks and len(parts) != len(name.ranks)):
            continue
        rows = [_done(ring.records, number, after, before) for ring, number in parts]
        common = rows[0]["sequence"]
        for each in rows[1:]:
            common = np.intersect1d(common, each["sequence"])
        if not len(common):
            continue
        same = [each[np.searchsorted(each["sequence"], common)] for each in rows]
        least = np.min([each["exit"] - each["wait"] for each in same], axis=0) / 1e9
        first = same[0]
        for op, nbytes in {(int(op), int(nbytes)) for op, nbytes in zip(first["op"], first["bytes"], strict=True)}:
            of_it = (first["op"] == op) & (first["bytes"] == nbytes)
            kind = TransferClass(name.name, "p2p" if op in (SEND, RECV) else OPS[op], nbytes)
            found[kind] += zip(first["step"][of_it].tolist(), least[of_it].tolist(), strict=True)
    return [Transfers(kind, np.array([s for s, _ in rows]), np.array([t for _, t in rows])) for kind, rows in found.items()]


def _done(records: np.ndarray, group: int, after: int, before: int | None) -> np.ndarray:
    found = (records["group"] == group) & (records["exit"] > 0) & (records["wait"] > 0) & (records["flags"] & ASIDE == 0)
    found &= np.isin(records["phase"], _STEP_PHASES) & (records["step"] >= after)
    if before is not None:
        found &= records["step"] < before
    rows = records[found]
    rows = rows[np.argsort(rows["sequence"], kind="stable")]
    return rows[np.append(np.diff(rows["sequence"]) > 0, True)] if len(rows) else rows


@dataclass
class LinkWatch:
    """Takes windows of transfers as they come; a class that is slow is told once, and again only after it was quick."""

    limits: LinkLimits = field(default_factory=LinkLimits)
    _first: dict[TransferClass, list[float]] = field(default_factory=lambda: defaultdict(list))
    _before: dict[TransferClass, float] = field(default_factory=dict)
    _runs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _told: set[str] = field(default_factory=set)

    def window(self, found: Iterable[Transfers], step_seconds: float, steps: int) -> list[SlowLink]:
        """Transfers of the next so many steps, of that length."""
        limits, slow = self.limits, dict[str, list[tuple[Transfers, float, float]]]()
        for one in found:
            if one.kind not in self._before:
                first = self._first[one.kind]
                first += one.seconds.tolist()
                if len(first) >= limits.least * (1 + limits.windows):
                    self._before[one.kind] = float(np.quantile(first, limits.quantile))
                    del self._first[one.kind]
                continue
            if len(one.seconds) >= 3:
                now = float(np.quantile(one.seconds, limits.quantile))
                slow.setdefault(one.kind.group, []).append((one, self._before[one.kind], now))
        return [told for group, rows in slow.items() if (told := self._follow(group, rows, step_seconds, steps)) is not None]

    def _follow(self, group: str, rows: Sequence[tuple[Transfers, float, float]], step_seconds: float, steps: int) -> SlowLink | None:
        a_step = sum(max(0.0, now - before) * len(one.seconds) for one, before, now in rows) / max(1, steps)
        ratio = sum(now * len(one.seconds) for one, _, now in rows) / max(1e-12, sum(before * len(one.seconds) for one, before, _ in rows))
        if ratio < self.limits.ratio or a_step < self.limits.cost * step_seconds:
            self._runs[group] = 0
            self._told.discard(group)
            return None
        self._runs[group] += 1
        if self._runs[group] < self.limits.windows or group in self._told:
            return None
        self._told.add(group)
        one, before, now = max(rows, key=lambda row: (row[2] - row[1]) * len(row[0].seconds))
        return SlowLink(
            kind=one.kind, before_seconds=before, seconds=now, a_step=a_step, step_seconds=step_seconds, last_step=int(one.steps.max()),
        )  # fmt: skip


# --- which link ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixReading:
    """What is slow in a matrix of transfers."""

    kind: str
    """LINK, SENDER, RECEIVER, NETWORK, FABRIC; empty = nothing."""
    ranks: tuple[int, ...] = ()
    """Sender and receiver of a link; the sender; the receiver; who does both slowly."""
    ratio: float = 1.0
    """Of the slow transfers to the others."""


def read_matrix(seconds: np.ndarray, *, ratio: float = 2.0, usual: float | None = None) -> MatrixReading:
    """`seconds[s, r]` from rank s to rank r, for as many bytes everywhere; the diagonal counts for nothing. `usual` is what a transfer
    should take, without which a fabric that is slow as a whole cannot be told from one that is not."""
    world = len(seconds)
    off = ~np.eye(world, dtype=bool) & np.isfinite(seconds)
    if not off.any():
        return MatrixReading("")
    base = usual if usual is not None else float(np.quantile(seconds[off], 0.25))
    hot = off & (seconds > ratio * base)
    if not hot.any():
        return MatrixReading("")
    found = float(np.median(seconds[hot])) / base
    if world > 2 and hot.sum() < off.sum():
        for rank in range(world):
            row, column = hot[rank].sum() == off[rank].sum() > 0, hot[:, rank].sum() == off[:, rank].sum() > 0
            across = int(hot[rank].sum() + hot[:, rank].sum())
            if across == hot.sum() and row and column:
                return MatrixReading(NETWORK, (rank,), found)
            if hot[rank].sum() == hot.sum() > 1 and row:
                return MatrixReading(SENDER, (rank,), found)
            if hot[:, rank].sum() == hot.sum() > 1 and column:
                return MatrixReading(RECEIVER, (rank,), found)
    cells = [(int(source), int(target)) for source, target in np.argwhere(hot)]
    if len({tuple(sorted(cell)) for cell in cells}) == 1 and len(cells) < off.sum():
        return MatrixReading(LINK, max(cells, key=lambda cell: seconds[cell]), found)
    return MatrixReading(FABRIC, (), found)
