"""Every model that the zoo knows, a file for each kind; no torch is imported. A file has `ENTRIES`."""

from __future__ import annotations

import importlib
import pkgutil

from foretell.zoo.entry import Entry

FIRST = "classics"


def every() -> tuple[Entry, ...]:
    """All entries, the well-known ones first, then file by file."""
    files = sorted((one.name for one in pkgutil.iter_modules(__path__)), key=lambda name: (name != FIRST, name))
    return tuple(entry for name in files for entry in importlib.import_module(f"{__name__}.{name}").ENTRIES)
