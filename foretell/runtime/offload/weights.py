"""Weights that are in host memory, and on the device only while their block computes.

    forward     block i computes        block i+1 comes up          block i−1 has gone
    backward    block i computes        block i−1 comes up          block i+1 has gone

Every block has one array on the device whose memory is taken and given back; parameters are views of it, and so is whatever
autograd has saved of them: both see the weights again when these come up again. What comes next is what came next the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from foretell.runtime.offload.lanes import Lane, Mark

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class View:
    """A parameter as part of its block's array."""

    parameter: nn.Parameter
    begin: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.begin + self.shape.numel()].view(self.shape)


class Streamed:
    """Brings blocks up and lets them go. `fresh` makes a block's weights in host memory the new ones, for the lane."""

    def __init__(
        self, home: Mapping[str, Tensor], views: Mapping[str, Sequence[View]], lane: Lane, compute: Lane, device: torch.device,
        fresh: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.home, self.views, self.lane, self.compute, self._fresh = home, views, lane, compute, fresh
        self.flat = {}
        with lane.here():  # whose memory it is, now and whenever it is taken again
            for path, flat in home.items():
                self.flat[path] = torch.empty(flat.numel(), dtype=flat.dtype, device=device)
                self.flat[path].untyped_storage().resize_(0)
        self.kept: set[str] = set()
        """Blocks that something uses without calling them: they stay from the first use to the update."""
        self._here: dict[str, Mark] = {}
        """Block → when it has come."""
        self._at_home: set[str] = set()
        self._order = list(home)
        self._next: dict[tuple[str, str], tuple[str, str]] = {}
        self._last: tuple[str, str] | None = None
        self._before: Mark = None
        self.go_home()

    @torch.no_grad()
    def bring(self, path: str) -> None:
        """Begin to bring a block up, unless it is here or comes already."""
        if path in self._here:
            return
        self._fresh(path)
        flat = self.flat[path]
        with self.lane.here():
            flat.untyped_storage().resize_(flat.numel() * flat.itemsize)
            flat.copy_(self.home[path], non_blocking=True)
            self._here[path] = self.lane.mark()
        if path in self._at_home:
            self._at_home.discard(path)
            for view in self.views[path]:
                view.parameter.data = view.of(flat)

    def use(self, path: str) -> None:
        """From here on compute sees the block's weights."""
        self.bring(path)
        self.compute.wait(self._here[path])

    def keep(self, path: str) -> None:
        """A block that is used without being called."""
        self.use(path)
        self.kept.add(path)

    def enter(self, path: str) -> None:
        """Before a block's forward."""
        self.use(path)
        self._turn(FORWARD, path)

    def leave(self, path: str, output: Any, back: Callable[[str], None]) -> None:
        """After it: its kernels are under way, and the next block may come. `back` is told when its backward begins."""
        self._ahead(path)
        tensors = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]

        def begins(_: Tensor) -> None:
            self.use(path)
            self._turn(BACKWARD, path)
            back(path)
            self._ahead(path)

        if tensors and torch.is_grad_enabled():
            register_multi_grad_hook(tensors, begins, mode="any")

    def _turn(self, phase: str, path: str) -> None:
        if self._last is not None:
            self._next[self._last] = (phase, path)
        self._last = (phase, path)
        self._before = self.compute.mark()

    def _ahead(self, path: str) -> None:
        """Let go what was used before, and bring what was used next the last time."""
        assert self._last is not None
        _, coming = self._next.get(self._last) or self._guess(*self._last)
        for other in list(self._here):
            if other not in (path, coming) and other not in self.kept:
                self._release(other, self._before)
        if coming:
            self.bring(coming)

    def _guess(self, phase: str, path: str) -> tuple[str, str]:
        at = self._order.index(path) + (1 if phase == FORWARD else -1)
        return phase, self._order[at] if 0 <= at < len(self._order) else ""

    def _release(self, path: str, after: Mark) -> None:
        del self._here[path]
        with self.lane.here():
            self.lane.wait(after)
            self.flat[path].untyped_storage().resize_(0)

    def go_home(self) -> None:
        """At the end of a step: what is here is about to be old, and parameters are the tensors in host memory again, for
        whoever reads or writes them between steps."""
        mark = self.compute.mark()
        for path in list(self._here):
            self._release(path, mark)
        self.kept.clear()
        self._last = None
        for path, views in self.views.items():
            if path not in self._at_home:
                self._at_home.add(path)
                for view in views:
                    view.parameter.data = view.of(self.home[path])
