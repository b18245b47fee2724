"""Which block computes its activations again in backward, as a plan says it per block."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from foretell.plan.types import Residency, computed
from foretell.trace.fold.recompute import recompute_block

HOW = {"recompute": "full", "selective": "selective"}
"""What a residency computes → what `trace.record.step.recompute_block` calls it."""


def recompute(model: nn.Module, blocks: Mapping[str, Residency]) -> None:
    """Wrap those of these blocks that do not keep their activations."""
    for path, residency in blocks.items():
        if computed(residency.mode) in HOW:
            recompute_block(model.get_submodule(path), HOW[computed(residency.mode)])
