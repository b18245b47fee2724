"""Attributes that are other ones for a while. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NONE = object()


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of objects, other ones until the end of the block; those that an object does not have are left out."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, ours in changes:
            if hasattr(owner, name):
                before.append((owner, name, vars(owner).get(name, _NONE)))
                setattr(owner, name, ours)
        yield
    finally:
        _put_back(before)


def _put_back(before: list[tuple[Any, str, Any]]) -> None:
    """All of them, even where Ctrl-C comes in between."""
    while before:
        owner, name, plain = before[-1]
        try:
            if plain is not _NONE:
                setattr(owner, name, plain)
            elif name in vars(owner):
                delattr(owner, name)
            before.pop()
        except KeyboardInterrupt:
            _put_back(before)
            raise
