"""The loss in what a model returns, where its file has no function for it: no class of output has to be imported.

    an object, a dict     its `loss`
    a tensor              itself, if it is a scalar
    a tuple, a dict, ...  the only scalar in it that gradients reach: (logits, loss)
    a dict of losses      their sum, as detection models return them
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class FoundLoss(NamedTuple):
    """A loss, and how it is read off the output in code: `{}[1]`."""

    loss: Any
    read: str


_reads: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Where the loss was in what a model returned with gradients."""


def loss_in(model: nn.Module, output: Any) -> Any:
    """The loss in a model's output; None where it has none, or where several could be it."""
    found = loss_of(output, _reads.get(model, ""))
    if found is not None and torch.is_grad_enabled():
        _reads[model] = found.read
    return found.loss if found is not None else None


def loss_of(output: Any, before: str = "") -> FoundLoss | None:
    """None where an output has none, or where several could be it.

    Without gradients (an evaluation) several may look alike: then it is where it was `before`, in a step of training."""
    if isinstance(output, Tensor):
        return FoundLoss(output, "{}") if output.dim() == 0 else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if named is not None:
        return FoundLoss(named, "{}.loss" if hasattr(output, "loss") else "{}['loss']")
    entries = _entries(output)
    scalars = {read: one for read, one in entries.items() if isinstance(one, Tensor) and one.dim() == 0 and one.is_floating_point()}
    trained = any(one.requires_grad for one in scalars.values())
    reached = {read: one for read, one in scalars.items() if one.requires_grad or not trained}
    if len(reached) > 1 and isinstance(output, Mapping) and len(reached) == len(entries):
        return FoundLoss(sum(reached.values()), "sum({}.values())")
    if len(reached) > 1 and not torch.is_grad_enabled():
        reached = {before: reached[before]} if before in reached else dict(list(reached.items())[:1])
    return FoundLoss(*next((loss, read) for read, loss in reached.items())) if len(reached) == 1 else None


def entries_told(output: Any) -> str:
    """` with [0] of shape (4, 8), [1] of shape ()`: what of an output could have been meant."""
    told = [f"{read.removeprefix('{}')} of shape {tuple(one.shape)}" for read, one in _entries(output).items() if isinstance(one, Tensor)]
    return f" with {', '.join(told[:6])}{', ...' if len(told) > 6 else ''}" if told else ""


def _entries(output: Any) -> dict[str, Any]:
    """What an output is made of → as the code reads it."""
    if isinstance(output, Mapping):
        return {f"{{}}[{name!r}]": value for name, value in output.items()}
    if isinstance(output, tuple | list):
        return {f"{{}}[{place}]": value for place, value in enumerate(output)}
    if dataclasses.is_dataclass(output):
        return {f"{{}}.{one.name}": getattr(output, one.name) for one in dataclasses.fields(output)}
    return {}
