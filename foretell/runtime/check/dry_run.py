"""Whether a step is traced on fake tensors and not run: then no seed is drawn, ranks agree on nothing, and attention takes
the kernel that CUDA would.

`search.traces.split` opens a dry run; what runs on ranks asks here. A module's value and no context variable, so that
torch.compile can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor | None]


@dataclass(frozen=True)
class DryRun:
    """What a dry run does in another way than a run."""

    lower_right: Attention | None = None
    """Causal attention of the last rows without a mask, as CUDA would compute it; None: as this device does."""


active: DryRun | None = None


@contextmanager
def dry_running(how: DryRun) -> Iterator[None]:
    global active
    before, active = active, how
    try:
        yield
    finally:
        active = before
