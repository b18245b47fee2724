"""What Inductor makes of an op: the nodes it becomes, with CUDA's choices.

Composite ops are taken apart (`compiled_parts`), views stay views, one op per element is one node, products may be
padded. An op without a rule stays whole, as Inductor's fallback leaves it. The rules are those of torch 2.11. Plain
data, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.trace.inductor.decompose import PARTS, Rule, random, reduced
from foretell.trace.inductor.graph import (
    BROADCAST,
    EXTERN,
    FUSIBLE,
    PERMUTED,
    POINTWISE,
    SCATTER,
    SLICED,
    STRAIGHT,
    VIEW,
    Graph,
    Node,
    promote,
    without_ones,
    words,
)
from foretell.trace.types import Op, Ref, TensorSpec

SAME = frozenset({"detach", "alias", "lift", "lift_fresh", "lift_fresh_copy", "conj", "resolve_conj", "resolve_neg"})
"""Ops that hand on what they are given."""

VIEWS: dict[str, tuple[str, str]] = {
    "view": ("view", STRAIGHT), "_unsafe_view": ("view", STRAIGHT), "reshape": ("view", STRAIGHT),
    "_reshape_alias": ("view", STRAIGHT), "squeeze": ("squeeze", STRAIGHT), "unsqueeze": ("unsqueeze", STRAIGHT),
    "view_as_real": ("view_as_real", STRAIGHT), "view_as_complex": ("view_as_complex", STRAIGHT),
    "expand": ("expand", BROADCAST), "t": ("permute", PERMUTED), "transpose": ("permute", PERMUTED),
    "permute": ("permute", PERMUTED), "movedim": ("permute", PERMUTED), "numpy_T": ("permute", PERMUTED),
    "slice": ("slice", SLICED), "select": ("select", SLICED), "narrow": ("slice", SLICED),
    "as_strided": ("as_strided", SLICED), "diagonal": ("diagonal", SLICED), "unfold": ("as_strided", SLICED),
}  # fmt: skip
"""Op → what the partitioner calls it, and how it walks through what it looks at."""
_SPLITS = {"split": "split", "split_with_sizes": "split_with_sizes", "unbind": "unbind", "chunk": "split"}

_CREATE = words(
    """arange zeros ones full empty empty_like zeros_like ones_like full_like new_zeros new_ones new_full new_empty
    scalar_tensor linspace eye empty_strided new_empty_strided fill zero"""
)
_RANDOM = words("rand randn rand_like randn_like randint randint_like bernoulli normal uniform")
_REDUCE = words("sum mean amax amin max min prod any all argmax argmin var std norm")
_ELEMENTWISE = FUSIBLE - _CREATE - _REDUCE - {
    "view", "permute", "t", "slice", "select", "split", "squeeze", "unsqueeze", "expand", "item", "iota", "var_mean",
}  # fmt: skip
_ALONE = words(
    """constant_pad_nd repeat flip roll avg_pool2d avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward reflection_pad2d replication_pad2d
    hardswish hardswish_backward leaky_relu leaky_relu_backward elu_backward hardtanh_backward hardsigmoid_backward
    mish_backward glu glu_backward log_sigmoid_backward prelu smooth_l1_loss_backward huber_loss_backward
    binary_cross_entropy_backward tril rot90 pixel_shuffle pixel_unshuffle"""
)
"""One value per element, in ways that the partitioner does not expect to compute again."""
_OF_ONE = words("exp neg cos sin log abs rsqrt sqrt tanh relu sigmoid reciprocal erf logical_not")
"""Functions of one tensor and nothing else: two of the same are the same."""
_SCATTERS = words(
    "index_put _index_put_impl index_add scatter scatter_add scatter_reduce index_copy put masked_scatter"
)


def base_name(name: str) -> str:
    """`aten.relu_.default` → relu_."""
    return name.split(".", 2)[1] if name.startswith("aten.") else name


def translate(graph: Graph, op: Op, given: list[Node]) -> list[Node]:
    """The nodes of an op's outputs, in order."""
    name = base_name(op.name)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    wanted = [ref.spec for ref in op.outputs]
    if not wanted:
        return []
    if name in SAME and given:
        return [given[0]] * len(wanted)
    if name in VIEWS and given:
        place = tuple(value for value in op.attrs if not isinstance(value, str))
        return [_view(graph, *VIEWS[name], given[0], wanted[0], place)]
    if name in _SPLITS and given:
        parent = graph.add(_SPLITS[name], VIEW, given[:1], given[0].spec, mode=SLICED, const=tuple(wanted))
        return graph.items(parent, wanted)
    before = len(graph.nodes)
    made = None
    if not any(ref.spec.dtype.startswith("complex") for ref in (*op.inputs, *op.outputs)):
        rule = PARTS.get(name) or _RULES.get(name)
        made = rule(graph, op, given) if rule is not None else _plain(graph, name, op, given)
    if made is None:
        made = extern(graph, op, given)
    for node in reversed(graph.nodes[before:]):  # the op's work is that of the last new node that computes
        if node.kind != VIEW and node.op != "item":
            node.flops = op.flops
            break
    return made


def _view(
    graph: Graph, kind: str, mode: str, node: Node, spec: TensorSpec, place: tuple[int | float | bool, ...] = ()
) -> Node:
    if mode in (SLICED, BROADCAST) and spec.shape == node.spec.shape:
        return node
    sizes = without_ones(spec.shape)
    if mode == PERMUTED and sizes and sizes == without_ones(node.spec.shape) and len(set(sizes)) == len(sizes):
        return graph.view("view", node, spec.shape)  # only dimensions of size one moved
    # Two parts of the same size may be different parts, unless the trace says where they lie.
    return graph.add(kind, VIEW, (node,), spec, mode=mode, const=place, once=mode != SLICED or bool(place))


def _plain(graph: Graph, name: str, op: Op, given: list[Node]) -> list[Node] | None:
    """Ops that are one node each; None for those that are nothing of the kind."""
    spec = op.outputs[0].spec
    if name in _CREATE:
        value = next((value for value in ("zero", "one", "empty") if value in name), name)
        return [graph.create("iota" if name == "arange" else "full", spec, const=value)]
    if name in _RANDOM:
        return [random(graph, spec)]
    if name in ("_to_copy", "to") and given[0].spec.dtype != spec.dtype:
        return [graph.cast(given[0], spec.dtype)]
    if name in ("clone", "contiguous", "_to_copy", "to"):
        return [_clone(graph, given[0])]
    if name == "copy" and len(given) == 2:  # what was there is overwritten
        return [graph.cast(_view(graph, "expand", BROADCAST, given[1], spec), spec.dtype)]
    if name in _REDUCE and given and spec.numel < given[0].numel:
        return [_reduction(graph, name, op, given[0], ref.spec) for ref in op.outputs]
    if name in _SCATTERS:
        return _scatter(graph, name, op, given)
    if len(op.outputs) == 1 and (name in _ELEMENTWISE or name in _ALONE):
        return [graph.add(name, POINTWISE, given, spec, once=len(given) > 1 or name in _OF_ONE)]
    return None


def _clone(graph: Graph, node: Node) -> Node:
    """A copy; of a value that lies in memory in order it is no work at all."""
    looked = node
    while looked.kind == VIEW:
        if looked.mode != STRAIGHT:
            return graph.add("clone", POINTWISE, (node,), node.spec)
        looked = looked.inputs[0]
    return node


def _reduction(graph: Graph, name: str, op: Op, node: Node, spec: TensorSpec) -> Node:
    dims = [value for value in op.attrs if isinstance(value, int) and not isinstance(value, bool)]
    keepdim = len(spec.shape) == len(node.spec.shape)
    made = graph.reduce(name, node, dims or reduced(node.spec.shape, spec.shape), keepdim=keepdim, dtype=spec.dtype)
    return made if made.spec.shape == spec.shape else graph.view("view", made, spec.shape)


def _scatter(graph: Graph, name: str, op: Op, given: list[Node]) -> list[Node]:
    adds = "add" in name or "reduce" in name or ("index_put" in name and True in op.attrs)
    spec = op.outputs[0].spec
    if adds and spec.dtype == "bfloat16":  # no atomic addition in this dtype: left to the library
        made = extern(graph, op, given)
        made[0].name = op.name.replace(f".{name}_.", f".{name}.")
        return made
    return [graph.add("scatter", SCATTER, given, spec, once=False)]


def extern(graph: Graph, op: Op, given: Sequence[Node], specs: Sequence[TensorSpec] | None = None) -> list[Node]:
    """A library kernel, or an op that Inductor leaves to one."""
    wanted = list(specs) if specs is not None else [ref.spec for ref in op.outputs]
    node = graph.add(base_name(op.name), EXTERN, given, wanted[0], const=(op.attrs, len(wanted)))
    node.name, node.attrs, node.fusible = op.name, op.attrs, False
    return [node] if len(wanted) == 1 else graph.items(node, wanted)


def write_into(graph: Graph, whole: Node, part: Ref, value: Node) -> Node:
    """An op in place on a part of a tensor, as a new value of the whole."""
    if part.spec.numel == whole.numel:
        return value if part.spec == whole.spec else graph.view("view", value, whole.spec.shape)
    return graph.add("slice_scatter", POINTWISE, (whole, value), whole.spec, once=False)


# ---------------------------------------------------------------- moving and selecting


def _embedding(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    return [g.add("embedding", POINTWISE, given, op.outputs[0].spec)]


def _embedding_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """Zeros, and the gradients of the rows added to them in float32."""
    grad, place = g.wide(given[0]), given[1]
    padding = g.pointwise("eq", place, dtype="bool", const="padding")
    masked = g.pointwise("where", padding, grad, dtype=grad.spec.dtype, shape=grad.spec.shape)
    spec = TensorSpec(op.outputs[0].spec.shape, grad.spec.dtype)
    summed = g.add("scatter", SCATTER, (g.create("full", spec, const="zero"), place, masked), spec, once=False)
    return [g.cast(summed, op.outputs[0].spec.dtype)]


def _index_select(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    return [g.add("index", POINTWISE, given, op.outputs[0].spec)]


def _part_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """Zeros with the gradient in their midst."""
    return [g.add("slice_scatter", POINTWISE, given, op.outputs[0].spec)]


def _cat(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    full = [node for node in given if node.numel] or given
    if len(full) == 1:
        return [_clone(g, full[0])]
    return [g.add("cat", POINTWISE, full, TensorSpec(op.outputs[0].spec.shape, promote([node.spec for node in full])))]


def _nearest(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """Rows and columns looked up. It is taken apart before autocast sees it, so that its input is not cast to float32."""
    source, spec = given[0], op.outputs[0].spec
    if source.op == "cast" and spec.dtype == "float32" and source.inputs[0].spec.dtype in ("bfloat16", "float16"):
        source = source.inputs[0]
    return [g.add("upsample_nearest2d", POINTWISE, (source,), TensorSpec(spec.shape, source.spec.dtype))]


# ---------------------------------------------------------------- convolutions and products


def _convolution_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """The gradient of the bias is a sum of its own."""
    grad, specs = given[0], [ref.spec for ref in op.outputs]
    if len(specs) == 1 or len(specs[-1].shape) != 1:
        return extern(g, op, given)
    dims = [dim for dim in range(len(grad.spec.shape)) if dim != 1]
    bias = g.cast(g.reduce("sum", grad, dims), specs[-1].dtype)
    return [*extern(g, op, given, specs[:-1]), bias]


PADDED_TO = 8
"""Sizes of low precision matrices that library kernels want multiples of."""
WORTH_A_LOOK = 100
"""Multiply-adds per element moved from which on padding is tried: half the balance of an H100 or H200."""
FLOPS_PER_SECOND = {8: 7e14, 4: 4e14, 2: 2.5e14, 1: 6e13}
"""Of a product whose sizes are multiples of this; that for 2 was seen on an H200, the others are assumed."""
COPY, TRANSPOSED_COPY = 3e12, 7e11
"""Bytes per second of padding a matrix, and of padding the transpose of one; assumed."""


def _product(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """A product of matrices of odd sizes is computed on padded copies, and the result cut, where that pays."""
    left, right = given[-2], given[-1]
    sizes = (left.spec.shape[0], left.spec.shape[1], right.spec.shape[1])
    to = tuple(size if size == 1 else -(-size // PADDED_TO) * PADDED_TO for size in sizes)
    if to == sizes or left.spec.dtype not in ("bfloat16", "float16") or not _pays(left, right, sizes, to):
        return extern(g, op, given)
    padded = [_pad(g, left, (to[0], to[1])), _pad(g, right, (to[1], to[2]))]
    if len(given) > 2:
        padded.insert(0, _pad(g, given[0], (*given[0].spec.shape[:-1], to[2])))
    made = extern(g, op, padded, [TensorSpec((to[0], to[2]), op.outputs[0].spec.dtype)])[0]
    return [_view(g, "slice", SLICED, made, op.outputs[0].spec)]


def _pays(left: Node, right: Node, sizes: Sequence[int], to: Sequence[int]) -> bool:
    """Whether padding pays. Inductor measures it; here it is worked out from rates."""
    rows, inner, columns = sizes
    if rows * inner * columns <= WORTH_A_LOOK * (rows * inner + inner * columns + rows * columns):
        return False
    step = min((max(d for d in FLOPS_PER_SECOND if size % d == 0) for size in sizes if size > 1), default=PADDED_TO)
    work = 2 * rows * inner * columns
    copies = 0.0
    for node, before, after in ((left, sizes[:2], to[:2]), (right, sizes[1:], to[1:])):
        if before != after:
            turned = node.kind == VIEW and node.mode == PERMUTED
            copies += 2 * node.size / (TRANSPOSED_COPY if turned else COPY)
    return work / FLOPS_PER_SECOND[step] > work / FLOPS_PER_SECOND[PADDED_TO] + copies


def _pad(g: Graph, node: Node, shape: tuple[int, ...]) -> Node:
    if node.spec.shape == shape:
        return node
    return g.add("constant_pad_nd", POINTWISE, (node,), TensorSpec(shape, node.spec.dtype))


_RULES: dict[str, Rule] = {
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward, "index_select": _index_select,
    "slice_backward": _part_backward, "select_backward": _part_backward, "cat": _cat, "stack": _cat,
    "upsample_nearest2d": _nearest,
    "convolution_backward": _convolution_backward, "mm": _product, "addmm": _product,
}  # fmt: skip
