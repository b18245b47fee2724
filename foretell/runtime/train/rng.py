"""Random numbers of a run: a function of seed, data rank and step, and of nothing that happened before.

So a resumed run draws what the other would have drawn, and a step that was skipped, an evaluation or a save leaves no trace.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Python's, numpy's and torch's CPU generators, and that of a GPU where one is given."""
    random.seed(seed & 0xFFFFFFFFFFFFFFFF)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def step_seed(seed: int, data_rank: int, step: int) -> int:
    """Of dropout and the like in the step after `step` updates: another for every rank that sees other samples, the same for
    those that share a sample."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{data_rank}/{step}".encode()).digest()[:7], "little")
