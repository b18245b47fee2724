"""Gloo ranks for tests: `ranks(n).run(function, *args)` calls `function(rank, world, *args)` on n processes.

The processes are started once and shared by the tests of this folder; before tests of another one they end: even idle,
gloo's threads wake up a hundred times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foretell.runtime.process.pool import Pool, PoolWorld
from tests import forks

HERE = Path(__file__).parent
POOL = Pool(largest=16, preload=["numpy", *forks.MORE])


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], PoolWorld]:
    forks.share_ranks()
    return POOL.ranks


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or HERE not in nextitem.path.parents:
        POOL.close()
