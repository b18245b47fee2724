"""torch.compile for blocks of a split model.

A compiler that reads the model's code would have to read the rules too. It is given the calls instead: the block runs
once on the compiler's own tensors, rules and all, and what it calls on this rank's parts is compiled. Parameters go in
as arguments, so that blocks that make the same calls share one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from foretell.plan.tensor.alike import alike
from foretell.plan.tensor.types import Shard
from foretell.runtime.parallel.tensor.exchange import TensorGroup
from foretell.runtime.parallel.tensor.values import SplitTensor, WholeSpec, plain, split
from foretell.trace.flow.calls import Flow

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def compile_blocks(
    model: nn.Module, team: TensorGroup, places: Mapping[str, Shard], flow: Flow, paths: Sequence[str], backend: str
) -> None:
    """Compile the forward of every block that `paths` names; blocks that make the same calls are compiled once."""
    programs: dict[str, _Programs] = {}
    for path, first in alike(flow, paths).items():
        block = model.get_submodule(path)
        if first not in programs:
            programs[first] = _Programs(block, path, team, places, backend)
        block.forward = programs[first].forward_of(block)  # type: ignore[method-assign]


class _Programs:
    """What is compiled for one block, by the shapes it is called with."""

    def __init__(self, block: nn.Module, path: str, team: TensorGroup, places: Mapping[str, Shard], backend: str) -> None:
        self.block, self.team, self.backend = block, team, backend
        self.plain_forward = block.forward
        self.places = [places.get(".".join(filter(None, (path, name)))) for name in _held_names(block)]
        self.known: dict[Any, tuple[Callable[..., Any], dict[str, Any]]] = {}

    def forward_of(self, block: nn.Module) -> Callable[..., Any]:
        own_forward = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            if not all(isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in leaves):
                return own_forward(*args, **kwargs)
            return self._run(block, leaves, tree)

        return forward

    def _run(self, block: nn.Module, leaves: list[Any], tree: Any) -> Any:
        at = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        specs: list[WholeSpec | None] = [leaves[i]._spec if isinstance(leaves[i], SplitTensor) else None for i in at]
        constants = tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        key = (tuple(specs), constants, tree, block.training)
        if key not in self.known:
            self.known[key] = self._compiled(constants, tree, at, specs)
        program, box = self.known[key]
        held = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in _held(block)]
        found = program(*(plain(leaves[i]) for i in at), *held)
        given = [
            x if spec is None else split(x, spec.place, self.team) for x, spec in zip(found, box["specs"], strict=True)
        ]
        return pytree.tree_unflatten(given, box["tree"])

    def _compiled(
        self, constants: tuple[Any, ...], tree: Any, at: list[int], specs: list[WholeSpec | None]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        box: dict[str, Any] = {}

        def calls(*tensors: Tensor) -> list[Any]:
            leaves = [constant if constant is None else constant[1] for constant in constants]
            for index, spec, tensor in zip(at, specs, tensors, strict=False):
                leaves[index] = tensor if spec is None else split(tensor, spec.place, self.team)
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            with _holding(self.block, self._parts(tensors[len(at) :])):
                output = self.plain_forward(*args, **kwargs)
            found, box["tree"] = pytree.tree_flatten(output)
            box["specs"] = [x._spec if isinstance(x, SplitTensor) else None for x in found]
            return [plain(x) for x in found]

        traced = torch._dynamo.nonstrict_trace(calls)

        def program(*tensors: Tensor) -> list[Any]:
            return traced(*tensors)

        # The compiler knows programs by their code object: one of its own for each.
        program.__code__ = program.__code__.replace(co_name=f"block_{id(box)}")
        return torch.compile(program, backend=self.backend, fullgraph=True, dynamic=False), box

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            x if place is None else split(x, place, self.team) for x, place in zip(tensors, self.places, strict=True)
        ]


def _held_names(block: nn.Module) -> list[str]:
    return [".".join(filter(None, (path, name))) for path, _, name in _slots(block)]


def _held(block: nn.Module) -> list[Tensor]:
    found = []
    for _, module, name in _slots(block):
        tensor = module._parameters.get(name)
        found.append(module._buffers[name] if tensor is None else tensor)
    return found  # type: ignore[return-value]


def _slots(block: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Where the parameters and buffers of a block are, in an order that is the same for blocks alike."""
    return [
        (path, module, name)
        for path, module in block.named_modules()
        for holder in (module._parameters, module._buffers)
        for name, tensor in holder.items()
        if tensor is not None
    ]


class _holding:
    """Put other tensors where a block's parameters and buffers are, for a while."""

    def __init__(self, block: nn.Module, tensors: Sequence[Tensor]) -> None:
        self.slots, self.tensors = _slots(block), tensors

    def __enter__(self) -> None:
        self.before = []
        for (_, module, name), tensor in zip(self.slots, self.tensors, strict=True):
            holder: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            self.before.append((holder, name, holder[name]))
            holder[name] = tensor

    def __exit__(self, *_: Any) -> None:
        for holder, name, tensor in self.before:
            holder[name] = tensor
