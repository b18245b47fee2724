"""The zoo: plain single-device PyTorch models that foretell knows by name.

This module only lists them and imports no torch; `load` imports the module behind an entry.  Each such module has
`build(**config)`, `batch(model, micro_batch, seq, image)` and `loss(output, batch)`, and is in the folder of its kind:
`language`, `vision`, `perception`, `multimodal`, `generative`, `scenes`, `science`, `graphs`, or `methods` for ways of training.
`listing` has the entries, `places` finds the file of a module, `catalogue`, `tags` and `rubric` say what is known of one.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from foretell.zoo.entry import Entry
from foretell.zoo.listing import every
from foretell.zoo.places import import_path

__all__ = ["ENTRIES", "Entry", "get", "load", "names"]

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in every()}


def names() -> tuple[str, ...]:
    """Names of all entries, family by family."""
    return tuple(ENTRIES)


def get(name: str) -> Entry:
    """The entry of that name; KeyError if there is none."""
    return ENTRIES[name]


def load(entry: Entry) -> ModuleType:
    """The module of the entry, imported now."""
    return importlib.import_module(import_path(entry.module))
