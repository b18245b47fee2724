"""The shipped kernels on a GPU: all 35 known cheats, those of streams, graphs and caches too."""

from __future__ import annotations

import pytest

from foretell.tune.verify import corpus
from foretell.tune.verify.process import KernelSetting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("group", [corpus.GOOD, *corpus.CHEATS, corpus.MISBEHAVING])
def test_each_is_treated_as_it_must_be(group: str) -> None:
    found = [(entry, verdict) for entry, verdict in corpus.tried(corpus.entries(group), KernelSetting(device="cuda"), seed=1)]
    assert [(entry.name, verdict.check, verdict.reason) for entry, verdict in found if not corpus.as_it_must(entry, verdict)] == []
