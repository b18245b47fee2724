"""A step that is traced on fake tensors, not run: no numbers are drawn, nothing is agreed upon, and kernels are CUDA's.

What runs asks here; `search.split_trace` opens a rehearsal. A module's value and no context variable, so that torch.compile
can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor | None]


@dataclass(frozen=True)
class Rehearsal:
    """What is different from a run."""

    lower_right: Attention | None = None
    """Causal attention of the last rows without a mask, as CUDA would compute it; None: as this device does."""


now: Rehearsal | None = None


@contextmanager
def rehearsing(how: Rehearsal) -> Iterator[None]:
    global now
    before, now = now, how
    try:
        yield
    finally:
        now = before
