"""Kernels within a module whose forward can be read as a graph: its children are called, and little else is done.

    gate       activation(g) · u, where g and u go nowhere else
    residual   s = a + b; norm(s), where norm is a child that computes a norm and follows at once

The forward is read by torch.fx with its children left whole, in training and in evaluation; it counts only if it does nothing but answer,
both readings agree, and they have nothing but calls of children, halves of a tensor, that activation and that product, or sums. The new
forward calls the same children in the same order, with the kernel in the place of the two ops.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from foretell.kernels import gated, layer_norm, rms_norm
from foretell.kernels.rows import has_rows
from foretell.kernels.swap.gate import NEVER, UNTOUCHED, KernelGate
from foretell.kernels.swap.match import Forward, KernelMatch, does_nothing_else, twin_of, unhooked
from foretell.kernels.swap.norms import Norm, default_epses, default_of, norm_of

MOST_CHILDREN = 12
HALVING = {torch.chunk, torch.split, operator.getitem}
PRODUCTS, SUMS = (operator.mul, torch.mul), (operator.add, torch.add)


class ChildrenWhole(fx.Tracer):
    """Children are not looked into."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def read(module: nn.Module) -> fx.Graph | None:
    """The forward as a graph, if it is the same in training and evaluation; none where it cannot be read."""
    if not 2 <= len(module._modules) <= MOST_CHILDREN or not _takes_tensors(module) or not does_nothing_else(module):
        return None
    found = []
    for training in (True, False):
        try:
            found.append(ChildrenWhole().trace(twin_of(module, training=training)))
        except Exception:  # anything at all: it is the forward of anybody, and has been given no tensor
            return None
    return found[0] if str(found[0]) == str(found[1]) else None


def _takes_tensors(module: nn.Module) -> bool:
    """Whether it names what it is called with: nothing optional, so that nothing is decided by what is not given."""
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return bool(given) and all(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty for one in given)


def compiled(module: nn.Module, graph: fx.Graph) -> Forward:
    """The graph as a function of module and arguments."""
    graph.lint()
    return type(fx.GraphModule(twin_of(module), graph)).forward


def plain_call(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    return node.op == "call_function" and node.target in functions and len(node.args) == 2 and not node.kwargs


# ---------------------------------------------------------------- gates


def find_gate(module: nn.Module) -> KernelMatch | str | None:
    graph = read(module)
    if graph is None or sum(node.op == "placeholder" for node in graph.nodes) != 1:
        return None
    products = [node for node in graph.nodes if plain_call(node, PRODUCTS)]
    if len(products) != 1 or not all(isinstance(one, fx.Node) for one in products[0].args):
        return None
    for active, up in (products[0].args, products[0].args[::-1]):
        name = _activation(module, active) if len(active.users) == 1 else None
        if name is not None and len(up.users) == 1 and len(active.args[0].users) == 1:
            return _gate_match(module, graph, name, active, up, products[0])
    return None


def _gate_match(module: nn.Module, graph: fx.Graph, name: str, active: fx.Node, up: fx.Node, product: fx.Node) -> KernelMatch | str:
    strange = [node for node in graph.nodes if node not in (active, product) and not _calls_or_halves(node)]
    if strange:
        return f"a gate of {name}, and it does more: {strange[0].target}"
    gate = active.args[0]
    makers = [node.target for node in (gate, up) if node.op == "call_module" and type(module.get_submodule(node.target)) is nn.Linear]
    own = makers if len(set(makers)) == 2 else []

    def forward(kernel: KernelGate) -> Forward:
        activation = module.get_submodule(active.target) if active.op == "call_module" else _called(active)
        new = fx.Graph()
        places: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node is product:
                linears = [new.create_node("get_attr", target) for target in own]
                places[node] = new.call_function(_gate_stand_in(kernel, name, activation), (places[gate], places[up], *linears))
            elif node is not active:
                places[node] = new.node_copy(node, places.__getitem__)
        return compiled(module, new)

    return KernelMatch(
        kernel=gated.KERNEL_OF[name].name, how=f"a gate of {name}", gate={"autocast": UNTOUCHED, "layout": has_rows}, forward=forward
    )


def _calls_or_halves(node: fx.Node) -> bool:
    halves = (node.op == "call_function" and node.target in HALVING) or (node.op == "call_method" and node.target in ("chunk", "split"))
    return node.op in ("placeholder", "call_module", "output") or halves


def _gate_stand_in(kernel: KernelGate, name: str, activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def gate_times_up(gate: Tensor, up: Tensor, *linears: nn.Module) -> Tensor:
        """`linears`: what made them, where those keep no result of theirs, so that nobody has it but this."""
        if gate.shape == up.shape and kernel.takes(gate, up):
            once = kernel.once and len(linears) == 2 and not torch.compiler.is_compiling() and unhooked(*linears)
            return gated.gated(gate, up, name, once)
        return activation(gate) * up

    return gate_times_up


def _called(node: fx.Node) -> Callable[[Tensor], Tensor]:
    return lambda x: node.target(x, *node.args[1:], **node.kwargs)


def _activation(module: nn.Module, node: fx.Node) -> str | None:
    """The name of the activation that a node computes of one tensor, by its values."""
    if not node.args or not isinstance(node.args[0], fx.Node) or any(isinstance(one, fx.Node) for one in (*node.args[1:], *node.kwargs.values())):
        return None
    if node.op == "call_module":
        child = module.get_submodule(node.target)
        if len(node.args) != 1 or node.kwargs or next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            return None
        call: Callable[[Tensor], Tensor] = child.forward if unhooked(child) and not _is_random(child) else _nothing
    elif node.op == "call_function" and not node.kwargs.get("inplace"):
        call = _called(node)
    else:
        return None
    x = torch.cat((torch.linspace(-12, 12, 241, dtype=torch.float64), torch.tensor([-1e4, 1e4], dtype=torch.float64)))
    try:
        y = call(x.clone())
    except Exception:
        return None
    return next((name for name, one in gated.ACTIVATIONS.items() if isinstance(y, Tensor) and y.shape == x.shape and _same(y, one(x))), None)


def _is_random(child: nn.Module) -> bool:
    return isinstance(child, nn.modules.dropout._DropoutNd | nn.RReLU)


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _same(y: Tensor, wanted: Tensor) -> bool:
    return bool((y - wanted).abs().max() <= 1e-9 * wanted.abs().max())


# ---------------------------------------------------------------- residual adds


def find_residual(module: nn.Module) -> KernelMatch | str | None:
    graph = read(module)
    if graph is None or not all(node.op in ("placeholder", "call_module", "output") or plain_call(node, SUMS) for node in graph.nodes):
        return None
    pairs = {total: found for total in graph.nodes if plain_call(total, SUMS) and (found := _norm_after(module, total)) is not None}
    kinds = {norm.kernel for _, norm in pairs.values()}
    if not pairs:
        return None
    if len(kinds) > 1:
        return "adds before norms of two kinds"
    norms = {node: total for total, (node, _) in pairs.items()}

    def forward(kernel: KernelGate) -> Forward:
        new = fx.Graph()
        places: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node in pairs:
                norm_node, norm = pairs[node]
                child = new.create_node("get_attr", norm_node.target)
                both = new.call_function(_residual_stand_in(kernel, norm), (*(places[one] for one in node.args), child))
                places[node] = new.call_function(operator.getitem, (both, 0))
                places[norm_node] = new.call_function(operator.getitem, (both, 1))
            elif node not in norms:
                places[node] = new.node_copy(node, places.__getitem__)
        return compiled(module, new)

    names = ", ".join(str(node.target) for node in norms)
    return KernelMatch(kernel=f"add_{kinds.pop()}", how=f"an add before {names}", gate={"autocast": NEVER}, forward=forward)


def _norm_after(module: nn.Module, total: fx.Node) -> tuple[fx.Node, Norm] | None:
    """The norm of a sum, where it is the next thing that is done."""
    after = total.next
    if after.op != "call_module" or after.args != (total,) or after.kwargs or not all(isinstance(one, fx.Node) for one in total.args):
        return None
    norm = norm_of(module.get_submodule(after.target))
    return (after, norm) if isinstance(norm, Norm) else None


def _residual_stand_in(kernel: KernelGate, norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    epses: Mapping[str, Mapping[torch.dtype, float]] = default_epses() if norm.eps is None else {}
    name, eps, offset, centred = norm.weight, norm.eps, norm.offset, norm.centred

    def add_then_norm(x: Tensor, other: Tensor, child: nn.Module) -> tuple[Tensor, Tensor]:
        weight = getattr(child, name)
        bias = child.bias if centred else None
        if x.shape == other.shape and unhooked(child) and kernel.takes(x, other, weight, bias):
            if centred:
                return layer_norm.add_layer_norm(x, other, weight, bias, eps or 0.0)
            return rms_norm.add_rms_norm(x, other, weight, default_of(x, epses) if eps is None else eps, offset)
        total = x + other
        return total, child(total)

    return add_then_norm
