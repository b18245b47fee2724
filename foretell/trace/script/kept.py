"""Answers of scripts kept on disk, by command, folder and device; made anew where a file, a folder or a variable that counts has changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from foretell.trace.sandbox.process import TIME_LIMIT, Progress
from foretell.trace.script.child import follow_in_child
from foretell.trace.script.reads import same
from foretell.trace.store import cache as store
from foretell.trace.store.check import whole
from foretell.trace.store.file import loads
from foretell.trace.types import Trace

KIND = "scripts"
_PACKAGES = ("accelerate", "datasets", "diffusers", "lightning", "numpy", "peft", "pytorch-lightning", "tokenizers", "trl")
"""Whose releases count besides those that every answer depends on."""

Kept = tuple[Trace, dict[str, Any]]


def followed(asked: Mapping[str, Any], *, cache: bool = True, time_limit: float = TIME_LIMIT, progress: Progress = lambda _: None) -> Kept:
    """The trace of a script and the rest of the reply, stored or followed now."""
    key = _key(asked)
    found = store.read(KIND, key, _parsed) if cache else None
    if found is not None:
        return found
    text, reply = follow_in_child(asked, time_limit=time_limit, progress=progress)
    if cache and reply.get("stamps") is not None:
        store.write(KIND, key, {"trace": text, "reply": reply}, reply["files"])
    return loads(text), reply


def _key(asked: Mapping[str, Any]) -> str:
    return store.key_of({"script": asked, "folder": os.getcwd(), "packages": _versions()})


def _parsed(entry: Mapping[str, Any]) -> Kept | None:
    reply = entry["reply"]
    if not same(reply["stamps"], reply["variables"]):
        return None
    return whole(loads(entry["trace"])), reply


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
