"""What a script depends on besides its code: files and folders that it looked at, and variables of the environment that it asked for.

They are written down while it runs, as size and time of change, and compared before a stored answer is given again.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretell.trace.sandbox.replaced import replaced

MOST = 20_000
"""Files; a script that looks at more is followed each time."""
_OURS = {
    "TMPDIR", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "PYTHONUNBUFFERED", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE",
    "WANDB_MODE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "COLUMNS", "LINES", "TERM", "PWD", "OLDPWD", "SHLVL", "_",
}  # fmt: skip
"""Variables that foretell sets, or that say nothing of a step."""
_NO_FILES = ("/dev/", "/proc/", "/sys/")


class Reads:
    """What was asked for, by name."""

    def __init__(self, leave_out: Iterable[str]) -> None:
        package = str(Path(__file__).resolve().parents[2])
        roots = (sys.prefix, sys.base_prefix, package, *leave_out)
        self._out = (*_NO_FILES, *(f"{os.path.abspath(root)}/" for root in roots))
        self.paths: set[str] = set()
        self.variables: dict[str, str] = {}
        self._set: set[str] = set()
        self.on = True

    def path(self, path: Any) -> None:
        if not self.on or isinstance(path, int):
            return
        try:
            whole = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError):
            return
        if not whole.startswith(self._out) and "/site-packages/" not in whole and "__pycache__" not in whole:
            self.paths.add(whole)

    def stamps(self, written: Iterable[str]) -> dict[str, str] | None:
        """Path → what it is now, without what the script itself wrote; None for too many."""
        own = {os.path.abspath(one) for one in written}
        found = sorted(self.paths - own)
        return {path: stamp(path) for path in found} if len(found) <= MOST else None


def stamp(path: str) -> str:
    """Size and time of change of a file, time of change of a folder; whether there is one at all."""
    try:
        status = os.stat(path)
    except OSError:
        return "missing"
    return f"{status.st_size}:{status.st_mtime_ns}"


def same(stamps: Mapping[str, str], variables: Mapping[str, str]) -> bool:
    """Whether nothing that was looked at has changed."""
    asked = {name: _digest(os.environ.get(name)) for name in variables}
    return asked == variables and all(stamp(path) == known for path, known in stamps.items())


def _digest(value: str | None) -> str:
    """Values may be secret."""
    return "" if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()[:16]


@contextmanager
def written_down(reads: Reads) -> Iterator[None]:
    """Until the end of the block."""
    kind = type(os.environ)
    get, put, has, stat = kind.__getitem__, kind.__setitem__, kind.__contains__, os.stat

    def note(name: Any) -> None:
        if reads.on and isinstance(name, str) and name not in _OURS and name not in reads._set:
            value = os.environ._data.get(os.environ.encodekey(name))  # type: ignore[attr-defined]
            reads.variables.setdefault(name, _digest(os.environ.decodevalue(value) if value is not None else None))  # type: ignore[attr-defined]

    def getitem(self: Any, name: Any) -> Any:
        note(name)
        return get(self, name)

    def contains(self: Any, name: Any) -> bool:
        note(name)
        return has(self, name)

    def setitem(self: Any, name: Any, value: Any) -> None:
        reads._set.add(name)
        put(self, name, value)

    def status(path: Any, *args: Any, **kwargs: Any) -> Any:
        reads.path(path)
        return stat(path, *args, **kwargs)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not reads.on or event not in ("open", "os.listdir", "os.scandir"):
            return
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):  # modules are looked at by their content
            reads.path(args[0])

    sys.addaudithook(hook)
    changes = [(kind, "__getitem__", getitem), (kind, "__setitem__", setitem), (kind, "__contains__", contains), (os, "stat", status)]
    with replaced(changes):
        try:
            yield
        finally:
            reads.on = False
