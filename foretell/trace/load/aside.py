"""A model built aside, where tensors that stand for numbers are real and weights have no memory, made fake afterwards."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from foretell.trace.record.step import Workload
from foretell.trace.record.values import attach, is_small

SMALL, SMALL_IN_ALL = 2**20, 2**26
"""Numbers in a tensor that a constructor may read, and in all of them together."""


def weights_on_meta(real_up_to: int) -> AbstractContextManager[Any]:
    """Factories put tensors on the meta device, except those that make numbers to be read.

    Tensors of up to `real_up_to` numbers that are not drawn are real too, as far as there are not too many: a mask may be
    made of them (`pairs[torch.ones(n, n).triu().bool()]`), and how many it lets through is read.
    """
    known = {torch.zeros, torch.ones, torch.full, torch.eye}
    weights = {torch.empty, torch.rand, torch.randn, torch.randint, *known}

    class WeightsOnMeta(TorchFunctionMode):
        left = SMALL_IN_ALL

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func not in weights or kwargs.get("device") is not None:
                return func(*args, **kwargs)
            made = func(*args, **{**kwargs, "device": "meta"})
            if func not in known or not 0 < made.numel() <= min(real_up_to, self.left):
                return made
            self.left -= made.numel()
            return func(*args, **kwargs)

    return WeightsOnMeta()


def as_ambient(workload: Workload) -> Workload:
    """The same workload with every tensor made anew in the ambient mode; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}

    def renew(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            new = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            if value.device.type == "cpu" and value.layout is torch.strided and is_small(value):
                with no_dispatch():
                    attach(new, value.detach().clone())
            parameter = isinstance(value, torch.nn.Parameter)
            made[id(value)] = torch.nn.Parameter(new, value.requires_grad) if parameter else new
        return made[id(value)]

    for module in workload.model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            tensors.update({key: renew(value) for key, value in tensors.items() if isinstance(value, torch.Tensor)})
    return replace(workload, batch=pytree.tree_map(renew, workload.batch))


def opened(batch: Any) -> None:
    """Let PyTorch's trees see the tensors in objects of a batch: dataclasses, dicts of the user's own kind."""

    def parts(value: Any) -> tuple[list[Any], Any]:
        return list(vars(value).values()), (value, tuple(vars(value)))

    def whole(found: Any, context: Any) -> Any:
        made = copy.copy(context[0])
        made.__dict__.update(zip(context[1], found, strict=True))
        return made

    while True:
        kinds = {
            type(leaf) for leaf in pytree.tree_leaves(batch)
            if not isinstance(leaf, (torch.Tensor, torch.nn.Module, type)) and hasattr(leaf, "__dict__") and not callable(leaf)
            and any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(list(vars(leaf).values())))
        }  # fmt: skip
        if not kinds:
            return
        for kind in kinds:
            pytree.register_pytree_node(kind, parts, whole)
