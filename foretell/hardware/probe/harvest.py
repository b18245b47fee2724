"""Time every op that a piece of PyTorch code runs, forward and backward, on the real device.

The code runs once under a dispatch mode; each op it asks for is run again and again with the very same
arguments. A row is therefore what a trace would say of the op (name, tensors, attributes) with seconds beside it.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.hardware.probe.clock import Clock, Timing
from foretell.hardware.profile import OpRow
from foretell.trace.record.attributes import attributes
from foretell.trace.types import TensorSpec

_FREE = frozenset(
    f"aten::{name}" for name in (
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
        "split", "split_with_sizes", "detach", "alias", "as_strided", "unbind", "_reshape_alias", "empty",
        "empty_like", "empty_strided", "new_empty", "new_empty_strided", "unfold", "diagonal",
        "view_as_real", "view_as_complex", "real", "imag", "lift_fresh", "resize_", "is_same_size", "set_", "transpose_",
        "t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_",
    )
)  # fmt: skip
"""Ops that launch nothing."""


RESTLESS = 0.3
"""Spread above which a timing is taken again."""


class Harvest(TorchDispatchMode):
    """While it is on, every op is timed once per signature; rows gather in `rows`."""

    def __init__(self, clock: Clock, keep: Callable[[str], bool] = lambda name: True, tag: str = "") -> None:
        super().__init__()
        self.clock, self.keep, self.tag = clock, keep, tag
        self.rows: dict[tuple[Any, ...], OpRow] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if func._schema.name in _FREE or not self.keep(name):
            return func(*args, **kwargs)
        inputs = specs((args, kwargs))
        attrs = attributes(func, args)
        if self.tag:
            attrs = (*attrs, self.tag)
        output = func(*args, **kwargs)
        key = (name, inputs, specs(output), attrs)
        if key not in self.rows:
            result = _written(func, args)
            timing = self._timing(lambda: func(*args, **kwargs))
            self.rows[key] = OpRow(name, inputs, key[2], attrs, *timing)
            if result is not None:
                args[0].copy_(result)
        return output

    def _timing(self, call: Callable[[], Any]) -> Timing:
        """Once more where the bursts disagree; the calmer of the two counts."""
        timing = self.clock.measure(call)
        return (
            timing if timing.spread <= RESTLESS else min(timing, self.clock.measure(call), key=lambda one: one.spread)
        )


def _written(func: Any, args: Any) -> torch.Tensor | None:
    """What an op wrote in place, to be put back after it has been run again and again."""
    if func._schema.name.endswith("_") and args and isinstance(args[0], torch.Tensor):
        return args[0].clone() if args[0].numel() < 1 << 26 else None
    return None


def specs(values: Any) -> tuple[TensorSpec, ...]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return tuple(
        TensorSpec(tuple(leaf.shape), str(leaf.dtype)[6:]) for leaf in leaves if isinstance(leaf, torch.Tensor)
    )
