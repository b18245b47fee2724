"""What a step on a CPU does otherwise than a trace on fake tensors would see."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from foretell.trace.record.recorder import Recorder


@contextmanager
def cpu_choices(recorder: Recorder) -> Iterator[None]:
    """Make a CPU's choices until the end of the block."""
    size = torch.get_rng_state().numel()

    def max_pool1d(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Without the positions of the largest, where no gradient will ask for them."""
        if given.requires_grad and torch.is_grad_enabled():
            return torch.ops.aten.max_pool1d_with_indices(given, *args, **kwargs)[0]  # type: ignore[no-any-return]
        made: Tensor = recorder.emit(
            "aten.max_pool1d.default", given, lambda: torch.ops.aten.max_pool1d_with_indices(given, *args, **kwargs)[0]
        )
        return made

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("max_pool1d", max_pool1d, "CompositeImplicitAutograd", allow_override=True)
    try:
        with (  # the state of the random numbers that recomputation keeps is memory like any other
            mock.patch.object(torch, "get_rng_state", lambda: torch.empty(size, dtype=torch.uint8)),
            mock.patch.object(torch, "set_rng_state", lambda _: None),
        ):
            yield
    finally:
        library._destroy()
