"""What worked before, by backend: kernels and steps with a value that follows what came of showing them.

    value   of an item at a stage (draft: no kernel yet, refine: a faster one): moves towards the rewards of rounds that saw it
    shown   the few whose task is alike and whose value is high
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from foretell.decode import json_of, value_of
from foretell.errors import FileFormatError, UserError
from foretell.files import write_atomically

DRAFT, REFINE = "draft", "refine"
VERSION = 1
SHOWN = 2
RATE = 0.3
"""Share by which a value moves towards a new reward."""
LEAST_ALIKE = 0.2
MOST_ITEMS = 2000
MOST_BYTES = 64 << 20
_REMEDY = "delete it, or FORETELL_CACHE=FOLDER"


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One kernel that was right, or better than the one before it."""

    stage: str
    ops: tuple[str, ...]
    """Of the task's reference."""
    text: str
    step: str = ""
    speedup: float = 0.0
    value: float = 0.0
    uses: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.stage, self.text


@dataclass
class TunerMemory:
    """Of one backend; without a path it is forgotten at the end."""

    backend: str
    path: Path | None = None
    items: dict[tuple[str, str], MemoryItem] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._load(self.path)

    def recalled(self, stage: str, ops: Sequence[str]) -> list[MemoryItem]:
        """The most promising for a task, the best first; each text once."""
        near = [(alike(one.ops, ops), one) for one in self.items.values() if one.stage == stage]
        ranked = [(share * max(one.value, 1e-6), one) for share, one in near if share >= LEAST_ALIKE]
        ranked.sort(key=lambda pair: (-pair[0], pair[1].text))
        return [one for _, one in ranked[:SHOWN]]

    def learned(self, shown: Iterable[MemoryItem], reward: float) -> None:
        """What came of a round that saw these."""
        for one in shown:
            known = self.items.get(one.key)
            if known is not None:
                self.items[one.key] = replace(known, value=known.value + RATE * (reward - known.value), uses=known.uses + 1)

    def keep(self, stage: str, ops: Sequence[str], text: str, speedup: float, step: str = "") -> None:
        """A kernel that is worth remembering; its first value is what it reached itself."""
        item = MemoryItem(stage=stage, ops=tuple(ops), text=text, step=step, speedup=speedup, value=min(speedup, 4.0))
        known = self.items.get(item.key)
        if known is None or known.speedup < speedup:
            self.items[item.key] = item if known is None else replace(item, value=max(known.value, item.value), uses=known.uses)
        if len(self.items) > MOST_ITEMS:
            worst = min(self.items.values(), key=lambda one: (one.value, one.text))
            del self.items[worst.key]

    def save(self) -> None:
        """With what another session has kept meanwhile; whole or not at all."""
        if self.path is None:
            return
        with _held(self.path.with_suffix(".lock")):
            for key, item in _items(self.path, self.backend).items():
                self.items.setdefault(key, item)
            head = {"foretell-memory": VERSION, "backend": self.backend}
            text = "\n".join(json.dumps(row) for row in (head, *(asdict(one) for one in self.items.values()))) + "\n"
            if not self.path.exists():
                with _held(self.path):
                    pass  # of the user's alone from the first byte
            write_atomically(self.path, text)

    def _load(self, path: Path) -> None:
        self.items = _items(path, self.backend)


def alike(left: Sequence[str], right: Sequence[str]) -> float:
    """Share of ops that two tasks have in common."""
    mine, theirs = set(left), set(right)
    return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """A file of the user's alone, made where there is none, for this process as long as it lasts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror or error}", _REMEDY) from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise FileFormatError(f"{path} is no file of yours alone", _REMEDY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _items(path: Path, backend: str) -> dict[tuple[str, str], MemoryItem]:
    """What is in a file; nothing where there is none, or an empty one."""
    if not path.exists() and not path.is_symlink():
        return {}
    with _held(path) as handle:
        size = os.fstat(handle).st_size
        if size > MOST_BYTES:
            raise FileFormatError(f"{path} is {size} bytes long, and no memory is", _REMEDY)
        content = os.pread(handle, size, 0)
    found: dict[tuple[str, str], MemoryItem] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json_of(line)
            if number == 1:
                if row["foretell-memory"] != VERSION or row["backend"] != backend:
                    raise ValueError("it is of another backend or version")
                continue
            item: MemoryItem = value_of(MemoryItem, row)
            if item.stage not in (DRAFT, REFINE) or not all(math.isfinite(one) for one in (item.speedup, item.value)):
                raise ValueError("no item")
            found[item.key] = item
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise FileFormatError(f"{path}, line {number}, is no row of a memory: {error}", _REMEDY) from None
    return found
