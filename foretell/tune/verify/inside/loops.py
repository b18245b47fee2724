"""Timed calls in the process that makes them. The clock is the parent's: this only prepares, runs, and shows results after.

Every call of a loop has inputs of its own: the given ones, rolled by as much as the parent says. So
no two calls see the same values or the same memory, and the parent knows what each must give. All outputs are held until the
parent has looked at those it picks after the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foretell.tune.verify.inside.calls import Caller, outputs_of, raw_of, synchronize, tensor_of
from foretell.tune.verify.wire import RawTensor

_graph, _capture, _clone, _roll = torch.cuda.CUDAGraph, torch.cuda.graph, torch.clone, torch.roll
_grad = torch.autograd.grad
EAGER, GRAPH = "eager", "graph"


class Loop:
    """A number of calls that are timed together."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.inputs: list[list[Any]] = []
        self.outputs: list[list[Any]] = []
        self.graphs: list[tuple[Any, list[Any]]] = []
        self.mode, self.backward = EAGER, False
        self._wrapped: Any = None
        self._base: list[Any] = []

    def prepare(self, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Inputs for every call; `blobs` are given the first time, later loops roll what is there."""
        if blobs or asked.get("inputs"):
            self._base = list(self.caller.arguments({**asked, "same": False}, blobs))
            self.graphs = []
        self.mode, self.backward = asked["mode"], bool(asked.get("backward"))
        self.outputs = []
        if self.mode == GRAPH and len(self.graphs) == len(asked["rolls"]):
            for (_, _), row, by in zip(self.graphs, self.inputs, asked["rolls"], strict=True):
                for mine, base in zip(row, self._base, strict=True):
                    if isinstance(mine, Tensor):
                        mine.detach().copy_(rolled(base, by))
        else:
            self.inputs = [[_fresh(one, by, self.backward) for one in self._base] for by in asked["rolls"]]
            self.graphs = [self._captured(row) for row in self.inputs] if self.mode == GRAPH else []
        self._wrap(asked.get("compiled"))
        synchronize(self.caller.device)
        return {}, []

    def _wrap(self, how: str | None) -> None:
        module = self.caller.module
        if how is None:
            self._wrapped = module
        elif self._wrapped is module or self._wrapped is None:
            self._wrapped = torch.compile(module, mode=None if how == "default" else how, dynamic=False)

    def run(self) -> tuple[dict[str, Any], list[bytes]]:
        """Every call once, and until the device has done them."""
        if self.mode == GRAPH:
            for graph, _ in self.graphs:
                graph.replay()
            self.outputs = [outputs for _, outputs in self.graphs]
        else:
            with torch.set_grad_enabled(self.backward):
                self.outputs = [self._once(row) for row in self.inputs]
        synchronize(self.caller.device)
        return {}, []

    def _once(self, row: Sequence[Any]) -> list[Any]:
        outputs = outputs_of(self._wrapped(*row))
        if not self.backward:
            return outputs
        tensors = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        assert self.caller.module is not None
        wanted = [one for one in (*row, *self.caller.module.parameters()) if isinstance(one, Tensor) and one.requires_grad]
        found = _grad(tensors, wanted, [torch.ones_like(one) for one in tensors], allow_unused=True)
        return [one.detach() if isinstance(one, Tensor) else one for one in outputs] + [one for one in found if one is not None]

    def _captured(self, row: Sequence[Any]) -> tuple[Any, list[Any]]:
        """One call as a graph of its own."""
        self._wrapped = self.caller.module
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.set_grad_enabled(self.backward):
            self._once(row)
        torch.cuda.current_stream().wait_stream(stream)
        graph = _graph()
        with _capture(graph), torch.set_grad_enabled(self.backward):
            outputs = self._once(row)
        return graph, outputs

    def look(self, places: Sequence[int]) -> tuple[dict[str, Any], list[bytes]]:
        """Outputs of some of the calls."""
        rows = [[raw_of(one) if isinstance(one, Tensor) else None for one in self.outputs[place]] for place in places]
        return {"calls": [[one and one.header() for one in row] for row in rows]}, [one.data for row in rows for one in row if one is not None]


def rolled(tensor: Tensor, by: int) -> Tensor:
    """Other values of the same kind: integers and flags, which may stand for places, stay as they are."""
    return _roll(tensor.detach(), by) if tensor.is_floating_point() and tensor.dim() else tensor.detach()


def rolled_raw(raw: RawTensor, by: int) -> RawTensor:
    """The same in the parent."""
    return raw_of(rolled(tensor_of(raw, "cpu"), by))


def _fresh(one: Any, by: int, grad: bool) -> Any:
    if not isinstance(one, Tensor):
        return one
    found = _clone(rolled(one, by), memory_format=torch.preserve_format)
    return found.requires_grad_(grad and found.is_floating_point())
