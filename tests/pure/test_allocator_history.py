"""The simulated caching allocator against allocation histories recorded on a real H200."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from foretell.simulate.memory.allocator import CachingAllocator

HISTORIES = sorted((Path(__file__).parents[1] / "data" / "histories").glob("*.json.gz"))


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name[:-8])
def test_replayed_history_reserves_what_the_device_reserved(path: Path) -> None:
    golden = json.loads(gzip.decompress(path.read_bytes()))
    allocator = CachingAllocator()
    handles: list[int] = []
    for event in golden["events"]:
        if event >= 0:
            handles.append(allocator.malloc(event))
        else:
            allocator.free(handles[-1 - event])
            handles.append(0)
    assert allocator.reserved == golden["reserved"]
    assert allocator.peak_allocated == pytest.approx(golden["peak_allocated"], rel=0.001)
