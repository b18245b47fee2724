"""Rows as they are measured: one line of JSON each, appended, so that a probe that was stopped can go on.

The first line says what is measured where (`About`); every other line is `[stage, seconds it took, content]`.
Only the last line may be cut short, and is then dropped. When all is measured the file is compressed.

Stages: ops {case, rows}, failed {case, why}, step, launch, level, latency, rate, copy, power, clocks, collective, pair,
skipped {stage, why}, note, finished {stage, mode}.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from foretell.decode import Mismatch, decode, shown
from foretell.errors import FileFormatError, UserError
from foretell.files import write_atomically
from foretell.hardware.profile import About, Case, LatencyRow, LevelRow, Measured, OpRow

KIND, SCHEMA = "foretell-journal", 1
_ANEW = "start anew without --resume"


class JournalEntry(NamedTuple):
    """One line: what was done, how long that took, what came of it."""

    stage: str
    spent: float
    content: dict[str, Any]


class Journal:
    """An open journal. What `add` returned from is kept, whatever happens next."""

    def __init__(self, path: Path, about: About, entries: Iterable[JournalEntry] = ()) -> None:
        self.path, self.about = path, about
        self.entries: list[JournalEntry] = list(entries)
        self._stream = path.open("r+b", buffering=0)
        self._end = self._stream.seek(0, os.SEEK_END)

    def add(self, stage: str, spent: float, content: Mapping[str, Any]) -> None:
        """Append one line; on a full disk what was whole before stays whole, and the user is told."""
        line = json.dumps([stage, round(spent, 4), content], separators=(",", ":")).encode() + b"\n"
        try:
            left = line
            while left:
                left = left[self._stream.write(left) :]
        except OSError as error:
            raise self._full(error) from None
        self._end += len(line)
        self.entries.append(JournalEntry(stage, spent, dict(content)))

    def _full(self, error: OSError) -> UserError:
        with contextlib.suppress(OSError):  # else the cut line is dropped when the journal is read
            os.ftruncate(self._stream.fileno(), self._end)
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
        kept = sum(entry.stage == "ops" for entry in self.entries)
        return UserError(
            f"{why} while writing '{self.path}'; {kept} measured cases are kept there and no profile was written",
            "free some space, then `foretell probe --resume`",
        )

    @property
    def spent(self) -> float:
        return sum(entry.spent for entry in self.entries)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begin(path: Path, about: About, *, resume: bool) -> Journal:
    """A journal to add to: a new one, or the one that is there, plain or compressed."""
    packed = packed_path(path)
    if resume and (path.exists() or packed.exists()):
        known, entries = read(path if path.exists() else packed)
        _same_machine(path, known, about)
        about = known
    else:
        entries = []
    try:
        write_atomically(path, _lines(about, entries))
        return Journal(path, about, entries)
    except OSError as error:
        remedy = "free some space or give --out another place"
        raise UserError(f"cannot write the journal '{path}': {error.strerror}; nothing was measured", remedy) from None


def _lines(about: About, entries: Iterable[JournalEntry]) -> bytes:
    head = {"kind": KIND, "schema": SCHEMA, **asdict(about)}
    rows = [head, *([entry.stage, round(entry.spent, 4), entry.content] for entry in entries)]
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def packed_path(path: Path) -> Path:
    return path if path.name.endswith(".gz") else path.with_name(path.name + ".gz")


def pack(path: Path) -> Path:
    """Compress a finished journal in place of the plain one."""
    packed = packed_path(path)
    write(packed, *read(path))
    path.unlink()
    return packed


def write(path: Path, about: About, entries: Iterable[JournalEntry]) -> None:
    """A whole journal at once; compressed where the name says so, like cases side by side, which makes it smaller."""
    if not path.name.endswith(".gz"):
        write_atomically(path, _lines(about, entries))
        return
    alike = sorted(entries, key=_family)
    write_atomically(path, gzip.compress(_lines(about, alike), mtime=0))


def _family(entry: JournalEntry) -> str:
    """Of a case that was measured; what else there is comes first."""
    case = entry.content.get("case")
    return str(case[0]) if entry.stage == "ops" and isinstance(case, list) and case else ""


def read(path: Path) -> tuple[About, list[JournalEntry]]:
    """What a journal holds; damage anywhere but in a last line that was cut short is an error."""
    try:
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise FileFormatError(f"the journal '{path}' is cut short or damaged", _ANEW) from None
    except OSError as error:
        raise UserError(f"cannot read the journal '{path}': {error.strerror}", _ANEW) from None
    lines = content.split(b"\n")
    whole = lines[:-1]  # what follows the last line end was cut short
    if not whole:
        raise FileFormatError(f"the journal '{path}' has not even a first line", _ANEW)
    about = _about(path, _parsed(path, 1, whole[0]))
    return about, [_entry(path, number, _parsed(path, number, line)) for number, line in enumerate(whole[1:], 2)]


def _parsed(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise FileFormatError(f"line {number} of the journal '{path}' is damaged", _ANEW) from None


def _about(path: Path, head: Any) -> About:
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise FileFormatError(f"'{path}' is no journal of a probe", _ANEW)
    if head.get("schema") != SCHEMA:
        raise FileFormatError(
            f"'{path}' is a journal of schema {head.get('schema')!r}; this foretell reads {SCHEMA}", _ANEW
        )
    return decode(About, head, f"the first line of the journal '{path}'", _ANEW)


def _entry(path: Path, number: int, row: Any) -> JournalEntry:
    where = f"line {number} of the journal '{path}'"
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[2], dict)):
        raise FileFormatError(f"{where} is no measurement", _ANEW)
    stage, spent, content = row
    decode(float, spent, where, _ANEW)
    decode(_CONTENT.get(stage, _Figures), content, where, _ANEW)
    return JournalEntry(stage, float(spent), content)


_Figures = dict[str, float | str | bool | None]
"""What is measured besides ops and steps: names and numbers."""


@dataclass(frozen=True, kw_only=True)
class _Ops:
    case: tuple[str, int]
    rows: tuple[Any, ...]

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if not _is_row(row):
                raise Mismatch(f"rows[{place}]", f"is {shown(row)} and should be an op, its tensors and its seconds")


def _is_row(row: Any) -> bool:
    """As `OpRow.to_list` writes it; there are tens of thousands."""
    if type(row) is not list or len(row) != 7:
        return False
    name, inputs, outputs, attrs, *times = row
    if type(name) is not str or not type(inputs) is type(outputs) is type(attrs) is list or not {*map(type, times)} <= {int, float}:
        return False
    return all(type(spec) is list and spec and type(spec[0]) is str and {*map(type, spec[1:])} <= {int} for spec in inputs + outputs)


@dataclass(frozen=True, kw_only=True)
class _Failed:
    case: tuple[str, int]
    why: str


@dataclass(frozen=True, kw_only=True)
class _StepLine:
    config: Mapping[str, Any]
    seconds: float
    host_seconds: float | None
    busy_seconds: float | None
    watts: float | None
    steps: float | None


@dataclass(frozen=True, kw_only=True)
class _RateLine:
    dtype: str
    side: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _CopyLine:
    name: str
    bytes: float
    seconds: float
    elements: float | None


@dataclass(frozen=True, kw_only=True)
class _PowerLine:
    name: str
    watts: float | None


@dataclass(frozen=True, kw_only=True)
class _Skipped:
    stage: str
    why: str


@dataclass(frozen=True, kw_only=True)
class _Finished:
    stage: str
    mode: str


@dataclass(frozen=True, kw_only=True)
class _Note:
    text: str


_CONTENT: Mapping[str, Any] = {
    "ops": _Ops, "failed": _Failed, "step": _StepLine, "level": LevelRow, "latency": LatencyRow, "rate": _RateLine, "copy": _CopyLine,
    "power": _PowerLine,
    "skipped": _Skipped, "finished": _Finished, "note": _Note, "clocks": dict[str, float], "launch": dict[str, float],
}  # fmt: skip
"""Stage → what a line of it holds."""


def _same_machine(path: Path, known: About, here: About) -> None:
    for name in ("device", "reported_as", "torch", "cores"):
        then, now = getattr(known, name), getattr(here, name)
        if then != now:
            what = {"reported_as": "processor" if here.backend == "cpu" else "GPU"}.get(name, name)
            raise UserError(f"the journal '{path}' was begun with {what} {then}, and this is {now}", _ANEW)


# ---------------------------------------------------------------- what it amounts to


def stages(kind: str) -> tuple[str, ...]:
    """What a whole probe has, in order; `kind` is cpu or cuda. Latencies and rates by dtype are besides: a quick probe has none."""
    return ("launch", "levels", "copies", "disk", "steps", "ops", *(("power", "clocks") if kind == "cuda" else ()))


def gather(path: str | Path, mode: str = "quick") -> Measured:
    """What a journal holds, finished or not; what it lacks is said in `missing`."""
    about, entries = read(Path(path))
    modes = [entry.content["mode"] for entry in entries if entry.stage == "finished"]
    return measured(about, entries, modes[-1] if modes else mode, stages("cpu" if about.backend == "cpu" else "cuda"))


def measured(about: About, entries: Iterable[JournalEntry], mode: str, expected: Iterable[str] = ()) -> Measured:
    """Measurements out of a journal; of the same thing measured twice the later counts.

    `expected` are stages that should have finished; those that have not are said to be missing.
    """
    latest: dict[tuple[Any, ...], JournalEntry] = {}
    for entry in entries:
        latest[_key(entry)] = entry
    kept = list(latest.values())
    finished = {entry.content["stage"] for entry in kept if entry.stage == "finished"}
    skipped = {entry.content["stage"]: entry.content["why"] for entry in kept if entry.stage == "skipped"}
    missing = [f"{stage}: {why}" for stage, why in skipped.items() if stage not in finished]
    missing += [f"{stage}: interrupted" for stage in expected if stage not in finished and stage not in skipped]
    clocks: dict[str, float] = {}
    for entry in kept:
        clocks |= entry.content if entry.stage == "clocks" else {}
    return Measured(
        about=about, mode=mode, missing=tuple(missing), clocks=clocks,
        cases=tuple(_case(entry) for entry in kept if entry.stage == "ops"), steps=_all(kept, "step"),
        launch=next((entry.content for entry in kept if entry.stage == "launch"), {}),
        levels=_all(kept, "level"), latency=_all(kept, "latency"), rates=_all(kept, "rate"), copies=_all(kept, "copy"), power=_all(kept, "power"),
        notes=(*_failures(kept), *(entry.content["text"] for entry in kept if entry.stage == "note")),
    )  # fmt: skip


def _key(entry: JournalEntry) -> tuple[Any, ...]:
    content = entry.content
    if entry.stage in ("ops", "failed"):
        return ("ops", *content["case"])
    if entry.stage == "step":
        return (entry.stage, json.dumps(content["config"], sort_keys=True))
    names = ("stage", "name", "bytes", "working_set_bytes", "text", "op", "source", "target", "dtype")
    return (entry.stage, *(content.get(name) for name in names), *(content if entry.stage == "clocks" else ()))


def _case(entry: JournalEntry) -> Case:
    family, number = entry.content["case"]
    return Case(family, number, tuple(OpRow.from_list(row) for row in entry.content["rows"]))


def _all(entries: Iterable[JournalEntry], stage: str) -> tuple[dict[str, Any], ...]:
    return tuple(entry.content for entry in entries if entry.stage == stage)


def _failures(entries: Iterable[JournalEntry]) -> list[str]:
    """How many cases could not run, and the commonest reason."""
    why = [f"{entry.content['case'][0]}: {entry.content['why']}" for entry in entries if entry.stage == "failed"]
    if not why:
        return []
    commonest = max(set(why), key=why.count)
    return [f"{len(why)} cases could not run here, most often {commonest}"]
