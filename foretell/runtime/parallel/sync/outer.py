"""The outer optimizer of replicas that step alone: every so many steps it joins them (DiLoCo, arXiv 2311.08105).

    begin            the weights that all replicas began the round from
    moved            begin - weights, on each replica after its steps
    mean             of `moved` over the replicas: the gradient of SGD with momentum on `begin`
    weights          the new `begin`; with a delay: plus what a replica has moved since the exchange began

The optimizer of the steps goes on as it is: each replica keeps its own moments. Vectors are flat, in fp32, of all parameters that
this rank trains, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.errors import UserError
from foretell.lower.sync import padded
from foretell.plan.types import Sync
from foretell.runtime.parallel.sync.codes import hash_of
from foretell.runtime.train.numbers.clip import local


@dataclass(frozen=True, kw_only=True)
class OuterRound:
    """A round that has ended on this replica."""

    step: int
    """After which its exchange began."""
    seconds: float
    """That this replica waited for it, and for the outer step."""
    message_seconds: float
    """That the exchange took, hidden or not."""
    hash: int
    """Of the weights that replicas begin the next round from: the same on all of them."""


class Averages(Protocol):
    """`mean.Mean`, or `peer.HubMean`."""

    cuts: dict[str, Tensor]

    def __call__(self, vector: Tensor, tag: Tensor) -> Tensor:
        """The mean of what replicas give."""


class Outer:
    """Of one replica."""

    def __init__(self, sync: Sync, parameters: Sequence[nn.Parameter], replicas: int, averages: Callable[[int], Averages]) -> None:
        """`averages` makes what averages vectors of so many elements; `replicas` is how many parts those have."""
        self.sync = sync
        self.pieces = [local(p.detach()) for p in parameters]
        self.device = self.pieces[0].device
        if sync.delay and self.device.type != "cpu":
            raise UserError("sync.delay is given, and on a GPU replicas wait for the exchange", "delay 0, or device cpu")
        self.count = sum(piece.numel() for piece in self.pieces)
        self.elements = padded(self.count, replicas)
        self.begin = self._weights()
        self.begun = dict(zip(parameters, map(_as, self.views(self.begin), parameters), strict=True))
        """Parameter → what all replicas began the round from; the live values."""
        self.momentum = torch.zeros_like(self.begin)
        self.mean = averages(self.elements)
        self.since: Tensor | None = None
        """While an exchange is under way: the weights when it began."""
        self.began = 0
        self.done: list[OuterRound] = []
        """Rounds that nobody has asked for yet."""
        self._under_way: Future[tuple[Tensor, float]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    # ------------------------------------------------------------ steps

    def stepped(self, step: int, *, last: bool = False) -> None:
        """After so many steps; the last of a run ends its round, however short."""
        if self._under_way is not None and (last or step >= self.began + self.sync.delay):
            self._finish()
        if step % self.sync.every == 0 or (last and self.began != step):
            self._start(step)
            if last or not self.sync.delay:
                self._finish()

    def end_round(self, step: int) -> None:
        """After so many steps of the run, wherever the round began."""
        self._start(step)
        self._finish()

    def _start(self, step: int) -> None:
        weights = self._weights()
        moved, tag = self.begin - weights, torch.tensor([self.hash()], device=self.device)
        self.since, self.began = weights if self.sync.delay else None, step
        if not self.sync.delay:
            self._under_way = Future()
            self._under_way.set_result(self._timed(moved, tag))
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="foretell-outer")
        self._under_way = self._thread.submit(self._timed, moved, tag)

    def _timed(self, moved: Tensor, tag: Tensor) -> tuple[Tensor, float]:
        began = time.perf_counter()
        return self.mean(moved, tag), time.perf_counter() - began

    def _finish(self) -> None:
        """Take the outer step with what the exchange gave."""
        assert self._under_way is not None
        began = time.perf_counter()
        mean, seconds = self._under_way.result()
        self._under_way = None
        step_outer(self.begin, self.momentum, mean.to(self.device), self.sync)
        weights = self.begin
        if self.since is not None:
            weights = self._weights().sub_(self.since).add_(self.begin)
            self.since = None
        self._put(weights)
        waited = time.perf_counter() - began + (0.0 if self.sync.delay else seconds)
        self.done.append(OuterRound(step=self.began, seconds=waited, message_seconds=seconds, hash=self.hash()))

    def hash(self) -> int:
        """Of the weights that the round began from: any flipped bit changes it."""
        return hash_of(self.begin)

    def take_done(self) -> list[OuterRound]:
        found, self.done = self.done, []
        return found

    def settle(self) -> None:
        """Have an exchange that is under way come to its end, without taking the outer step."""
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ vectors and parameters

    def _weights(self) -> Tensor:
        """This replica's own, padded."""
        left = torch.zeros(self.elements - self.count, device=self.device)
        return torch.cat([*(piece.reshape(-1).float() for piece in self.pieces), left])

    def _put(self, vector: Tensor) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.pieces, self.views(vector))

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector, one for each parameter, in its shape."""
        parts = vector[: self.count].split([piece.numel() for piece in self.pieces])
        return [part.view(piece.shape) for part, piece in zip(parts, self.pieces, strict=True)]

    # ------------------------------------------------------------ what is saved

    def state(self) -> dict[str, Tensor | int]:
        """What a resumed run needs beside `begin`; tensors are the live ones."""
        self.settle()
        found: dict[str, Tensor | int] = {"weights": self._weights(), "momentum": self.momentum, "began": self.began, **self.mean.cuts}
        if self._under_way is not None:
            assert self.since is not None
            found |= {"mean": self._under_way.result()[0], "since": self.since}
        return found

    def load(self, state: Mapping[str, Tensor | int]) -> None:
        """Go on from there; the parameters have what the round began from."""
        self.begin.copy_(self._weights())
        for name, into in {"momentum": self.momentum, **self.mean.cuts}.items():
            into.copy_(_tensor(state, name))
        self.began = int(state["began"])
        self._put(_tensor(state, "weights"))
        if "mean" in state:
            self.since = _tensor(state, "since").clone()
            self._under_way = Future()
            self._under_way.set_result((_tensor(state, "mean").clone(), 0.0))

    def take_over(self, begin: Tensor, momentum: Tensor) -> None:
        """Begin a round from what the others began theirs from; the optimizer of the steps stays as it is."""
        self.begin.copy_(begin)
        self.momentum.copy_(momentum)
        self.since = self._under_way = None
        self._put(self.begin)

    def start_from(self, state: Mapping[str, Tensor | int]) -> None:
        """Begin a round with what any replica had: of a run that had another number of them."""
        self.begin.copy_(self._weights())
        self.momentum[: self.count].copy_(_tensor(state, "momentum")[: self.count])


def step_outer(begin: Tensor, momentum: Tensor, gradient: Tensor, sync: Sync) -> None:
    """SGD as `torch.optim.SGD` computes it, in place; the gradient is not needed afterwards."""
    momentum.mul_(sync.momentum).add_(gradient)
    update = gradient.add_(momentum, alpha=sync.momentum) if sync.nesterov else momentum
    begin.add_(update, alpha=-sync.lr)


def _as(view: Tensor, parameter: nn.Parameter) -> Tensor:
    """A part of a vector as the parameter is: a piece of a whole tensor where that is one."""
    whole = parameter.detach()
    if not isinstance(whole, DTensor):
        return view
    return DTensor.from_local(view, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _tensor(state: Mapping[str, Tensor | int], name: str) -> Tensor:
    found = state[name]
    assert isinstance(found, Tensor)
    return found
