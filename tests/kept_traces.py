"""Traces that all tests of a session share, also those that want an empty cache otherwise: a trace is found by its question, by the
code of foretell and by the content of every file that it was made from, so whose test made it makes no difference."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "FORETELL_TEST_TRACES"
"""The cache of the session, in the environment."""
KINDS = ("traces", "shares")


def with_traces(cache: Path) -> Path:
    """An empty cache, but for the traces of the session."""
    if NAME in os.environ:
        cache.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            kept = Path(os.environ[NAME], kind)
            kept.mkdir(parents=True, exist_ok=True)
            (cache / kind).symlink_to(kept)
    return cache
