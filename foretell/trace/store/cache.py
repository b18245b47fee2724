"""Answers kept on disk: keyed by configuration and versions, checked against the content of every user file.

An entry is a line with a checksum over the rest and its own name, then JSON. One that is damaged, or does not hold what its
kind of answer has, is deleted and made anew. The checksum finds damage; it does not prove who wrote the entry.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from foretell import __version__
from foretell.decode import json_of, value_of
from foretell.errors import UserError
from foretell.files import one_line, write_atomically

VERSION = 1
Value = TypeVar("Value")
PACKAGES = ("torch", "transformers", "timm", "torchvision")


def folder() -> Path:
    """`FORETELL_CACHE`, or the user's cache folder."""
    given = os.environ.get("FORETELL_CACHE")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell"
    except RuntimeError:  # no home: nothing is kept
        return Path(os.devnull) / "foretell"


@functools.cache
def versions() -> dict[str, str]:
    """What an answer depends on besides the question; read without importing any of it."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "foretell": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _own_code() -> str:
    """Changes when any file of foretell itself does."""
    found, folders = [], [Path(__file__).resolve().parents[2]]
    for folder in folders:
        with os.scandir(folder) as inside:
            for one in inside:
                if one.is_dir():
                    folders.append(Path(one.path))
                elif one.name.endswith((".py", ".toml", ".json")):
                    status = one.stat()
                    found.append(f"{one.path[len(str(folders[0])):]}:{status.st_size}:{status.st_mtime_ns}\n")
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def key_of(question: Mapping[str, Any]) -> str:
    """One name for a question under these versions of everything."""
    whole = {"question": question, "versions": versions(), "code": _own_code()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:40]


def file_hashes(paths: Iterable[str]) -> dict[str, str]:
    return {path: _hash(path) for path in sorted(set(paths))}


def _hash(path: str) -> str:
    try:
        return hashlib.sha256(_content(Path(path))).hexdigest()
    except (OSError, ValueError):
        return "missing"


def read(kind: str, key: str, parse: Callable[[dict[str, Any]], Value]) -> Value | None:
    """What `parse` makes of a stored entry; None where there is none, or a file it depends on has changed.

    An entry that is damaged, or that `parse` refuses with an exception that data can cause, is deleted.
    """
    path = folder() / kind / f"{key}.json"
    try:
        content = _content(path, follow=False)
    except (OSError, ValueError):
        return None
    try:
        entry = _checked(content, kind, key)
        files = value_of(dict[str, str], entry["files"], "files")
        if any(_hash(name) != digest for name, digest in files.items()):
            return None
        return parse(entry)
    except (UserError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        warnings.warn(f"the cache entry {path} is damaged and made anew: {one_line(error)}", stacklevel=2)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def write(kind: str, key: str, entry: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Store an entry; a cache that cannot be written is no error."""
    content = json.dumps({**entry, "files": dict(files)}).encode()
    with contextlib.suppress(OSError, ValueError):
        write_atomically(folder() / kind / f"{key}.json", _seal(content, kind, key) + content)


def _seal(content: bytes, kind: str, key: str) -> bytes:
    """The first line: moved under another name, an entry is as wrong as a damaged one."""
    digest = hashlib.sha256(f"{kind}/{key}\n".encode() + content).hexdigest()
    return json.dumps({"foretell-cache": VERSION, "sha256": digest}).encode() + b"\n"


def _checked(content: bytes, kind: str, key: str) -> dict[str, Any]:
    seal, _, rest = content.partition(b"\n")
    if seal + b"\n" != _seal(rest, kind, key):
        raise ValueError("its checksum is not that of its content")
    entry: dict[str, Any] = json_of(rest)
    return entry


def _content(path: Path, *, follow: bool = True) -> bytes:
    """All of a regular file: a pipe or a device in its place is never waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        return stream.read()
