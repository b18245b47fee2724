"""Answers kept on disk: keyed by configuration and versions, checked against the content of every user file."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from foretell import __version__
from foretell.files import write_atomically

PACKAGES = ("torch", "transformers", "timm", "torchvision")


def folder() -> Path:
    """`FORETELL_CACHE`, or the user's cache folder."""
    given = os.environ.get("FORETELL_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "foretell"


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
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml", ".json"):
            status = path.stat()
            digest.update(f"{path.relative_to(root)}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def key_of(question: Mapping[str, Any]) -> str:
    """One name for a question under these versions of everything."""
    whole = {"question": question, "versions": versions(), "code": _own_code()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:40]


def file_hashes(paths: Iterable[str]) -> dict[str, str]:
    return {path: _hash(path) for path in sorted(set(paths))}


def _hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "missing"


def read(kind: str, key: str) -> dict[str, Any] | None:
    """A stored entry, unless a file it depends on has changed or it cannot be read."""
    try:
        entry = json.loads((folder() / kind / f"{key}.json").read_text())
        files = entry["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(_hash(path) != digest for path, digest in files.items()):
        return None
    return entry if isinstance(entry, dict) else None


def write(kind: str, key: str, entry: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Store an entry; a cache that cannot be written is no error."""
    target = folder() / kind / f"{key}.json"
    try:
        write_atomically(target, json.dumps({**entry, "files": dict(files)}))
    except OSError:
        return


