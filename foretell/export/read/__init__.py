"""Configurations of other tools, read as options of fit and plan: one reader for each tool.

Every setting of a file is taken, ignored with the reason, named as one that foretell cannot say, or named as unknown (`reading`). What the
readers know of their tools are tables, which docs/export.md shows. Ranks and batches are put together in `layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UserError
from foretell.export.read import accelerate, deepspeed, lightning, torchtitan, trainer
from foretell.export.read.load import REMEDY, load
from foretell.export.read.reading import Tables, ToolConfig
from foretell.plan.text import plain

READERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], ToolConfig]]] = {
    "torchtitan": (torchtitan.suits, torchtitan.read),
    "accelerate": (accelerate.suits, accelerate.read),
    "trainer": (trainer.suits, trainer.read),
    "deepspeed": (deepspeed.suits, deepspeed.read),
    "lightning": (lightning.suits, lightning.read),
}
"""Tool → whether settings are its own, and what they say; asked in this order."""

TABLES: Mapping[str, Tables] = {
    "torchtitan": torchtitan.TABLES, "accelerate": accelerate.TABLES, "deepspeed": deepspeed.TABLES, "trainer": trainer.TABLES,
    "lightning": lightning.TABLES,
}  # fmt: skip
"""Tool → what its reader knows."""


def read(path: Path) -> ToolConfig:
    """What a file of torchtitan, accelerate, DeepSpeed, transformers' Trainer or Lightning says."""
    data = load(path)
    try:
        for suits, reader in READERS.values():
            if suits(data):
                return reader(data)
    except UserError as error:
        raise FileFormatError(f"{path}: {plain(error.problem)}", error.remedy) from None
    known = ", ".join(f"{key!r:.40}" for key in list(data)[:4])
    raise FileFormatError(f"{path} is a file of no tool that is known here: it has {known or 'nothing'}", REMEDY)
