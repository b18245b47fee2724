"""A generated model as a small file of plain PyTorch. Needs the shapes that come out, so it may run the graph on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from foretell.prove.fuzz import rules
from foretell.prove.fuzz.table_moves import BY_NAME, HELPERS
from foretell.prove.fuzz.types import CallNode, Held, Model, ModelGraph, Shape

_HEAD = '''"""{doc}"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
'''


class Broken(Exception):
    """A graph that PyTorch refuses: a draw or a reduction that is no model."""


def shapes_of(model: Model) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of every value of the main graph, by running it on meta tensors."""
    inner = None
    if model.block is not None:
        inner = _values(model.block, None)
        first = next(one for one in model.block.held if one.kind == "x")
        if inner[model.block.outputs[0]][0] != first.shape:
            raise Broken("the block changes the shape")
    return _values(model.main, first.shape if inner is not None else None)


def _values(graph: ModelGraph, block: Shape | None) -> dict[str, tuple[Shape, str]]:
    kinds = {"x": "f", "p": "f", "frozen": "f", "unused": "f"}
    found: dict[str, tuple[Shape, str]] = {
        one.name: (one.shape, str(rules.DTYPES[kinds.get(one.kind, one.kind)])[6:]) for one in graph.held
    }
    for node in graph.nodes:
        if node.op == "blocks":
            if block is None or found[str(node.inputs[0])][0] != block:
                raise Broken("the block takes another shape")
            found[node.outs[0]] = (block, "float32")
            continue
        operator = BY_NAME[node.op]
        shapes = [one if isinstance(one, tuple) else found[one][0] for one in node.inputs]
        for slot, one in zip(operator.slots, node.inputs, strict=True):
            if not isinstance(one, tuple) and found[one][1] != str(rules.DTYPES[slot.kind])[6:]:
                raise Broken(f"{node.op} takes another dtype")
        made = rules.tried(operator, shapes, node.args)
        if made is None or len(made) != len(node.outs):
            raise Broken(f"{node.op} does not take {shapes}")
        found.update({name: (shape, dtype) for name, (dtype, shape) in zip(node.outs, made, strict=True)})
    return found


def render(model: Model, doc: str = "", main: str = "") -> str:
    """The file: `build`, `batch` and `loss`; `main` is what it does when it is run."""
    shapes = shapes_of(model)
    nodes = (*model.main.nodes, *(model.block.nodes if model.block is not None else ()))
    helpers = dict.fromkeys(BY_NAME[node.op].helper for node in nodes if node.op != "blocks" and BY_NAME[node.op].helper)
    parts = [_HEAD.format(doc=doc or f"foretell zoo fuzz, seed {model.seed}, model {model.index}: {model.ops} ops.")]
    parts += [HELPERS[name] for name in helpers]
    if model.block is not None:
        parts.append(_module("Block", model.block, model))
    parts.append(_module("Model", model.main, model))
    parts.append("\ndef build():\n    return Model()\n")
    parts.append(_batch(model, shapes))
    parts.append(_loss(model))
    return "\n".join(parts) + main


def _module(name: str, graph: ModelGraph, model: Model) -> str:
    lines = ["", f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for one in graph.held if one.kind != "x" for line in _made(one)]
    for node in graph.nodes:
        if node.op == "blocks":
            lines.append(f"        self.blocks = nn.ModuleList(Block() for _ in range({model.repeats}))")
        elif node.layer:
            lines.append(f"        self.{node.layer} = {BY_NAME[node.op].layer.format(**node.args)}")
    inputs = [one.name for one in graph.held if one.kind == "x"]
    lines += ["", f"    def forward(self, {', '.join(inputs)}):"]
    lines += [f"        {line}" for line in _forward(graph, model.forgets)]
    lines.append(f"        return {', '.join(graph.outputs)}")
    return "\n".join(lines) + "\n"


def _made(one: Held) -> list[str]:
    if one.kind in ("p", "frozen", "unused"):
        more = ", requires_grad=False" if one.kind == "frozen" else ""
        spread = 1.0 if not one.shape else max(0.05, one.shape[-1] ** -0.5)
        return [f"self.{one.name} = nn.Parameter(torch.randn({one.shape}) * {spread:.3f}{more})"]
    value = {
        "u": f"torch.ones({one.shape})",
        "i": f"torch.randint(0, {one.high}, {one.shape})",
        "b": f"torch.rand({one.shape}) > 0.5",
    }[one.kind]
    return [f'self.register_buffer("{one.name}", {value})']


def _forward(graph: ModelGraph, forgets: bool) -> list[str]:
    held = {one.name: one.name if one.kind == "x" else f"self.{one.name}" for one in graph.held}
    last = {name: number for number, node in enumerate(graph.nodes) for name in node.inputs if isinstance(name, str)}
    lines = []
    for number, node in enumerate(graph.nodes):
        if node.op == "blocks":
            lines += [f"{node.outs[0]} = {held.get(str(node.inputs[0]), node.inputs[0])}", "for block in self.blocks:"]
            lines.append(f"    {node.outs[0]} = block({node.outs[0]})")
        else:
            lines.append(f"{', '.join(node.outs)} = {written(node, held)}")
        if forgets:
            gone = sorted(name for name, at in last.items() if at == number and name not in held and name not in graph.outputs)
            lines += [f"del {', '.join(gone)}"] if gone else []
    return lines


def written(node: CallNode, held: Mapping[str, str]) -> str:
    """The node's call as Python."""
    operator = BY_NAME[node.op]
    given = [str(one) if isinstance(one, tuple) else held.get(one, one) for one in node.inputs]
    return operator.call.format(*given, layer=f"self.{node.layer}", **node.args)


def _batch(model: Model, shapes: Mapping[str, tuple[Shape, str]]) -> str:
    entries = [f'"{one.name}": torch.randn({one.shape})' for one in model.main.held if one.kind == "x"]
    for number, term in enumerate(model.terms):
        shape = shapes[term.value][0]
        if term.how == "logits":
            entries.append(f'"y{number}": torch.randint(0, {shape[-1]}, ({_count(shape[:-1])},))')
        elif term.how == "target":
            entries.append(f'"y{number}": torch.randn({shape})')
    return "\ndef batch(model, micro_batch=1, seq=None, image=None):\n    return {" + ", ".join(entries) + "}\n"


def _count(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


def _loss(model: Model) -> str:
    several = len(model.terms) > 1
    summed = []
    for number, term in enumerate(model.terms):
        out = f"output[{number}]" if several else "output"
        summed.append({
            "square": f"{out}.square().mean()", "abs": f"{out}.abs().mean()",
            "smooth": f"F.smooth_l1_loss({out}, torch.zeros_like({out}))",
            "logits": f'F.cross_entropy({out}.flatten(0, -2), batch["y{number}"])',
            "target": f'F.mse_loss({out}, batch["y{number}"])',
        }[term.how])  # fmt: skip
    return "\ndef loss(output, batch):\n    return " + " + ".join(summed) + "\n"
