"""What was measured of configurations, a row each as it comes: a search that was ended goes on where it was, the next one starts from it.

    line 1   the question: device, driver, torch, Triton, what is computed, template, shapes
    others   a configuration and what became of it, or the winner

Only configurations are read, and each must be one of the template's: the text that runs is written anew and verified again. A file
belongs to its user alone (0600), and one search at a time holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.decode import json_of, value_of
from foretell.errors import FileFormatError, UserError
from foretell.tune.search.space import Config, ConfigSpace, key_of
from foretell.tune.search.trial import FAILED, PRUNED, REFUSED, TIMED, TrialResult

VERSION = 1
MOST_BYTES = 16 << 20
MOST_FILES = 64
SAME = ("op", "template")
"""Parts of a question that another must share for its winner to be tried early."""
_REMEDY = "delete it, or FORETELL_CACHE=FOLDER"


@dataclass(frozen=True, kw_only=True)
class KeptWinner:
    """The best of a search that came to its end."""

    config: Config
    speedup: float
    low: float
    beside: str
    date: str = ""


@dataclass
class KeptRows:
    """Rows of one question, and the file that they are in."""

    path: Path
    question: Mapping[str, Any]
    space: ConfigSpace
    rows: dict[str, tuple[Config, TrialResult]] = field(default_factory=dict)
    winner: KeptWinner | None = None
    _handle: int = -1

    def __enter__(self) -> KeptRows:
        self._handle = _opened(self.path)
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def add(self, config: Config, found: TrialResult) -> None:
        self.rows[key_of(config)] = (config, found)
        self._write({"config": dict(config), "result": found.to_json()})

    def end(self, winner: KeptWinner) -> None:
        self.winner = winner
        told = {"speedup": winner.speedup, "low": winner.low, "beside": winner.beside, "date": winner.date}
        self._write({"winner": dict(winner.config), **told})

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            os.write(self._handle, json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}", "make room, or FORETELL_CACHE=FOLDER") from None

    def _read(self) -> None:
        lines = _lines(self._handle, self.path)
        if not lines:
            self._write({"foretell-tune": VERSION, "question": dict(self.question)})
            return
        for number, line in enumerate(lines, 1):
            try:
                self._take(json_of(line), number)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                if number == len(lines) > 1 and not line.endswith(b"}"):
                    os.ftruncate(self._handle, sum(len(one) + 1 for one in lines[:-1]))  # cut off as it was written
                    return
                raise FileFormatError(f"{self.path}, line {number}, is no row of a search: {error}", _REMEDY) from None

    def _take(self, row: Any, number: int) -> None:
        if number == 1:
            if row["foretell-tune"] != VERSION or row["question"] != self.question:
                raise ValueError("it is of another question")
        elif "winner" in row:
            self.winner = _winner(row, self.space)
        else:
            config = self.space.read(row["config"])
            self.rows[key_of(config)] = (config, _result(row["result"]))


def kept_rows(folder: Path, question: Mapping[str, Any], space: ConfigSpace) -> KeptRows:
    digest = hashlib.sha256(json.dumps(dict(question), sort_keys=True).encode()).hexdigest()[:24]
    return KeptRows(folder / f"{digest}.jsonl", dict(question), space)


def winners_elsewhere(folder: Path, question: Mapping[str, Any], space: ConfigSpace) -> list[Config]:
    """Of the same op and template on other shapes, devices or versions; what cannot be read is passed over."""
    return list(_others(folder, question, space))


def _others(folder: Path, question: Mapping[str, Any], space: ConfigSpace) -> Iterator[Config]:
    for path in sorted(folder.glob("*.jsonl"))[:MOST_FILES]:
        with contextlib.suppress(OSError, UserError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                lines = _lines(handle, path)
            finally:
                os.close(handle)
            head = json_of(lines[0])["question"]
            if head != question and all(head[name] == question[name] for name in SAME):
                rows = [json_of(line) for line in lines[1:]]
                found = [_winner(row, space).config for row in rows if "winner" in row]
                yield from found[-1:]


def _winner(row: Mapping[str, Any], space: ConfigSpace) -> KeptWinner:
    numbers = [value_of(float, row[name], name) for name in ("speedup", "low")]
    if not all(math.isfinite(one) and one >= 0 for one in numbers):
        raise ValueError("a speedup that is none")
    words = [value_of(str, row[name], name) for name in ("beside", "date")]
    return KeptWinner(config=space.read(row["winner"]), speedup=float(numbers[0]), low=float(numbers[1]), beside=words[0], date=words[1])


def _result(data: Any) -> TrialResult:
    found: TrialResult = value_of(TrialResult, data, "result")
    numbers = (found.seconds, found.speedup)
    if found.status not in (TIMED, REFUSED, PRUNED, FAILED) or not all(math.isfinite(one) and one >= 0 for one in numbers):
        raise ValueError("a result that is none")
    if found.status == TIMED and not found.speedup:
        raise ValueError("a time that is none")
    return found


def _opened(path: Path) -> int:
    """The file, held by this process alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror or error}", _REMEDY) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise FileFormatError(f"{path} is no file of yours", _REMEDY)
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise FileFormatError(f"{path} can be written by others", _REMEDY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"another search for the same op is under way ({path})", "wait for it, or FORETELL_CACHE=FOLDER") from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lines(handle: int, path: Path) -> list[bytes]:
    size = os.fstat(handle).st_size
    if size > MOST_BYTES or not stat.S_ISREG(os.fstat(handle).st_mode):
        raise FileFormatError(f"{path} is {size} bytes long, and no search writes that much", _REMEDY)
    return os.pread(handle, size, 0).splitlines()
