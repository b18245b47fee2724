"""Make a model that fails smaller while it fails in the same way: delta debugging on its graph.

Passes, again and again until none helps: fewer outputs, ops replaced by one of their inputs or by an input of the model, blocks
taken away or fewer, the step as plain as can be, sizes halved. What PyTorch refuses, or what fails otherwise, is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from foretell.prove.fuzz.render import Broken, shapes_of
from foretell.prove.fuzz.types import CallNode, Held, Model, ModelGraph, Shape, Term

Fails = Callable[[Model], bool]
MOST_TRIALS = 160


def shrunk(model: Model, fails: Fails, most: int = MOST_TRIALS) -> tuple[Model, int]:
    """A smaller model that fails too, and how many were tried."""
    trials = 0
    better = True
    while better and trials < most:
        better = False
        for candidate in _smaller(model):
            if trials >= most:
                break
            tidy = _tidied(candidate)
            if tidy is None or tidy == model:
                continue
            trials += 1
            if fails(tidy):
                model, better = tidy, True
                break
    return model, trials


def _smaller(model: Model) -> Iterator[Model]:
    """Candidates, the boldest first."""
    yield from _fewer_terms(model)
    yield from _without_blocks(model)
    yield from _shorter(model, "main")
    if model.block is not None:
        yield from _shorter(model, "block")
    yield from _plainer(model)
    yield from _narrower(model)


# ---------------------------------------------------------------------------------------------- passes


def _fewer_terms(model: Model) -> Iterator[Model]:
    if len(model.terms) > 1:
        yield from (model.with_(terms=(term,)) for term in model.terms)
        yield from (model.with_(terms=tuple(one for one in model.terms if one is not term)) for term in model.terms)
    yield from (
        model.with_(terms=tuple(replace(one, how="square") if one is term else one for one in model.terms))
        for term in model.terms if term.how in ("logits", "target", "smooth")
    )  # fmt: skip


def _without_blocks(model: Model) -> Iterator[Model]:
    if model.block is None:
        return
    at = next((node for node in model.main.nodes if node.op == "blocks"), None)
    if at is None:
        yield model.with_(block=None, repeats=0, recompute="none", modes=())
        return
    yield model.with_(main=_replaced(model.main, at, str(at.inputs[0])), terms=_renamed_terms(model.terms, at.outs[0], str(at.inputs[0])),
                      block=None, repeats=0, recompute="none", modes=())  # fmt: skip
    inlined = _inlined(model, at)
    if inlined is not None:
        yield inlined
    if model.repeats > 2:
        yield model.with_(repeats=2, modes=model.modes[:2])


def _inlined(model: Model, at: CallNode) -> Model | None:
    """The block once, in the main graph."""
    block = model.block
    assert block is not None
    start = next(one.name for one in block.held if one.kind == "x")
    names: dict[str, str] = {start: str(at.inputs[0])}
    names |= {one.name: f"{one.name}_b" for one in block.held if one.kind != "x"}
    names |= {out: f"{out}_b" for node in block.nodes for out in node.outs}
    nodes = [
        replace(node, inputs=tuple(names[one] if isinstance(one, str) else one for one in node.inputs),
                outs=tuple(names[out] for out in node.outs), layer=f"{node.layer}_b" if node.layer else "")
        for node in block.nodes
    ]  # fmt: skip
    held = (*model.main.held, *(replace(one, name=names[one.name]) for one in block.held if one.kind != "x"))
    position = model.main.nodes.index(at)
    main = model.main.with_(held=held, nodes=(*model.main.nodes[:position], *nodes, *model.main.nodes[position:]))
    end = names[block.outputs[0]]
    return model.with_(
        main=_replaced(main, at, end), terms=_renamed_terms(model.terms, at.outs[0], end), block=None, repeats=0, recompute="none", modes=()
    )


def _shorter(model: Model, which: str) -> Iterator[Model]:
    """Without one node: what it made is one of its inputs, or comes from outside."""
    graph: ModelGraph = getattr(model, which)
    shapes = _shapes(model, graph)
    if shapes is None:
        return
    for node in reversed(graph.nodes):
        if node.op == "blocks":
            continue
        stands = [
            one for one in node.inputs
            if isinstance(one, str) and len(node.outs) == 1 and shapes[one] == shapes[node.outs[0]]
        ]  # fmt: skip
        for one in dict.fromkeys(stands):
            yield _with(model, which, _replaced(graph, node, one), {node.outs[0]: one})
        if which == "main":
            made = [Held(f"x_{out}", "x", shapes[out][0]) for out in node.outs if shapes[out][1] == "float32"]
            if len(made) == len(node.outs):
                names = dict(zip(node.outs, (one.name for one in made), strict=True))
                outside = graph.with_(held=(*graph.held, *made), nodes=tuple(one for one in graph.nodes if one is not node))
                yield _with(model, which, _renamed(outside, names), names)


def _plainer(model: Model) -> Iterator[Model]:
    plain: list[dict[str, Any]] = [
        {"accumulate": 1}, {"clip": None}, {"recompute": "none"}, {"optimizer": "sgd"}, {"forgets": False},
        {"modes": tuple("keep" for _ in model.modes)}, {"modes": tuple("recompute" for _ in model.modes)},
    ]  # fmt: skip
    for change in plain:
        if any(getattr(model, name) != value for name, value in change.items()):
            if change.get("modes") and set(model.modes) <= {"keep", change["modes"][0]} and change["modes"][0] != "keep":
                continue
            yield model.with_(**change)
    for which, graph in (("main", model.main), ("block", model.block)):
        for one in graph.held if graph is not None else ():
            if one.kind == "frozen":
                assert graph is not None
                yield model.with_(**{which: graph.with_(held=tuple(replace(h, kind="p") if h is one else h for h in graph.held))})


def _narrower(model: Model) -> Iterator[Model]:
    """Every size of some value halved, wherever it stands."""
    graphs = [model.main, *([model.block] if model.block is not None else [])]
    sizes = {size for graph in graphs for one in graph.held for size in one.shape}
    sizes |= {value for graph in graphs for node in graph.nodes for value in node.args.values() if type(value) is int and value > 4}
    for size in sorted((size for size in sizes if size > 4), reverse=True):
        for smaller in {max(2, size // 4), size // 2}:
            changed = {"main": _resized(model.main, size, smaller)}
            if model.block is not None:
                changed["block"] = _resized(model.block, size, smaller)
            yield model.with_(**changed)


def _resized(graph: ModelGraph, size: int, smaller: int) -> ModelGraph:
    def shape_of(shape: Shape) -> Shape:
        return tuple(smaller if one == size else one for one in shape)

    held = tuple(replace(one, shape=shape_of(one.shape), high=min(one.high, smaller) if one.high == size else one.high) for one in graph.held)
    nodes = tuple(
        replace(node, inputs=tuple(shape_of(one) if isinstance(one, tuple) else one for one in node.inputs),
                args={name: smaller if type(value) is int and value == size else value for name, value in node.args.items()})
        for node in graph.nodes
    )  # fmt: skip
    return graph.with_(held=held, nodes=nodes)


# ---------------------------------------------------------------------------------------------- graphs


def _shapes(model: Model, graph: ModelGraph) -> dict[str, tuple[Shape, str]] | None:
    try:
        return shapes_of(model) if graph is model.main else shapes_of(model.with_(main=graph, block=None))
    except (Broken, KeyError):
        return None


def _with(model: Model, which: str, graph: ModelGraph, names: dict[str, str]) -> Model:
    if which == "block":
        return model.with_(block=graph)
    return model.with_(main=graph, terms=tuple(replace(term, value=names.get(term.value, term.value)) for term in model.terms))


def _renamed_terms(terms: Sequence[Term], old: str, new: str) -> tuple[Term, ...]:
    return tuple(replace(term, value=new if term.value == old else term.value) for term in terms)


def _replaced(graph: ModelGraph, gone: CallNode, stands: str) -> ModelGraph:
    kept = graph.with_(nodes=tuple(node for node in graph.nodes if node is not gone))
    return _renamed(kept, dict.fromkeys(gone.outs, stands))


def _renamed(graph: ModelGraph, names: dict[str, str]) -> ModelGraph:
    nodes = tuple(
        replace(node, inputs=tuple(names.get(one, one) if isinstance(one, str) else one for one in node.inputs))
        for node in graph.nodes
    )
    return graph.with_(nodes=nodes, outputs=tuple(names.get(out, out) for out in graph.outputs))


def _tidied(model: Model) -> Model | None:
    """Without what nothing needs; None where it is no model any more."""
    terms = tuple({term.value: term for term in model.terms}.values())
    main = _needed(model.main.with_(outputs=tuple(term.value for term in terms)))
    if not terms or not main.nodes:
        return None
    calls = any(node.op == "blocks" for node in main.nodes)
    block = _needed(model.block) if model.block is not None and calls else None
    tidy = model.with_(main=main, block=block, terms=terms)
    if block is None:
        tidy = tidy.with_(repeats=0, modes=(), recompute="none")
    try:
        shapes = shapes_of(tidy)
    except (Broken, KeyError):
        return None
    return tidy if all(shapes[term.value][0] or term.how != "logits" for term in terms) else None


def _needed(graph: ModelGraph) -> ModelGraph:
    """What the outputs come from."""
    wanted = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if wanted & set(node.outs):
            nodes.append(node)
            wanted |= {one for one in node.inputs if isinstance(one, str)}
    held = tuple(one for one in graph.held if one.name in wanted)
    if not any(one.kind == "x" for one in held):  # forward takes something
        held = (*[one for one in graph.held if one.kind == "x"][:1], *held)
    return graph.with_(held=held, nodes=tuple(reversed(nodes)))
