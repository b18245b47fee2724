"""Files written whole or not at all, and JSON read with one kind of error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UserError

PARTIAL = ".partial-"
"""What a file that is still being written begins with."""


def write_atomically(target: str | Path, content: str | bytes, *, parents: bool = True) -> None:
    """All of it on the disk or nothing, also when interrupted, when power fails or when the disk is full.

    A file that is there keeps its mode, a new one gets the usual one; a link or a pipe is replaced, a device and a link in
    /dev (/dev/stdout) are not. `parents`: make the folder where there is none.
    """
    target, data = Path(target), content.encode() if isinstance(content, str) else content
    if _is_device(target):  # a file in its place would break every program that uses it
        raise OSError(errno.EINVAL, "it is a device, not a file")
    if parents:
        target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{PARTIAL}{os.getpid()}-{os.urandom(6).hex()}")
    try:
        with open(aside, "xb") as stream:
            with contextlib.suppress(OSError):
                found = os.lstat(target).st_mode
                if stat.S_ISREG(found):
                    os.fchmod(stream.fileno(), stat.S_IMODE(found))
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _is_device(target: Path) -> bool:
    if target.is_symlink():
        return os.path.realpath(target.parent) == "/dev"
    return target.is_char_device() or target.is_block_device()


def _sync_folder(folder: Path) -> None:
    """Make the new name last; some file systems cannot, and the file is there all the same."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_json(path: Path, remedy: str) -> Any:
    """The value in a JSON file; whatever is wrong with it is one `FileFormatError`, but a missing file is left to the caller."""
    try:
        if path.exists() and not path.is_file():
            raise FileFormatError(f"{path} is no regular file", remedy)
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} cannot be read: {one_line(error)}", remedy) from None


def one_line(error: BaseException) -> str:
    """What an exception says, on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
