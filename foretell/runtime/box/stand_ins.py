"""What a message does where the other ranks are not: take its time, move its bytes, fill what would be received.

    OnCpu    buffers are filled when the message is asked for; who waits for it sleeps until its time is over
    OnCuda   kernels on the group's own stream, or on the caller's where the caller waits (as NCCL has it since PyTorch 2.8)

One stream, or one line of messages on a CPU, carries the collectives of a group one after the other; messages to and from each
neighbour have their own. Nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.runtime.box.script import BoxScript

NS = 1e9
ACTIVATION = 1.0
"""Standard deviation of what is received from another stage."""
SLEEP = 5e-5
"""Seconds before its end that a wait on a CPU stops sleeping and looks at the clock."""


class DoneWork(dist._Work):
    """Something whose outcome is there, or whose end the caller's stream has in its order."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class Later(DoneWork):
    """Something that ends later. What it reads and writes is held until someone has waited for it."""

    def __init__(self, wait: Callable[[], None], held: Sequence[Tensor]) -> None:
        super().__init__()
        self._wait: Callable[[], None] | None = wait
        self._held: Sequence[Tensor] = held

    def wait(self, timeout: Any = None) -> bool:
        waits, self._wait = self._wait, None
        if waits is not None:
            waits()
        self._held = ()
        return True

    def is_completed(self) -> bool:
        return self._wait is None


class StandIns(Protocol):
    """Of one kind of device."""

    script: BoxScript

    def begin_step(self) -> None:
        """A step begins here."""

    def gather(self, line: str, target: Tensor, source: Tensor, seconds: float, now: bool) -> dist._Work:
        """The source as often as the target has room for it."""

    def reduce(self, line: str, target: Tensor, source: Tensor, mean: bool, seconds: float, now: bool) -> dist._Work:
        """The sum, or mean, of the source's pieces: each stands for the piece of another rank."""

    def keep(self, line: str, tensors: Sequence[Tensor], seconds: float, now: bool, *, ends: bool = False) -> dist._Work:
        """Tensors that stay as they are; `ends`: not before the other ranks are done with their micro-batches."""

    def send(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        """What goes to another rank; `name` is what other ranks know it by, where they do."""

    def receive(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        """Normal numbers; where the message has a name, they come when others would have sent it."""


def tiled(target: Tensor, source: Tensor) -> None:
    """Fill the target with the source, over and over."""
    flat, given = target.detach().reshape(-1), source.detach().reshape(-1)
    size = given.numel()
    whole = flat.numel() // size if size else 0
    if whole:
        body = flat[: whole * size].view(whole, size)
        inside = source.data_ptr() - target.data_ptr()
        if 0 <= inside < target.nbytes:  # a piece of the target itself
            given = given.clone()
        body.copy_(given.to(flat.dtype).expand(whole, size))
    if size:
        flat[whole * size :].copy_(given[: flat.numel() - whole * size])
    if flat.data_ptr() != target.data_ptr():  # not contiguous: it was a copy
        target.detach().copy_(flat.view(target.shape))


def drawn(tensor: Tensor) -> None:
    """Numbers as another rank would send them: of activations, or one where ranks agree on something."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.detach().normal_(0.0, ACTIVATION)
        else:
            tensor.detach().fill_(1)


class OnCpu:
    """Messages on a CPU: gloo's threads are not there, so a message costs its sender no cores."""

    def __init__(self, script: BoxScript) -> None:
        self.script = script
        self._free: dict[str, float] = {}
        self._stamps: dict[str, float] = {"": time.perf_counter()}

    def begin_step(self) -> None:
        self._stamps = {"": time.perf_counter()}

    def gather(self, line: str, target: Tensor, source: Tensor, seconds: float, now: bool) -> dist._Work:
        begun = time.perf_counter()
        tiled(target, source)
        return self._until(self._queued(line, begun, seconds), (target, source))

    def reduce(self, line: str, target: Tensor, source: Tensor, mean: bool, seconds: float, now: bool) -> dist._Work:
        begun = time.perf_counter()
        pieces = source.detach().reshape(-1, target.numel())
        total = pieces.mean(0) if mean and pieces.is_floating_point() else pieces.sum(0)
        target.detach().copy_(total.view(target.shape))
        return self._until(self._queued(line, begun, seconds), (target, source))

    def keep(self, line: str, tensors: Sequence[Tensor], seconds: float, now: bool, *, ends: bool = False) -> dist._Work:
        begun = time.perf_counter()
        if ends:
            begun = max(begun, self._come(self.script.arrivals.end))
        return self._until(self._queued(line, begun, seconds), tensors)

    def send(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        end = self._queued(line, time.perf_counter(), seconds)
        if name:
            self._stamps[name] = end
        return self._until(end, (tensor,))

    def receive(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        begun = time.perf_counter()
        drawn(tensor)
        chains = self.script.arrivals.receives.get(name)
        if chains is None:
            return self._until(self._queued(line, begun, seconds), (tensor,))
        return Later(lambda: _sleep_until(self._come(chains)), (tensor,))  # what it depends on may be sent after this is asked for

    def _come(self, chains: Sequence[float | None]) -> float:
        names = ("", *self.script.arrivals.sends)
        known = [self._stamps[name] + delay for name, delay in zip(names, chains, strict=False) if delay is not None and name in self._stamps]
        return max(known, default=0.0)

    def _queued(self, line: str, begun: float, seconds: float) -> float:
        """When a message that was asked for then ends: after those before it on its line."""
        self._free[line] = max(begun, self._free.get(line, 0.0)) + seconds
        return self._free[line]

    def _until(self, end: float, held: Sequence[Tensor]) -> dist._Work:
        return Later(lambda: _sleep_until(end), held)


def _sleep_until(end: float) -> None:
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left - SLEEP if left > 2 * SLEEP else 0)
