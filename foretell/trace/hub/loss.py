"""The loss of a model that brings its own, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

NO_TRAINING = "give --loss FILE:FUNCTION of something inside that does, or another class of it in a config.json (architectures)"


def own_loss(output: Any, batch: Any) -> Tensor:
    """The loss the model returned; without one the mean of its first floating-point output that depends on a weight."""
    import torch
    from torch.utils import _pytree as pytree

    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    values = output.values() if isinstance(output, Mapping) else [output]
    leaves = [leaf for value in values for leaf in pytree.tree_leaves(value)]
    numbers = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    learnt = [x for x in numbers if x.requires_grad] if torch.is_grad_enabled() else numbers
    if not learnt:
        raise ModelError("no output of the model depends on a weight: there is no step of training to foretell", NO_TRAINING)
    return learnt[0].float().mean()
