"""What every test may use: the `gpu` marker and a cache of its own. Nothing here happens by itself to a test."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; torch is imported only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that belongs to this test alone, named by FORETELL_CACHE."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv("FORETELL_CACHE", str(path))
    return path
