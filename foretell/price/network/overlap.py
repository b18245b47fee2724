"""How much longer ops take beside a collective. Pure.

A collective of NCCL holds cores for as long as it runs and moves bytes all the while. A product that fills the device in whole
waves of tiles then needs a wave more; fused attention has small blocks and loses the cores alone; what is bound by memory loses
bandwidth. Measured on an H200 with kernels that hold 16 of its 132 cores and copy (benchmarks/beside_messages.py): 27 products follow
the law to 5 % in the mean, from 1.2 times as long (20 waves) to 1.9 times (one wave).
"""

from __future__ import annotations

from math import ceil

CHANNELS = 16
"""Thread blocks, each with a core for itself, that NCCL runs a large collective on. Assumed: 16 to 24 on H100 and H200."""
FURTHER_WAVE = 0.7
"""Part of a wave that a product takes longer besides."""
LOST = {"gemm": 0.2, "attention": 0.12, "convolution": 0.58}
"""Family → how much longer beside a collective, with 16 of 132 cores. Assumed of other devices: NCCL takes an eighth of theirs too."""
LOST_OTHERS = 0.23


def slower(family: str, waves: float) -> float:
    """How much longer an op takes while a collective runs beside it: 0.2 is a fifth. `waves`: of a product's tiles."""
    further = FURTHER_WAVE / max(1, ceil(waves)) if family == "gemm" else 0.0
    return LOST.get(family, LOST_OTHERS) + further
