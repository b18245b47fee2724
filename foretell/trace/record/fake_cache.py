"""Fake tensors look up every op in a cache; what they look it up by is made here, in half the time.

The key has all that torch's own has: what it leaves out (memory format, layout, the figures of sparse tensors) follows from
sizes and strides, or is the same for every tensor that is written down here. Anything else is left to torch.
"""

from __future__ import annotations

import inspect
from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_KNOWN = ["self", "result", "args", "state", "id_hashed_objects"]
_PLAIN = frozenset((int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Arguments that are keys themselves, with their type: 1 and 1.0 are equal and give other tensors."""


class QuickKeys(FakeTensorMode):
    """A fake tensor mode whose keys are made quickly, where torch makes them as it did when this was written."""

    if list(inspect.signature(FakeTensorMode._prep_args_for_hash).parameters) == _KNOWN:

        def _prep_args_for_hash(self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]) -> None:
            kind = type(args)
            if kind not in (tuple, list, dict):
                return super()._prep_args_for_hash(result, args, state, id_hashed_objects)
            result += (kind, len(args), *(args if kind is dict else ()))
            for arg in args.values() if kind is dict else args:
                kind = type(arg)
                if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and _ordinary(arg):
                    result.append(_described(arg))
                elif kind in _PLAIN:
                    result += (kind, arg)
                elif kind is tuple or kind is list:
                    self._prep_args_for_hash(result, arg, state, id_hashed_objects)
                else:
                    super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)


def _ordinary(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor._has_symbolic_sizes_strides


def _described(tensor: Any) -> tuple[Any, ...]:
    return (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.storage_offset(), tensor.untyped_storage().nbytes(),
        tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip
