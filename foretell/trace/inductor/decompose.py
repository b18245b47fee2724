"""What Inductor takes composite ops apart into: activations, norms, softmax, losses, pools.

Written down from the graphs of torch 2.11; a test holds what follows from them against torch's own partition. Numbers
inside a formula are only told apart, not computed with. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from foretell.trace.inductor.graph import EXTERN, POINTWISE, Graph, Node
from foretell.trace.types import Op, TensorSpec

Rule = Callable[[Graph, Op, list[Node]], list[Node]]
"""From a graph, an op and the nodes it reads to the nodes of its outputs."""


def random(graph: Graph, spec: TensorSpec) -> Node:
    """Numbers drawn inside a kernel, from a seed that is drawn once for the whole graph."""
    seed = graph.add("seeds", EXTERN, (), TensorSpec((1,), "int64"))
    seed.name, seed.fusible = "aten.randint.low_out", False
    return graph.add("random", POINTWISE, (seed,), spec, once=False)


def reduced(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    """Dimensions that are gone, as far as shapes tell; the last ones where they do not."""
    if len(before) == len(after):
        return [dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    gone: list[int] = []
    position = 0
    for dim, size in enumerate(before):
        if position < len(after) and after[position] == size:
            position += 1
        else:
            gone.append(dim)
    return gone


# ---------------------------------------------------------------- activations


def _gelu(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    half = g.pointwise("mul", x, const=0.5)
    inner = g.pointwise("add", g.pointwise("erf", g.pointwise("mul", x, const=0.7071)), const=1)
    return [g.cast(g.pointwise("mul", half, inner), op.outputs[0].spec.dtype)]


def _gelu_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x = g.wide(given[0]), g.wide(given[1])
    inner = g.pointwise("add", g.pointwise("erf", g.pointwise("mul", x, const=0.7071)), const=1)
    left = g.pointwise("mul", inner, const=0.5)
    bell = g.pointwise("exp", g.pointwise("mul", g.pointwise("mul", x, x), const=-0.5))
    slope = g.pointwise("add", left, g.pointwise("mul", x, g.pointwise("mul", bell, const=0.3989)))
    return [g.cast(g.pointwise("mul", grad, slope), op.outputs[0].spec.dtype)]


def _silu(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    below = g.pointwise("add", g.pointwise("exp", g.pointwise("neg", x)), const=1)
    return [g.cast(g.pointwise("div", x, below), op.outputs[0].spec.dtype)]


def _silu_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x = g.wide(given[0]), g.wide(given[1])
    below = g.pointwise("add", g.pointwise("exp", g.pointwise("neg", x)), const=1)
    gate = g.pointwise("mul", g.pointwise("reciprocal", below), const=1)
    rest = g.pointwise("mul", x, g.pointwise("sub", gate, const="1-"))
    return [g.cast(
        g.pointwise("mul", g.pointwise("mul", grad, gate), g.pointwise("add", rest, const=1)), op.outputs[0].spec.dtype
    )]  # fmt: skip


def _threshold_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    off = g.pointwise("le", given[1], dtype="bool", const=0)
    return [g.pointwise("where", off, given[0], dtype=op.outputs[0].spec.dtype)]


def _softplus(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    big = g.pointwise("gt", x, dtype="bool", const=20)
    soft = g.pointwise("log1p", g.pointwise("exp", x))
    return [g.cast(g.pointwise("where", big, x, soft, dtype=x.spec.dtype), op.outputs[0].spec.dtype)]


def _softplus_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x = g.wide(given[0]), g.wide(given[1])
    scaled = g.pointwise("mul", x, const=1)
    power = g.pointwise("exp", scaled)
    big = g.pointwise("gt", scaled, dtype="bool", const=20)
    slope = g.pointwise("div", g.pointwise("mul", grad, power), g.pointwise("add", power, const=1.0))
    return [g.cast(g.pointwise("where", big, grad, slope, dtype=grad.spec.dtype), op.outputs[0].spec.dtype)]


def _masked_fill(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    spec = op.outputs[0].spec
    return [g.pointwise("where", given[1], given[0], dtype=spec.dtype, shape=spec.shape, once=False)]


def _clamp(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    low = g.pointwise("clamp_min", given[0], once=False)
    return [g.pointwise("clamp_max", low, once=False)]


def _dropout(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = given[0]
    noise = random(g, x.spec)
    mask = g.pointwise("gt", noise, dtype="bool", const="p")
    kept = g.pointwise("mul", mask, x, dtype=x.spec.dtype)
    return [g.pointwise("mul", kept, const="scale"), mask]


def _dropout_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, mask = given
    scaled = g.pointwise("mul", g.cast(mask, grad.spec.dtype), const="scale")
    return [g.pointwise("mul", grad, scaled)]


# ---------------------------------------------------------------- norms and softmax


def _trailing(whole: TensorSpec, rows: TensorSpec) -> list[int]:
    """Dimensions of `whole` that are 1 in the statistics of its rows."""
    found = [dim for dim, size in enumerate(whole.shape) if dim >= len(rows.shape) or rows.shape[dim] != size]
    return found or [len(whole.shape) - 1]


def _layer_norm(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    dims = _trailing(x.spec, op.outputs[1].spec)
    both = g.reduce("var_mean", x, dims, keepdim=True)
    both.strided = "strided:0" in op.attrs
    var, mean = g.items(both, [both.spec, both.spec])
    rstd = g.pointwise("rsqrt", g.pointwise("add", var, const="eps"))
    y = g.pointwise("mul", g.pointwise("sub", x, mean), rstd)
    for factor, how in zip(given[1:3], ("mul", "add"), strict=False):
        y = g.pointwise(how, y, factor)
    return [g.cast(y, op.outputs[0].spec.dtype), mean, rstd]


def _layer_norm_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x, mean, rstd = g.wide(given[0]), g.wide(given[1]), given[2], given[3]
    weight = g.wide(given[4]) if len(given) > 4 else None
    dims = _trailing(x.spec, mean.spec)
    normal = g.pointwise("mul", g.pointwise("sub", x, mean), rstd)
    scaled = g.pointwise("mul", grad, weight) if weight is not None else grad
    times = g.pointwise("mul", scaled, const="n")
    total = g.reduce("sum", scaled, dims, keepdim=True)
    along = g.reduce("sum", g.pointwise("mul", scaled, normal), dims, keepdim=True)
    inside = g.pointwise("sub", g.pointwise("sub", times, total), g.pointwise("mul", normal, along))
    outputs: list[Node] = []
    rows = [dim for dim in range(len(x.spec.shape)) if dim not in dims]
    for ref in op.outputs:
        if ref.spec.shape == x.spec.shape and not outputs:
            result = g.pointwise("mul", g.pointwise("div", rstd, const="n"), inside)
        elif len(outputs) == 1:
            result = g.reduce("sum", g.pointwise("mul", grad, normal), rows)
        else:
            result = g.reduce("sum", grad, rows)
        outputs.append(g.cast(result, ref.spec.dtype))
    return outputs


def _rms_norm(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    mean = g.reduce("mean", g.pointwise("pow", x, const=2), _trailing(x.spec, op.outputs[1].spec), keepdim=True)
    rstd = g.pointwise("rsqrt", g.pointwise("add", mean, const="eps"))
    y = g.pointwise("mul", x, rstd)
    if len(given) > 1:
        y = g.pointwise("mul", y, given[1])
    return [g.cast(y, op.outputs[0].spec.dtype), rstd]


def _rms_norm_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x, rstd = g.wide(given[0]), g.wide(given[1]), given[2]
    weight = g.wide(given[3]) if len(given) > 3 else None
    dims = _trailing(x.spec, rstd.spec)
    scaled = g.pointwise("mul", grad, weight) if weight is not None else grad
    normal = g.pointwise("mul", x, rstd)
    along = g.reduce("sum", g.pointwise("mul", normal, scaled), dims, keepdim=True)
    inside = g.pointwise("sub", scaled, g.pointwise("mul", g.pointwise("div", normal, const="n"), along))
    outputs: list[Node] = []
    for ref in op.outputs:
        if ref.spec.shape == x.spec.shape and not outputs:
            result = g.pointwise("mul", inside, rstd)
        else:
            rows = [dim for dim in range(len(x.spec.shape)) if dim not in dims]
            result = g.reduce("sum", g.pointwise("mul", grad, normal), rows)
        outputs.append(g.cast(result, ref.spec.dtype))
    return outputs


def _channels(x: TensorSpec) -> tuple[list[int], tuple[int, ...]]:
    """Dimensions that batch norm reduces, and the shape of its statistics beside the input."""
    dims = [dim for dim in range(len(x.shape)) if dim != 1]
    return dims, tuple(size if dim == 1 else 1 for dim, size in enumerate(x.shape))


def _batch_norm(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    dims, shape = _channels(x.spec)
    both = g.reduce("var_mean", x, dims, keepdim=True)
    var, mean = g.items(both, [both.spec, both.spec])
    rstd = g.pointwise("rsqrt", g.pointwise("add", var, const="eps"))
    y = g.pointwise("mul", g.pointwise("sub", x, mean), rstd)
    for factor, how in zip(given[1:3], ("mul", "add"), strict=False):
        y = g.pointwise(how, y, g.view("unsqueeze", factor, shape))
    results = [g.cast(y, op.outputs[0].spec.dtype)]
    for node, ref in zip((mean, rstd), op.outputs[1:3], strict=False):
        results.append(g.view("squeeze", node, ref.spec.shape))
    return results + [g.create("full", ref.spec, const="reserve") for ref in op.outputs[3:]]


def _batch_norm_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x = g.wide(given[0]), g.wide(given[1])
    dims, shape = _channels(x.spec)
    vectors = [node for node in given[2:] if node.spec.shape == (x.spec.shape[1],)]
    weight, mean, rstd = vectors[0], vectors[-2], vectors[-1]
    total = g.reduce("sum", grad, dims)
    centred = g.pointwise("sub", x, g.view("unsqueeze", mean, shape))
    along = g.reduce("sum", g.pointwise("mul", grad, centred), dims)
    outputs: list[Node] = []
    for ref in op.outputs:
        if ref.spec.shape == x.spec.shape and not outputs:
            square = g.pointwise("mul", rstd, rstd)
            share = g.pointwise("mul", g.pointwise("mul", along, const="n"), square)
            shift = g.view("unsqueeze", g.pointwise("mul", total, const="n"), shape)
            left = g.pointwise("sub", grad, g.pointwise("mul", centred, g.view("unsqueeze", share, shape)))
            factor = g.view("unsqueeze", g.pointwise("mul", rstd, weight), shape)
            result = g.pointwise("mul", g.pointwise("sub", left, shift), factor)
        elif len(outputs) == 1:
            result = g.pointwise("mul", along, rstd)
        else:
            result = total
        outputs.append(g.cast(result, ref.spec.dtype))
    return outputs


def _group_norm(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    batch, groups = op.outputs[1].spec.shape
    grouped = g.view("view", x, (batch, groups, x.numel // (batch * groups)))
    both = g.reduce("var_mean", grouped, [2], keepdim=True)
    var, mean = g.items(both, [both.spec, both.spec])
    rstd = g.pointwise("rsqrt", g.pointwise("add", var, const="eps"))
    y = g.pointwise("mul", g.pointwise("sub", grouped, mean), rstd)
    y = g.view("view", y, x.spec.shape)
    _, shape = _channels(x.spec)
    for factor, how in zip(given[1:3], ("mul", "add"), strict=False):
        y = g.pointwise(how, y, g.view("unsqueeze", factor, shape))
    stats = [g.view("squeeze", node, (batch, groups)) for node in (mean, rstd)]
    return [g.cast(y, op.outputs[0].spec.dtype), *stats]


def _group_norm_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, x, mean, rstd = g.wide(given[0]), g.wide(given[1]), given[2], given[3]
    batch, channels = x.spec.shape[:2]
    flat = (batch, channels, x.numel // (batch * channels))
    along = g.reduce("sum", g.view("view", g.pointwise("mul", grad, x), flat), [2])
    total = g.reduce("sum", g.view("view", grad, flat), [2])
    outputs: list[Node] = []
    for ref in op.outputs:
        if ref.spec.shape == x.spec.shape and not outputs:
            groups = mean.spec.shape[1]
            each = (batch, groups, channels // groups)
            parts = [g.reduce("sum", g.view("view", node, each), [2]) for node in (along, total)]
            share = g.pointwise("mul", g.pointwise("sub", *parts), g.pointwise("mul", mean, rstd))
            wide = (batch, groups, 1, 1)
            grouped = (batch, groups, channels // groups, flat[2])
            left = g.pointwise("mul", g.view("view", grad, grouped), g.view("unsqueeze", rstd, wide))
            right = g.pointwise("mul", g.view("view", x, grouped), g.view("unsqueeze", share, wide))
            result = g.view("view", g.pointwise("add", left, right), x.spec.shape)
        else:
            result = g.reduce("sum", along if len(outputs) == 1 else total, [0])
        outputs.append(g.cast(result, ref.spec.dtype))
    return outputs


def _softmax(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    last = [len(x.spec.shape) - 1]
    power = g.pointwise("exp", g.pointwise("sub", x, g.reduce("amax", x, last, keepdim=True)))
    y = g.cast(g.pointwise("div", power, g.reduce("sum", power, last, keepdim=True)), op.outputs[0].spec.dtype)
    if "_safe" in op.name:
        masked = g.pointwise("eq", given[0], dtype="bool", const="-inf")
        some = g.reduce("any", g.pointwise("logical_not", masked), last, keepdim=True)
        y = g.pointwise("where", g.pointwise("logical_not", some), y, dtype=y.spec.dtype)
    return [y]


def _softmax_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, y = g.wide(given[0]), g.wide(given[1])
    product = g.pointwise("mul", grad, y)
    total = g.reduce("sum", product, [len(y.spec.shape) - 1], keepdim=True)
    return [g.cast(g.pointwise("fma", g.pointwise("neg", y), total, product), op.outputs[0].spec.dtype)]


def _log_softmax(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    x = g.wide(given[0])
    dims = [1 if len(x.spec.shape) == 4 else len(x.spec.shape) - 1]
    shifted = g.pointwise("sub", x, g.reduce("amax", x, dims, keepdim=True))
    total = g.reduce("sum", g.pointwise("exp", shifted), dims, keepdim=True)
    return [g.cast(g.pointwise("sub", shifted, g.pointwise("log", total)), op.outputs[0].spec.dtype)]


def _log_softmax_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, y = g.wide(given[0]), g.wide(given[1])
    dims = [1 if len(y.spec.shape) == 4 else len(y.spec.shape) - 1]
    total = g.reduce("sum", grad, dims, keepdim=True)
    left = g.pointwise("sub", grad, g.pointwise("mul", g.pointwise("exp", y), total))
    return [g.cast(left, op.outputs[0].spec.dtype)]


# ---------------------------------------------------------------- losses and pools


def _nll(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    scores, target = given[0], given[1]
    valid = g.pointwise("ne", target, dtype="bool", const="ignore")
    place = g.pointwise("where", valid, target, dtype="int64")
    spec = TensorSpec(target.spec.shape, scores.spec.dtype)
    picked = g.pointwise("neg", g.add("gather", POINTWISE, (scores, place), spec))
    every = list(range(len(target.spec.shape)))
    count = g.cast(g.reduce("sum", valid, every, dtype="int64"), scores.spec.dtype)
    total = g.reduce("sum", g.pointwise("where", valid, picked, dtype=scores.spec.dtype), every)
    return [g.pointwise("div", total, count), count]


def _nll_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    grad, scores, target, count = given[0], given[1], given[2], given[-1]
    shape = scores.spec.shape
    column = g.view("unsqueeze", target, (*target.spec.shape[:1], 1, *target.spec.shape[1:]))
    valid = g.pointwise("ne", column, dtype="bool", const="ignore")
    place = g.pointwise("where", valid, column, dtype="int64")
    # A scatter of one number into zeros becomes a comparison with the position.
    hit = g.pointwise("eq", place, g.create("iota", TensorSpec(shape[1:2], "int64")), dtype="bool", shape=shape)
    share = g.pointwise("where", valid, g.pointwise("div", grad, count), dtype=scores.spec.dtype)
    return [g.pointwise("mul", g.pointwise("where", hit, dtype=scores.spec.dtype), share)]


def _mse(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    square = g.pointwise("pow", g.pointwise("sub", given[0], given[1]), const=2)
    if op.outputs[0].spec.shape:
        return [square]
    return [g.reduce("mean", square, range(len(square.spec.shape)))]


def _mse_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    off = g.pointwise("mul", g.pointwise("sub", given[1], given[2]), const="2/n")
    return [g.pointwise("mul", off, given[0], dtype=op.outputs[0].spec.dtype)]


def _max_pool(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """The place of the maximum is kept as an offset inside the window: one byte."""
    both = g.add("max_pool", POINTWISE, given, op.outputs[0].spec)
    offset = TensorSpec(op.outputs[1].spec.shape, "int8")
    largest, place = g.items(both, [op.outputs[0].spec, offset])
    return [largest, g.cast(place, op.outputs[1].spec.dtype)]


def _max_pool_backward(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    """torch 2.11 hands the input of the pool to backward, which needs no more than its shape."""
    return [g.add("max_pool_backward", POINTWISE, (given[0], given[2], given[1]), op.outputs[0].spec)]


def _linalg_vector_norm(g: Graph, op: Op, given: list[Node]) -> list[Node]:
    square = g.pointwise("pow", given[0], const=2)
    dims = reduced(square.spec.shape, op.outputs[0].spec.shape)
    total = g.reduce("sum", square, dims, keepdim=len(op.outputs[0].spec.shape) == len(square.spec.shape))
    return [g.pointwise("pow", total, const=0.5)]


PARTS: dict[str, Rule] = {
    "gelu": _gelu, "gelu_backward": _gelu_backward, "silu": _silu, "silu_backward": _silu_backward,
    "threshold_backward": _threshold_backward, "softplus": _softplus, "softplus_backward": _softplus_backward,
    "masked_fill": _masked_fill, "clamp": _clamp, "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward, "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward, "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward, "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm, "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm_backward": _batch_norm_backward, "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward, "_softmax": _softmax, "_safe_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax": _log_softmax,
    "_log_softmax_backward_data": _log_softmax_backward, "nll_loss_forward": _nll, "nll_loss2d_forward": _nll,
    "nll_loss_backward": _nll_backward, "nll_loss2d_backward": _nll_backward, "mse_loss": _mse,
    "mse_loss_backward": _mse_backward, "max_pool2d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": _max_pool_backward, "linalg_vector_norm": _linalg_vector_norm,
}  # fmt: skip
"""By the name of the op, without its overload."""
