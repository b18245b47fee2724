"""Where in a stage's backward its weights come in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def used_in_line(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """Parameters that meet activations at two places of which one leads to the other.

    A place is the first node of the autograd graph, on the way from a parameter to the outputs, that also depends on an
    input. A layer meets its weights at one place. A weight that two layers in a row share has two.
    """
    above = _reversed(outputs)
    names = {id(parameter): name for name, parameter in parameters.items()}
    given = {id(tensor) for tensor in inputs}
    leaves = [(node, id(node.variable)) for node in above if hasattr(node, "variable")]
    activations = _reach([node for node, key in leaves if key in given], above, set())[0]
    found = []
    for node, key in leaves:
        if key in names:
            places = _reach([node], above, activations)[1]
            if len(places) > 1 and any(_reach([place], above, set())[0] & (places - {place}) for place in places):
                found.append(names[key])
    return sorted(found)


def _reversed(outputs: Iterable[Tensor]) -> dict[Any, list[Any]]:
    """Every node of the graph → the nodes that come after it in forward."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    above: dict[Any, list[Any]] = defaultdict(list, {node: [] for node in waiting})
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            above[below].append(node)
            if below not in seen:
                seen.add(below)
                waiting.append(below)
    return above


def _reach(begin: Sequence[Any], above: Mapping[Any, list[Any]], border: set[Any]) -> tuple[set[Any], set[Any]]:
    """Nodes that are reached without crossing the border, and the nodes of the border that are met."""
    reached, met = set(begin), set()
    waiting = list(begin)
    while waiting:
        for node in above[waiting.pop()]:
            if node in border:
                met.add(node)
            elif node not in reached:
                reached.add(node)
                waiting.append(node)
    return reached, met
