"""Whose weights are used before their block is called: such a block cannot wait for its own call.

A block waits for its update when it is called. A model may use a block's weights without calling it, or before: a head that
reads an embedding, a loop that takes a layer apart, a weight that two blocks share. During the first forward every call
outside the blocks is looked at; what is found is updated before forward begins, from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def shared(root: nn.Module, unit_of: Mapping[str, str], paths: Sequence[str]) -> set[str]:
    """Blocks with a weight that another block has too."""
    owner = {id(p): unit_of.get(name, "") for name, p in root.named_parameters()}
    found = set()
    for name, parameter in root.named_parameters(remove_duplicate=False):
        here = next((path for path in paths if path and name.startswith(f"{path}.")), "")
        if owner[id(parameter)] and owner[id(parameter)] != here:
            found.add(owner[id(parameter)])
    return found


class EarlyUseMode(TorchFunctionMode):
    """Looks at calls while no block is under way; `found` are blocks whose weights they use."""

    def __init__(self, owner: Mapping[int, str], used: Callable[[str], None]) -> None:
        super().__init__()
        self._owner, self._used = owner, used
        self.found: set[str] = set()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # shapes and dtypes may be asked for
            for value in pytree.tree_leaves((args, kwargs)):
                path = self._owner.get(id(value)) if isinstance(value, nn.Parameter) else None
                if path and path not in self.found:
                    self.found.add(path)
                    with torch._C.DisableTorchFunction():
                        self._used(path)
        return func(*args, **(kwargs or {}))


class Look:
    """The first forward of a model, watched outside its blocks; `used` is told of a block before its weights are used."""

    def __init__(self, owner: Mapping[int, str], used: Callable[[str], None]) -> None:
        self.watch: EarlyUseMode | None = EarlyUseMode(owner, used)
        self._inside = 0
        self._on = False

    def _turn(self, on: bool) -> None:
        if self.watch is not None and on != self._on:
            self._on = on
            self.watch.__enter__() if on else self.watch.__exit__(None, None, None)

    def begin(self) -> None:
        self._turn(True)

    def enter(self) -> None:
        self._inside += 1
        self._turn(False)

    def leave(self) -> None:
        self._inside -= 1
        if self._inside == 0 and self.watch is not None:
            self._turn(True)

    def end(self) -> set[str]:
        """What was found; from here on nothing is watched."""
        self._turn(False)
        found, self.watch = self.watch.found if self.watch is not None else set(), None
        return found
