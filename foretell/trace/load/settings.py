"""Which settings of a model `--set` can change, by name: nothing of the user's is run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import foretell.zoo as zoo
from foretell.trace.load.model import Source, zoo_keywords

_OF_TRANSFORMERS = ("vocab_size",)
"""Of those, what every language model has."""


def settings_of(source: Source) -> Sequence[str]:
    """Names that the source's overrides may have; empty where they are not known without running something."""
    model = source.model
    if model.startswith("hf:"):
        return _OF_TRANSFORMERS
    path, _, function = model.rpartition(":")
    if path.endswith(".py"):
        return _parameters(Path(path), function)
    return zoo_keywords(zoo.get(model)) if model in zoo.names() else ()


def _parameters(path: Path, function: str) -> Sequence[str]:
    try:
        tree = ast.parse(path.read_text())
    except (OSError, ValueError, SyntaxError):
        return ()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
    return ()
