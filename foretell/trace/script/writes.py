"""What a script writes before its first step goes to a folder of its own, and is read back from there; nothing else changes.

    open("out/log.txt", "w")      scratch/<whole path>/out/log.txt
    open("data/train.txt")        the script's own file, unless it has written one there
    os.remove, os.rename, ...     what was written; files that were there before stay, and look gone

Python's functions are replaced. What reaches the disk by another way (an extension) is refused by an audit hook.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foretell.trace.sandbox.replaced import replaced

_FREE = ("/dev/", "/proc/", "/sys/")
"""Not files."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Aside:
    """Paths as the script has them, and where they really are."""

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.abspath(scratch)
        self.written: list[str] = []
        self.gone: set[str] = set()
        self.off = False
        """While foretell itself removes what was written."""

    def twin(self, path: Any) -> str | None:
        """Where a path would be written; None for what is no file of the script's: handles, devices, the scratch folder."""
        if isinstance(path, int) or self.off:
            return None
        try:
            whole = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        if whole.startswith((*_FREE, self.scratch)):
            return None
        return self.scratch + whole

    def reading(self, path: Any) -> Any:
        """Where a path is read from."""
        twin = self.twin(path)
        if twin is None:
            return path
        return twin if _lexists(twin) or self.is_gone(os.path.abspath(os.fsdecode(path))) else path

    def is_gone(self, whole: str) -> bool:
        """Whether a path, or a folder that it lies in, was removed: it is not there, or there anew."""
        return any(whole == one or whole.startswith(f"{one}/") for one in self.gone)

    def writing(self, path: Any, keep: bool = False) -> Any:
        """Where a path is written to; what was there before is copied if it is to be changed."""
        twin = self.twin(path)
        if twin is None:
            return path
        whole = os.path.abspath(os.fsdecode(path))
        if whole not in self.written:
            self.written.append(whole)
        _makedirs(os.path.dirname(twin), exist_ok=True)
        if keep and not self.is_gone(whole) and not _lexists(twin) and os.path.isfile(whole):
            _copy(whole, twin)
        return twin

    def removed(self, path: Any) -> str | None:
        """A path looks gone; what to remove of what was written, if anything."""
        twin = self.twin(path)
        if twin is None:
            return os.fsdecode(path)
        self.gone.add(os.path.abspath(os.fsdecode(path)))
        return twin if _lexists(twin) else None


_lexists, _makedirs, _copy = os.path.lexists, os.makedirs, shutil.copyfile


@contextmanager
def kept_aside(aside: Aside) -> Iterator[None]:
    """Until the end of the block; what does not come this way is refused from now on, in this process."""
    changes = (*_opening(aside), *_reading(aside), *_changing(aside))
    _refuse_others(aside)
    with replaced(changes):
        yield


def _opening(aside: Aside) -> Iterator[tuple[Any, str, Any]]:
    plain, low = builtins.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            return plain(aside.writing(file, keep="w" not in mode), mode, *args, **kwargs)
        return plain(aside.reading(file), mode, *args, **kwargs)

    def low_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITES:
            return low(aside.writing(path, keep=not flags & os.O_TRUNC), flags, *args, **kwargs)
        return low(aside.reading(path), flags, *args, **kwargs)

    yield builtins, "open", opened
    yield io, "open", opened
    yield os, "open", low_opened


def _reading(aside: Aside) -> Iterator[tuple[Any, str, Any]]:
    def reads(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return plain(aside.reading(path), *args, **kwargs)

        return read

    for name in ("stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir"):
        yield os, name, reads(getattr(os, name))


def _changing(aside: Aside) -> Iterator[tuple[Any, str, Any]]:
    mkdir = os.mkdir

    def made(path: Any, *args: Any, **kwargs: Any) -> None:
        whole = os.path.abspath(os.fsdecode(path))
        if aside.twin(path) is not None and not aside.is_gone(whole) and os.path.isdir(whole) and not _lexists(str(aside.twin(path))):
            raise FileExistsError(17, "File exists", whole)
        mkdir(aside.writing(path), *args, **kwargs)

    def removes(plain: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("dir_fd") is not None and not aside.off:
                raise PermissionError(13, "a script that is followed removes nothing by a folder's handle", os.fsdecode(path))
            mine = aside.removed(path)
            if mine is not None:
                plain(mine, *args, **kwargs)

        return remove

    def moves(plain: Callable[..., Any]) -> Callable[..., Any]:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            mine = aside.writing(source, keep=True)
            plain(mine, aside.writing(target), *args, **kwargs)
            aside.removed(source)

        return move

    rmtree = shutil.rmtree

    def tree_removed(path: Any, *args: Any, **kwargs: Any) -> None:
        mine = aside.removed(path)
        aside.off = True
        try:
            if mine is not None:
                rmtree(mine, *args, **kwargs)
        finally:
            aside.off = False

    yield shutil, "rmtree", tree_removed
    yield os, "mkdir", made
    for name in ("remove", "unlink", "rmdir"):
        yield os, name, removes(getattr(os, name))
    for name in ("rename", "replace"):
        yield os, name, moves(getattr(os, name))
    for name in ("symlink", "link"):
        plain = getattr(os, name)
        yield os, name, lambda source, target, *args, plain=plain, **kwargs: plain(source, aside.writing(target), *args, **kwargs)
    for name in ("chmod", "utime", "truncate"):
        plain = getattr(os, name)
        yield os, name, lambda path, *args, plain=plain, **kwargs: plain(aside.writing(path, keep=True), *args, **kwargs)


def _refuse_others(aside: Aside) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
            return
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and aside.twin(args[0]) is not None:
            raise PermissionError(13, "a script that is followed writes nothing here", os.fsdecode(args[0]))

    sys.addaudithook(hook)
