"""What is set aside for the time of a run, beside what somebody else has set aside."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from foretell.runtime.observe import measure


@pytest.fixture(autouse=True)
def _as_conftest_has_it() -> Iterator[None]:
    yield
    gc.freeze()


def test_what_is_alive_is_set_aside_and_taken_back() -> None:
    gc.unfreeze()
    mine: list[object] = [[]]
    assert measure.set_aside() and gc.get_freeze_count() > 0
    assert not any(one is mine for one in gc.get_objects())
    gc.unfreeze()
    assert any(one is mine for one in gc.get_objects())


def test_what_others_have_set_aside_stays_theirs() -> None:
    gc.freeze()
    before, mine = gc.get_freeze_count(), [[]]
    assert not measure.set_aside()
    assert gc.get_freeze_count() <= before and any(one is mine for one in gc.get_objects())
