"""What one rank keeps for itself, such as its buffers: nested dicts and lists of tensors and plain values.

It is split into tensors by name and an outline that JSON can say, and put together again without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.errors import FileFormatError
from foretell.units import DTYPE_BYTES


class Outline:
    """A tree with names in place of tensors, and the tensors by name. One that is there twice is kept once."""

    def __init__(self, tree: Mapping[str, Any], first: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}
        self.tree = self._of(tree, first)

    def _of(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            value = value.detach()
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
            name = self._names.setdefault(key, name)
            self.tensors[name] = value
            return {"$": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if isinstance(value, Mapping):
            return {"{": [[key, self._of(part, f"{name}/{key}")] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            parts = [self._of(part, f"{name}/{place}") for place, part in enumerate(value)]
            return {"[" if isinstance(value, list) else "(": parts}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise FileFormatError(f"a {type(value).__name__} at {name} cannot be saved", "keep tensors and plain values in the state")


def names(outline: Any) -> set[str]:
    """Names of the tensors in it."""
    if not isinstance(outline, dict):
        return set()
    if "$" in outline:
        return {str(outline["$"])}
    inner = [part for _, part in outline["{"]] if "{" in outline else outline.get("[") or outline.get("(") or []
    return set().union(*map(names, inner)) if inner else set()


def filled(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""
    if not isinstance(outline, dict):
        return outline
    if "$" in outline:
        found = tensors.get(outline["$"])
        if found is None or list(found.shape) != outline["shape"] or dtype_name(found.dtype) != outline["dtype"]:
            raise FileFormatError(f"{outline['$']} is not as its outline says", "use an older checkpoint")
        return found
    if "{" in outline:
        return {key: filled(part, tensors) for key, part in outline["{"]}
    parts = [filled(part, tensors) for part in outline.get("[") or outline.get("(") or ()]
    return parts if "[" in outline else tuple(parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if name not in DTYPE_BYTES or not isinstance(found, torch.dtype):
        raise FileFormatError(f"dtype {name} is not known to this torch", "use a newer torch")
    return found
