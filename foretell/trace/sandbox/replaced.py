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
        for owner, name, plain in reversed(before):
            delattr(owner, name) if plain is _NONE else setattr(owner, name, plain)
