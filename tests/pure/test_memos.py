"""Caches of the process are found however old they are, and whatever was set aside since."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest

from foretell.trace.record.memos import _Caches


@pytest.mark.parametrize("age", [lambda: None, lambda: gc.collect(0), lambda: gc.collect(1), gc.collect], ids=["none", "young", "middle", "all"])
def test_a_cache_is_found_at_any_age(age: Callable[[], Any]) -> None:
    caches, made = _Caches(), []
    for _ in range(3):
        made.append(functools.lru_cache(lambda: None))
        age()
        caches.look()
        assert {*made} <= {*caches.known}
        gc.freeze()  # what was seen is set aside
