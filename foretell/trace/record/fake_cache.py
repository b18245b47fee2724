"""Fake tensors look up every op in a cache; what they look it up by, and the tensors they find, are made here, in a quarter of the time.

    op and arguments ── key ──► what torch found for it once ──► tensors of that shape
                          └─ not there, or not ordinary: torch's own way, and what it finds is kept

The key has all that torch's own has: what it leaves out (memory format, layout, the figures of sparse tensors) follows from
sizes and strides, or is the same for every tensor that is written down here. A tensor is made as torch makes it, and has the
attributes of one that torch has made. Anything else is left to torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_PARAMETERS = {
    "dispatch": "self func types args kwargs", "_make_cache_entry": "self state key func args kwargs output",
    "_output_from_cache_entry": "self state entry key func args", "_dispatch_impl": "self func types args kwargs",
}  # fmt: skip
"""What torch's own methods were given when this was written."""
_PLAIN = frozenset((int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Arguments that are keys themselves, with their type: 1 and 1.0 are equal and give other tensors."""
_META = torch.device("meta")
_DEVICE = "_fake_device" if isinstance(inspect.getattr_static(FakeTensor, "fake_device", None), property) else "fake_device"
"""Where a fake tensor has the device that it is said to be on."""
_BYPASS = object()
"""Kept for what torch works out anew each time."""
_subclass = torch._C.TensorBase._make_subclass
"""PyTorch's, also while `Tensor` has another one."""


def is_known() -> bool:
    """Whether torch keeps what ops give as it did when this was written."""
    return all(
        hasattr(FakeTensorMode, name) and " ".join(inspect.signature(getattr(FakeTensorMode, name)).parameters) == parameters
        for name, parameters in _PARAMETERS.items()
    )


class QuickFakes(FakeTensorMode):
    """A fake tensor mode that is quick with ops that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self._quick = is_known() and self.cache_enabled and not self.cache_crosscheck_enabled
        self._found: Any = None
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        lenient = self._allow_unsafe_data_ptr_access
        self._without_data = torch._C._set_warn_deprecated_on_mutable_data_ptr if lenient else torch._C._set_throw_on_mutable_data_ptr

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self._key(func, args, kwargs) if self._quick and self.cache_enabled and self.shape_env is None else None
        if key is None or get_proxy_mode() is not None:
            return super().dispatch(func, types, args, kwargs or {})
        _, kept = self.cache.get(key, (None, None))  # type: ignore[call-overload]
        if kept is _BYPASS:
            return self._dispatch_impl(func, types, args, kwargs or {})
        if kept is not None:
            outputs = [self._made(one, args) for one in kept[1:]]
            return tuple(outputs) if kept[0] else outputs[0]
        around, self._found = self._found, None
        try:
            output = super().dispatch(func, types, args, kwargs or {})
            if self._found is not None:
                self.cache[key] = (func, self._found)  # type: ignore[index, assignment]  # the op stays: no other gets its id
        finally:
            self._found = around
        return output

    def _make_cache_entry(self, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        try:
            entry = super()._make_cache_entry(state, key, func, args, kwargs, output)
        except _BypassDispatchCache:
            self._found = _BYPASS
            raise
        self._found = _kept(entry, func)
        return entry

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        output = super()._output_from_cache_entry(state, entry, key, func, args)
        self._found = _kept(entry, func)
        return output

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        found: list[Any] = [id(func), torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        if not self._describe(found, args):
            return None
        if kwargs:
            found += kwargs
            if not self._describe(found, kwargs.values()):
                return None
        return tuple(found)

    def _describe(self, found: list[Any], args: Iterable[Any]) -> bool:
        """Add what matters of each argument; False where one is left to torch."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                own = arg.__dict__
                if own["fake_mode"] is not self or own["constant"] is not None or arg.layout is not torch.strided:
                    return False
                found += (
                    arg.dtype, arg.shape, arg.stride(), own[_DEVICE], arg.storage_offset(), arg.untyped_storage().nbytes(),
                    arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference(),
                )  # fmt: skip
            elif kind in _PLAIN:
                found += (kind, arg)
            elif kind is tuple or kind is list:
                found += (kind, len(arg))
                if not self._describe(found, arg):
                    return False
            else:
                return False
        return True

    def _made(self, one: tuple[Any, ...], args: Any) -> Any:
        kind, *rest = one
        if kind == "argument":
            return args[rest[0]]
        if kind == "constant":
            return rest[0]
        shape, stride, dtype, requires_grad, device, view_of, offset = rest
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device=_META, requires_grad=requires_grad)
            if view_of is not None:
                meta.set_(args[view_of].untyped_storage(), offset, shape, stride)
        attributes = self._attributes.get(device)
        if attributes is None:
            output = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(output))
            return output
        made: Any = _subclass(FakeTensor, meta, requires_grad, dispatch_device=True, device_for_backend_keys=device)
        self._without_data(made)
        made.__dict__.update(attributes)
        return made


def _kept(entry: Any, func: Any) -> tuple[Any, ...] | None:
    """How to make what an entry of torch's cache stands for: whether it is a tuple, and each output. None: as torch does it."""
    outputs: list[tuple[Any, ...]] = []
    for one in entry.output_infos:
        said = one.metadata
        if one.inplace_idx is not None:
            outputs.append(("argument", one.inplace_idx))
        elif said is None:
            outputs.append(("constant", one.constant_value if one.view_idx is None else None))
        elif said.layout is not torch.strided or said.is_conj or said.is_neg:
            return None
        else:
            view_of = one.view_idx if func.is_view else None
            outputs.append(("tensor", said.shape, said.stride, said.dtype, said.requires_grad, said.device, view_of, said.storage_offset))
    return entry.is_output_tuple, *outputs
