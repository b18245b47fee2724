"""Gloo ranks for tests: `ranks(n).run(function, *args)` calls `function(rank, world, *args)` on n processes.

The processes are started once per test session and shared by all tests of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from foretell.runtime.pool import Pool, World


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], World]]:
    pool = Pool(largest=16, preload=["pytest", "numpy", "transformers.models.qwen2.modeling_qwen2"])
    yield pool.ranks
    pool.close()
