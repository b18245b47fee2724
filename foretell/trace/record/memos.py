"""What code keeps of a trace for its next call: `lru_cache`s that hold tensors without numbers are emptied after it.

    @lru_cache                      a trace calls it first: what it keeps is a fake tensor, and a real step would get that
    def angles(length): ...
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

_DEPTH = 3
"""How far inside what a function returned a tensor is looked for: a tuple in a dict, say."""


@contextmanager
def forgetting() -> Iterator[None]:
    """In a process that runs models for real, too: a trace leaves nothing to them."""
    try:
        yield
    finally:
        _caches.look()
        for one in list(_caches.known):
            if _holds_fakes(one):
                one.cache_clear()


class _Caches:
    """All `lru_cache`s of this process. Old objects are many: they are looked through again only where some grew old since."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen: tuple[int, ...] = ()

    def look(self) -> None:
        now = tuple(each["collections"] for each in gc.get_stats()[1:])  # what `gc.freeze` takes away is in neither list
        if now == self._seen and sys.version_info < (3, 14):  # later ones move objects between generations as they go
            objects = [*gc.get_objects(generation=0), *gc.get_objects(generation=1)]
        else:
            objects = gc.get_objects()
        self._seen = now
        self.known.update([one for one in objects if type(one) is functools._lru_cache_wrapper])  # asking proxies for their class may warn


_caches = _Caches()


def _holds_fakes(cache: Any) -> bool:
    """Whether a tensor of a trace is among what it keeps: what the function itself refers to is not looked at."""
    if not cache.cache_info().currsize:
        return False
    own = {id(cache.__wrapped__), id(cache.__dict__)}
    level = [one for one in gc.get_referents(cache) if id(one) not in own]
    for _ in range(_DEPTH):
        if any(isinstance(one, FakeTensor) for one in level):
            return True
        level = gc.get_referents(*(one for one in level if isinstance(one, (dict, list, tuple)) or type(one).__name__ == "_lru_list_elem"))
    return any(isinstance(one, FakeTensor) for one in level)
