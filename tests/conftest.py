"""What every test may use: the `gpu` and `slow` markers and a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = (
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-interleaved-1f1b]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-zero-bubble",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh1-more1-zero-bubble]",
    "test_parameters_given_back_between_the_micro_batches_of_a_pipeline[interleaved-1f1b]",
    "test_a_full_disk_keeps_what_was_whole_and_says_so",
    "test_ctrl_c_reaches_the_run_and_it_saves",
    "test_a_split_model_computes_what_one_process_computes[hf gpt2]",
    "test_a_split_model_computes_what_one_process_computes[hf mixtral]",
    "test_a_dry_run_does_what_a_real_one_does[llama, interleaved-1f1b, 4 stages on 2]",
    "test_shared_positions_cost_what_a_trace_of_them_does[gpt2",
)
"""Long cases whose like the quick suite has: another mesh, model or command. `make test-slow` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long cases; skip tests marked `gpu` where there is no CUDA device; torch is imported only if there are any."""
    for item in items:
        if item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
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
