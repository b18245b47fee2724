"""Attention with the masks that transformers builds only under torch.compile.

In eager mode it leaves out a mask that says no more than `is_causal`, or nothing. A compiled model cannot ask, so the mask is
there: a causal one as a bias of the kernel, shared by all layers; a full one has no stride along its last dimension, which no
fused kernel takes, and attention is computed by its formula in float32. Seen on an H200 with torch 2.11 and transformers 5.
Plain data, no torch.
"""

from __future__ import annotations

from foretell.trace.inductor.decompose import PARTS, random
from foretell.trace.inductor.graph import BROADCAST, EXTERN, PERMUTED, POINTWISE, VIEW, Graph, Node
from foretell.trace.types import Op, Ref, TensorSpec

CAUSAL, FULL = "causal", "full"
_KERNELS = tuple(f"_scaled_dot_product_{which}_attention" for which in ("cudnn", "flash", "efficient"))
_BACKWARDS = tuple(f"{name}_backward" for name in _KERNELS)


class Masks:
    """The masks of one step, and attention with them."""

    def __init__(self, kinds: frozenset[str], low: str) -> None:
        self.kinds = kinds
        self.low = low
        """What autocast casts products of backward to, if it does."""
        self._drawn: dict[tuple[int, ...], Node] = {}
        """By what attention reads: which probabilities were dropped."""

    def take(self, graph: Graph, name: str, op: Op, given: list[Node]) -> list[Node] | None:
        """The nodes of an attention op that gets a mask; None for any other op."""
        backward = name in _BACKWARDS
        if not backward and name not in _KERNELS:
            return None
        inputs = given[1:4] if backward else given[:3]
        if len(given) != (8 if backward else 3) or any(len(node.spec.shape) != 4 for node in inputs):
            return None
        kind = CAUSAL if any(value is True for value in op.attrs) else FULL
        if kind not in self.kinds:
            return None
        if kind == CAUSAL:
            return _biased(graph, op, given, inputs)
        return self._formula_backward(graph, op, given) if backward else self._formula(graph, op, given)

    # ------------------------------------------------------------------ attention by its formula

    def _formula(self, g: Graph, op: Op, given: list[Node]) -> list[Node]:
        query, key, value = given
        dropped = self._probabilities(g, op, query, key, value)[-1]
        made = _product(g, _flat(g, dropped), _flat(g, _wide_copy(g, value)))
        shape = (*query.spec.shape[:3], value.spec.shape[3])
        output = g.cast(g.view("view", made, shape), op.outputs[0].spec.dtype)
        rest = [g.create("full", ref.spec, const="unused") for ref in op.outputs[1:]]
        return [output, *rest]

    def _probabilities(self, g: Graph, op: Op, query: Node, key: Node, value: Node) -> tuple[Node, Node, Node, Node | None, Node]:
        """Scaled query and key as they are multiplied, probabilities, what is dropped of them, and what is left."""
        left = _flat(g, _copy(g, g.pointwise("mul", g.wide(query), const="scale")))
        wide = g.wide(key)
        turned = g.add("permute", VIEW, (wide,), TensorSpec(_turned(key.spec.shape), wide.spec.dtype), mode=PERMUTED)
        right = _flat(g, _copy(g, g.pointwise("mul", turned, const="scale")))
        shape = (*query.spec.shape[:3], key.spec.shape[2])
        scores = g.view("view", _product(g, left, right), shape)
        scores = g.pointwise("add", scores, full_mask(g, query, key))
        softmax = Op("aten._safe_softmax.default", (), (Ref(0, scores.spec),), op.module, op.phase, 0)
        whole = PARTS["_safe_softmax"](g, softmax, [scores])[0]
        rate = next((v for v in op.attrs if isinstance(v, float)), 0.0)
        if not rate:
            return left, right, whole, None, whole
        mark = (query.index, key.index, value.index)
        if mark not in self._drawn:
            self._drawn[mark] = g.pointwise("gt", random(g, whole.spec), dtype="bool", const="p")
        kept = self._drawn[mark]
        dropped = g.pointwise("mul", g.pointwise("mul", kept, whole, dtype=whole.spec.dtype), const="scale")
        return left, right, whole, kept, dropped

    def _formula_backward(self, g: Graph, op: Op, given: list[Node]) -> list[Node]:
        grad, query, key, value = given[:4]
        left, right, whole, kept, dropped = self._probabilities(g, op, query, key, value)
        values = _flat(g, _wide_copy(g, value))
        low = self.low or "float32"
        wide = _flat(g, _copy(g, g.wide(grad)))
        to_value = _low_product(g, _turn(g, _flat(g, dropped)), wide, low)
        to_scores = g.view("view", _low_product(g, wide, _turn(g, values), low), whole.spec.shape)
        if kept is not None:
            to_scores = g.pointwise("mul", to_scores, g.pointwise("mul", g.cast(kept, "float32"), const="scale"))
        softmax = Op("aten._softmax_backward_data.default", (), (Ref(0, whole.spec),), op.module, op.phase, 0)
        back = _flat(g, PARTS["_softmax_backward_data"](g, softmax, [to_scores, whole])[0])
        to_key = g.view("view", _low_product(g, _turn(g, left), back, low), _turned(key.spec.shape))
        to_query = g.view("view", _low_product(g, back, _turn(g, right), low), query.spec.shape)
        to_key = g.pointwise("mul", to_key, const="scale")
        to_key = g.add("permute", VIEW, (to_key,), TensorSpec(key.spec.shape, to_key.spec.dtype), mode=PERMUTED)
        results = (g.pointwise("mul", to_query, const="scale"), to_key, g.view("view", to_value, value.spec.shape))
        return [g.cast(node, ref.spec.dtype) for node, ref in zip(results, op.outputs, strict=True)]


def full_mask(g: Graph, query: Node, key: Node) -> Node:
    """A bias of zeros, from a comparison of every query's position with nothing."""
    batch, _, rows, _ = query.spec.shape
    place = g.view("unsqueeze", g.create("iota", TensorSpec((rows,), "int64"), const="mask"), (1, 1, rows, 1))
    seen = g.pointwise("ge", place, dtype="bool", const=0)
    whole = g.view("expand", seen, (batch, 1, rows, key.spec.shape[2]), BROADCAST)
    return g.pointwise("where", whole, dtype=query.spec.dtype)


def causal_mask(g: Graph, query: Node, key: Node) -> Node:
    """A bias of zeros and minus infinity, for every sequence of the batch."""
    batch, _, rows, _ = query.spec.shape
    columns = key.spec.shape[2]
    first = g.view("unsqueeze", g.create("iota", TensorSpec((rows,), "int64"), const="mask"), (1, 1, rows, 1))
    second = g.view("unsqueeze", g.create("iota", TensorSpec((columns,), "int64"), const="mask"), (1, 1, 1, columns))
    seen = g.pointwise("le", second, first, dtype="bool")
    whole = g.view("expand", seen, (batch, 1, rows, columns), BROADCAST)
    return g.pointwise("where", whole, dtype=query.spec.dtype)


def _biased(g: Graph, op: Op, given: list[Node], inputs: list[Node]) -> list[Node]:
    """The fused kernel with a bias, which counts all blocks; flash attention takes none, and the efficient kernel stands in."""
    mask = causal_mask(g, inputs[0], inputs[1])
    attrs = tuple(False if value is True else value for value in op.attrs)
    node = g.add(
        op.name.split(".")[1], EXTERN, [*given, mask], op.outputs[0].spec, const=(attrs, len(op.outputs)),
    )  # fmt: skip
    node.name, node.attrs, node.fusible = op.name.replace("_flash_", "_efficient_"), attrs, False
    node.flops = op.flops
    return g.items(node, [ref.spec for ref in op.outputs])


# ---------------------------------------------------------------- what the formula is made of


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _turn(g: Graph, node: Node) -> Node:
    return g.add("permute", VIEW, (node,), TensorSpec(_turned(node.spec.shape), node.spec.dtype), mode=PERMUTED)


def _copy(g: Graph, node: Node) -> Node:
    """As the library wants it, in order."""
    return g.add("clone", POINTWISE, (node,), node.spec)


def _wide_copy(g: Graph, node: Node) -> Node:
    return _copy(g, g.wide(node))


def _flat(g: Graph, node: Node) -> Node:
    batch, heads, rows, columns = node.spec.shape
    return g.view("view", node, (batch * heads, rows, columns))


def _product(g: Graph, left: Node, right: Node) -> Node:
    spec = TensorSpec((*left.spec.shape[:2], right.spec.shape[2]), left.spec.dtype)
    node = g.add("bmm", EXTERN, (left, right), spec)
    node.name, node.fusible = "aten.bmm.default", False
    node.flops = 2 * spec.numel * left.spec.shape[2]
    return node


def _low_product(g: Graph, left: Node, right: Node, low: str) -> Node:
    """Backward is traced under autocast: products of float32 are cast, and their results cast back."""
    return g.cast(_product(g, g.cast(left, low), g.cast(right, low)), "float32")
