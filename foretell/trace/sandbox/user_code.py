"""Whose code is about to run. Everything that imports a Python file that a model, a loss or data names asks here first.

    reading commands (show, report, compare, ...) ── refused() ──►  CodeNeeded: which file, and that it was not run
    all others                                    ── tell ──────►  "runs code of /abs/path/mine.py", once for each file

What foretell and installed packages build by name (the zoo, hf:, timm:, torchvision:) is nobody's file.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from foretell.errors import UserError

_refused: ContextVar[bool] = ContextVar("user code is refused", default=False)
_tell: ContextVar[Callable[[str], None] | None] = ContextVar("told of user code", default=None)
_apart: ContextVar[tuple[Path, Path] | None] = ContextVar("one tree of two", default=None)
_told: set[str] = set()


class CodeNeeded(UserError):
    """Something can only be known by running a file of the user's, and nobody asked for that."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = tuple(files)
        super().__init__(f"this would run code of {', '.join(self.files)}, and reading runs no code")


@contextmanager
def refused() -> Iterator[None]:
    """For commands that read: code of the user's is not run."""
    token = _refused.set(True)
    try:
        yield
    finally:
        _refused.reset(token)


@contextmanager
def allowed() -> Iterator[None]:
    """Inside `refused`, for what was asked for in so many words."""
    token = _refused.set(False)
    try:
        yield
    finally:
        _refused.reset(token)


@contextmanager
def apart(copy: Path, tree: Path) -> Iterator[None]:
    """For code of a copy of a tree: what it imports must not be a file of the tree itself."""
    token = _apart.set((copy.resolve(), tree.resolve()))
    try:
        yield
    finally:
        _apart.reset(token)


def after(files: Iterable[str]) -> None:
    """Check the files that were imported, once the code ran."""
    pair = _apart.get()
    if pair is None:
        return
    copy, tree = pair
    own = Path(__file__).resolve().parents[2]
    for path in map(Path, files):
        if path.is_relative_to(tree) and not path.is_relative_to(copy) and not path.is_relative_to(own):
            raise UserError(
                f"code of another revision was imported from the working tree: {path.relative_to(tree)}",
                "leave out what puts the working tree on the import path (an installed link to it, PYTHONPATH, sys.path)",
            )


def tell_with(tell: Callable[[str], None]) -> None:
    """Who says whose code runs; nobody does for those who call the API."""
    _tell.set(tell)
    _told.clear()


def files_of(source: Mapping[str, Any]) -> tuple[str, ...]:
    """Python files that a source names, by their whole path: `model` and `loss`."""
    named = [source.get("model"), source.get("loss")]
    scripts = [str(Path(word).resolve()) for text in named if isinstance(text, str) and text.startswith("script:") for word in _scripts(text)]
    if scripts:
        return tuple(scripts)
    found = [text.rpartition(":")[0] if not text.endswith(".py") else text for text in named if isinstance(text, str) and _is_file(text)]
    return tuple(dict.fromkeys(str(Path(path).resolve()) for path in found))


def _scripts(text: str) -> list[str]:
    """The file of a command: its first word that is one."""
    return [word for word in shlex.split(text.partition(":")[2]) if word.endswith(".py")][:1]


def _is_file(text: str) -> bool:
    return text.endswith(".py") or ".py:" in text


def before(files: Iterable[str]) -> None:
    """Ask before code of these files runs."""
    files = tuple(files)
    if not files:
        return
    if _refused.get():
        raise CodeNeeded(files)
    tell = _tell.get()
    for file in files:
        if tell is not None and file not in _told:
            _told.add(file)
            tell(file)
