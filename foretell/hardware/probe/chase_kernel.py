"""The pointer chase on a GPU, in Triton: one warp, each load waits for the one before. Imported only where Triton is."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["hops"])
def _chase(table, place, hops):
    at = tl.load(place)
    for _hop in range(hops):
        at = tl.load(table + at)
    tl.store(place, at)


def chase(table: torch.Tensor, place: torch.Tensor, hops: int) -> None:
    """Follow `hops` entries of `table` from where `place` says, and leave there where that led."""
    _chase[(1,)](table, place, hops, num_warps=1, num_stages=1)
