"""Copies and casts of whole modules on fake tensors, which PyTorch makes in ways that fake tensors do not stand.

`copy.deepcopy` of a fake tensor would copy the mode it belongs to and set a storage from outside; `Module.to(dtype)`
would swap two tensors that somebody still holds. While `plain_copies` is open, a copy is a clone that keeps what it shares,
and a cast puts new tensors where the old ones were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin

_OWN = {"fake_mode", "fake_device", "constant", "real_tensor", "pytype", "dispatch_keys", "item_memo", "_is_param"}
"""Attributes of a fake tensor that are not the user's."""


@contextmanager
def plain_copies() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, ours in (
            (FakeTensor, "__deepcopy__", _deepcopy),
            (nn.Module, "_apply", _applying()),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours, create=True))
        yield


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    with torch.no_grad():
        made = _with_storage_of(tensor, memo) if tensor.layout is torch.strided else tensor.clone()
    if getattr(tensor, "_is_param", False):
        made = nn.Parameter(made, tensor.requires_grad)
    else:
        made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    for name, value in vars(tensor).items():
        if name not in _OWN and not name.startswith("_nonzero") and not name.startswith("_item"):
            with_it = copy.deepcopy(value, memo)
            vars(made)[name] = with_it
    if tensor.grad is not None:
        made.grad = copy.deepcopy(tensor.grad, memo)
    return made


def _with_storage_of(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A view into a copy of the whole storage; tensors that shared it share the copy."""
    key = tensor.untyped_storage()._cdata
    whole = memo.get(key)
    if whole is None:
        size = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.itemsize == size:
            whole = tensor.detach().clone(memory_format=torch.preserve_format)
        else:
            elements = size // tensor.itemsize
            whole = tensor.detach().as_strided((elements,), (1,), 0).clone()
        memo[key] = whole
    if whole.shape == tensor.shape and whole.stride() == tensor.stride() and whole.dtype == tensor.dtype:
        return whole.detach()
    flat = whole.as_strided((whole.untyped_storage().nbytes() // whole.itemsize,), (1,), 0).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _applying() -> Callable[..., nn.Module]:
    """`Module._apply`, by replacing tensors: what several modules share, they share afterwards."""
    done: dict[int, tuple[Any, Any]] = {}
    depth = 0

    def changed(tensor: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if id(tensor) not in done:
            with torch.no_grad():
                made = change(tensor)
            if made is not tensor and getattr(tensor, "_is_param", False) and not getattr(made, "_is_param", False):
                made = nn.Parameter(made, tensor.requires_grad)
            if made is not tensor and tensor.grad is not None:
                with torch.no_grad():
                    made.grad = change(tensor.grad).requires_grad_(tensor.grad.requires_grad)
            done[id(tensor)] = (tensor, made)
        return done[id(tensor)][1]

    plain = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(isinstance(tensor, UninitializedTensorMixin) for tensor in own) or any(
            tensor is not None and not isinstance(tensor, FakeTensor) for tensor in own
        ):
            return plain(module, fn, recurse)
        depth += 1
        try:
            if recurse:
                for child in module.children():
                    child._apply(fn)
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = changed(tensor, fn)
        finally:
            depth -= 1
            if not depth:
                done.clear()
        return module

    return apply
