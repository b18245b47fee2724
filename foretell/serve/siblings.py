"""Linear layers of one input as one product, in compiled code: queries, keys and values; gate and up.

A small product reads its weights slower than a large one: on an H200 keys' 8 MB at 1.2 TB/s, gate's 117 MB at 3.8. The weights of
such siblings are laid one behind the other, each parameter a view with the values it had, and compiled code asks for one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_library = torch.library.Library("foretell_siblings", "DEF")
_library.define("linear(Tensor input, Tensor[] weights) -> Tensor")


def _shape(given: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return given.new_empty(*given.shape[:-1], sum(one.shape[0] for one in weights))


_together: dict[tuple[int, ...], Tensor] = {}
"""Where siblings lie → all of them as one."""


def _linear(given: Tensor, weights: Sequence[Tensor]) -> Tensor:
    whole = _together.get(tuple([one.data_ptr() for one in weights]))
    return torch.cat([functional.linear(given, one) for one in weights], -1) if whole is None else functional.linear(given, whole)


_library.impl("linear", _shape, "Meta")
_library.impl("linear", _linear, "CompositeExplicitAutograd")


class _LinearWatch(TorchFunctionMode):
    """Which weights an input meets."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and len(args) > 1:
            self.met.setdefault(id(args[0]), (args[0], []))[1].append(args[1])
        return func(*args, **(kwargs or {}))


def lay_together(model: nn.Module, forward: Callable[[], object]) -> list[nn.Parameter]:
    """Lay siblings' weights one behind the other, as `forward` shows them; those that were moved."""
    with torch.no_grad(), _LinearWatch() as watch:
        forward()
    owned: dict[int, int] = {}
    for parameter in model.parameters():
        owned[parameter.untyped_storage().data_ptr()] = owned.get(parameter.untyped_storage().data_ptr(), 0) + 1
    moved: list[nn.Parameter] = []
    for _, weights in watch.met.values():
        if len(weights) < 2 or any(not _free(one, weights[0], owned) for one in weights) or len(set(map(id, weights))) < len(weights):
            continue
        whole = torch.cat([one.detach() for one in weights])
        for one, part in zip(weights, whole.split([one.shape[0] for one in weights]), strict=True):
            one.data = part
            moved.append(one)  # type: ignore[arg-type]
        _together[tuple([one.data_ptr() for one in weights])] = whole
    return moved


def _free(weight: Tensor, first: Tensor, owned: dict[int, int]) -> bool:
    """A parameter that nothing else lies in memory with."""
    alone = isinstance(weight, nn.Parameter) and weight.is_contiguous() and owned.get(weight.untyped_storage().data_ptr()) == 1
    return alone and weight.dtype == first.dtype and weight.shape[1:] == first.shape[1:]


def apart(moved: Sequence[nn.Parameter]) -> None:
    """Each in memory of its own, as it was."""
    gone = {one.data_ptr() for one in moved}
    for key in [key for key in _together if gone.issuperset(key)]:
        del _together[key]
    for one in moved:
        one.data = one.detach().clone()


def joined(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same function with one product for all linear layers of one input."""
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is functional.linear and len(node.args) > 1 and not node.kwargs.get("input"):
            groups.setdefault(node.args[0], []).append(node)
    for given, nodes in groups.items():
        if len(nodes) < 2 or any(getattr(node.args[1], "op", "") not in ("placeholder", "get_attr") for node in nodes):
            continue
        weights = [node.args[1] for node in nodes]
        sizes = [node.args[1].meta["example_value"].shape[0] for node in nodes]
        with graph.graph.inserting_before(nodes[0]):
            whole = graph.graph.call_function(torch.ops.foretell_siblings.linear.default, (given, weights))
            first = 0
            for node, size in zip(nodes, sizes, strict=True):
                part = graph.graph.call_function(torch.narrow, (whole, -1, first, size))
                bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
                if bias is not None:
                    part = graph.graph.call_function(torch.add, (part, bias))
                node.replace_all_uses_with(part)
                first += size
        for node in nodes:
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return graph


def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """torch.compile's usual one, after joining siblings."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(joined(graph), inputs)
