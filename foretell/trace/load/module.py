"""Trace a module the user already has: a fake copy of it is traced, the module itself is left alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import ForetellError, ModelError, UserError
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.memos import forgetting
from foretell.trace.record.step import Loss, Workload
from foretell.trace.sandbox.blame import step_error
from foretell.trace.types import Trace


def capture_module(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    recipe: Recipe,
    *,
    capability: tuple[int, int] | None,
    hints: Mapping[str, float] | None,
) -> Trace:
    """Trace one step of this module on this batch. It may live on any device, meta included."""
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is a {type(model).__name__}", "give an nn.Module or the name of a model")
    if batch is None:
        raise UserError(
            "no batch is given for the module",
            "pass batch=: a tensor, a tuple of forward's arguments, or a dict of them by name",
        )
    try:
        with forgetting():
            return capture(lambda: _copied(model, batch, loss), recipe, capability=capability, hints=hints)
    except ForetellError:
        raise
    except Exception as error:
        raise step_error(type(model).__name__, error) from error


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return leaves[0].shape[0] if leaves and leaves[0].dim() else 1


def _copied(model: nn.Module, batch: Any, loss: Loss | None) -> Workload:
    """A copy with fake CPU tensors in the place of real ones; called under the fake tensor mode."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _fake_of(value)
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {error}", "name a file.py:function that builds it instead"
        ) from error
    fake_batch = torch.utils._pytree.tree_map(lambda leaf: _fake_of(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    return Workload(twin, fake_batch, loss)


def _fake_of(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
