"""Which calls a rank can make on its own part alone: one rule per family of calls. Plain data, no torch.

`decide(name, args, kwargs, setting)` says how the operands of a call must lie so that every rank computes its part of
the answer from its parts of the operands, and how that answer lies. A call without a rule wants everything whole.
Gradients need no rules: a rank differentiates the calls it made, and the ways between places know their own backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.plan import context_rules
from foretell.plan.tensor import adapted as tensor_adapted
from foretell.plan.tensor import products as tensor_products
from foretell.plan.tensor import views as tensor_views
from foretell.plan.tensor.types import (
    PARTIAL,
    Operand,
    Partial,
    Place,
    Refine,
    Refuse,
    Result,
    Setting,
    Shape,
    Shard,
    broadcast,
    operands,
)
from foretell.plan.tensor.views import Rule, chunk, keep, wrap

LIKE_NUMBERS = frozenset({
    "abs", "absolute", "acos", "add", "addcdiv", "addcmul", "and", "asin", "atan", "atan2", "bfloat16", "bitwise_and",
    "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip",
    "clone", "contiguous", "copysign", "cos", "cosh", "cpu", "cuda", "data", "deg2rad", "detach", "div", "divide",
    "double", "elu", "eq", "erf", "erfc", "exp", "exp2", "expm1", "float", "floor", "floor_divide", "floordiv",
    "fmod", "ge", "gelu", "greater", "gt", "half", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "heaviside",
    "int", "invert", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "less", "lgamma", "log", "log10",
    "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid",
    "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mod", "mul", "multiply", "nan_to_num", "ne", "neg",
    "negative", "not_equal", "or", "pos", "positive", "pow", "rdiv", "reciprocal", "relu", "relu6", "remainder",
    "requires_grad_", "rfloordiv", "rmod", "round", "rpow", "rsqrt", "rsub", "rtruediv", "selu", "sigmoid", "sign",
    "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tan",
    "tanh", "tanhshrink", "threshold", "to", "true_divide", "truediv", "trunc", "type", "type_as", "where", "xlogy",
    "xor",
})  # fmt: skip
"""Calls that treat every element alike; names of methods, functions and operators without their underscores."""
CASTS = frozenset({
    "bfloat16", "clone", "contiguous", "cpu", "cuda", "data", "detach", "double", "float", "half", "neg", "negative",
    "pos", "positive", "to", "type", "type_as",
})  # fmt: skip
"""Of these the ones that may be done on partial sums, whatever their other arguments."""
SUMS = frozenset({"add", "sub", "subtract"})
PRODUCTS = frozenset({"mul", "multiply"})
QUOTIENTS = frozenset({"div", "divide", "true_divide", "truediv"})
LIKE_SHAPES = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
"""Calls that read nothing but the shape."""
SHAPED_BY = frozenset({"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"})
OF_FIRST = frozenset({"to", "type", "type_as"})
"""Calls whose other tensors give nothing but a dtype or a device."""
OVER = frozenset({
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "count_nonzero", "cumprod", "cumsum",
    "flip", "kthvalue", "log_softmax", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "nanmean",
    "nansum", "norm", "normalize", "prod", "roll", "softmax", "softmin", "sort", "std", "std_mean", "sum",
    "topk", "var", "var_mean", "vector_norm",
})  # fmt: skip
"""Calls that go over some dimensions and treat the others alike."""
KEEPS = frozenset({
    "argsort", "cumprod", "cumsum", "flip", "log_softmax", "logcumsumexp", "normalize",
    "roll", "softmax", "softmin", "sort", "topk",
})  # fmt: skip
"""Of these the ones whose answers keep those dimensions."""
NAMED_DIM = {"topk": 2, "roll": 2, "norm": 2, "vector_norm": 2, "normalize": 2, "kthvalue": 2}
"""Where the dimension stands among the arguments, if not second."""
KEEPDIM_FOURTH = frozenset({"kthvalue", "norm", "std", "std_mean", "var", "var_mean", "vector_norm"})
"""Calls whose `keepdim` is the fourth argument, not the third."""


def decide(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], setting: Setting) -> Result:
    """What the rule for a call says; raises `Refuse` where there is none or it cannot run on parts."""
    plain, in_place = base_name(name)
    rule = context_rules.RULES.get(plain, ALL.get(plain)) if setting.context else ALL.get(plain)
    if rule is None:
        raise Refuse(f"{plain} has no rule")
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {key: value for key, value in kwargs.items() if key != "input"}
    try:
        result = rule(setting, plain, *args, **kwargs) if rule in NEED_NAME else rule(setting, *args, **kwargs)
    except TypeError as error:
        raise Refuse(f"{plain} is called in a way that has no rule ({error})") from None
    if in_place and not name.startswith("__"):
        first = next(operands(*args))
        if plain in SUMS and isinstance(first.place, Partial):
            return Result(PARTIAL, dict.fromkeys(range(len(list(operands(args, kwargs)))), PARTIAL))
        if result.want.get(first.slot) != first.place or result.places(1)[0] != first.place:
            raise Refuse(f"{plain} writes over a tensor that lies otherwise")
    return result


def base_name(name: str) -> tuple[str, bool]:
    """`__iadd__`, `add_`, `__radd__` → add, and whether it writes over its first operand."""
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        if inner in ("radd", "rmul"):
            return inner[1:], False
        if inner[0] == "i" and inner[1:] in (
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "pow",
            "mod",
            "and",
            "or",
            "xor",
        ):
            return inner[1:], True
        return inner, False
    if name.endswith("_") and not name.startswith("_") and name != "requires_grad_":
        return name[:-1], True
    return name, False


def writes(name: str) -> bool:
    """Whether a call changes its first operand."""
    return name == "__setitem__" or (base_name(name)[1] and not name.startswith("__"))


# ---------------------------------------------------------------- element by element


def elementwise(s: Setting, name: str, *args: Any, **kwargs: Any) -> Result:
    found = list(operands(args, kwargs))
    if name == "where" and len(args) == 1:
        raise Refuse("where finds as many entries as there are")
    if name in OF_FIRST and not (isinstance(found[0].place, Partial) and _rounds(name, args, kwargs)):
        return Result(found[0].place, {x.slot: x.place for x in found}, unread=frozenset(x.slot for x in found[1:]))
    if _stays_partial(name, args, found):
        return Result(PARTIAL, {x.slot: x.place for x in found})
    shape = broadcast([x.shape for x in found])
    if any(isinstance(x.place, Shard) for x in found):
        target = meeting(found, shape)
    else:
        resolved = s.stream(shape)
        if resolved is None:
            return Result(None)
        target = resolved
    return Result(target, {x.slot: aligned(x, target, shape) for x in found})


def _rounds(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a cast may be to whole numbers or truth values, which a sum of casts is not."""
    told = [str(value) for value in (*args[1:], *kwargs.values())]
    return name == "type_as" or any(text.startswith(("torch.int", "torch.uint", "torch.bool")) for text in told)


def _stays_partial(name: str, args: tuple[Any, ...], found: list[Operand]) -> bool:
    """Whether the call of partial sums is the partial sum of the calls."""
    partial = [isinstance(x.place, Partial) for x in found]
    if not any(partial) or any(isinstance(x.place, Shard) for x in found):
        return False
    if name in CASTS:
        return name not in OF_FIRST
    if name in SUMS:
        return all(partial) and all(isinstance(value, Operand) for value in args[:2])
    if name in PRODUCTS:
        return sum(partial) == 1
    return name in QUOTIENTS and partial[0] and sum(partial) == 1 and isinstance(args[0], Operand)


def meeting(found: Sequence[Operand], shape: Shape) -> Shard:
    """Where the answer is split when operands that are broadcast to `shape` meet."""
    lifted = []
    for x in found:
        if isinstance(x.place, Shard):
            place = x.place.at(x.place.dim + len(shape) - len(x.shape))
            lifted.append((x, place))
    layers = [(x, place) for x, place in lifted if not place.stream]
    chosen = (layers or lifted)[0][1]
    for x, place in layers:
        if place.dim != chosen.dim:
            raise Refuse("operands are split along different dimensions")
        match_segments(x, place.segments, layers[0][0], chosen.segments)
    return chosen


def match_segments(x: Operand, mine: tuple[int, ...], other: Operand, theirs: tuple[int, ...]) -> None:
    """Refuse two operands whose split dimensions consist of different segments, or ask for the finer ones."""
    if mine == theirs:
        return
    if sum(mine) == sum(theirs) and len(mine) != len(theirs):
        coarse, finer = (x, theirs) if len(mine) < len(theirs) else (other, mine)
        raise Refine(coarse.slot, finer, "operands consist of different parts")
    raise Refuse("operands consist of different parts")


def aligned(x: Operand, target: Shard, shape: Shape) -> Place:
    """How an operand must lie to meet the others: split where it has that dimension, else whole."""
    dim = target.dim - (len(shape) - len(x.shape))
    if dim < 0 or x.shape[dim] != target.size:
        return None
    return target.at(dim)


def like_shape(s: Setting, x: Operand, *args: Any, **kwargs: Any) -> Result:
    return Result(x.place if isinstance(x.place, Shard) else None, keep(x))


def shaped_by(s: Setting, x: Operand, *args: Any, **kwargs: Any) -> Result:
    """A new tensor that takes nothing but dtype and device."""
    return Result(None, keep(x))


def dropout(s: Setting, x: Operand, p: float = 0.5, training: bool = True, inplace: bool = False) -> Result:
    if not training or p == 0:
        return Result(x.place, keep(x))
    if inplace and not isinstance(x.place, Shard):
        raise Refuse("dropout writes over a tensor that is not whole")
    place = x.place if isinstance(x.place, Shard) else s.stream(x.shape)
    return Result(place, {x.slot: place}, special="random" if place else "")


# ---------------------------------------------------------------- over some dimensions


def over(s: Setting, name: str, *args: Any, **kwargs: Any) -> Result:
    x = args[0]
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Operand):
        return elementwise(s, name, *args, **kwargs)
    given = _dims_of(name, args, kwargs)
    rank = len(x.shape)
    dims = (
        {wrap(d, rank) for d in (given if isinstance(given, tuple) else (given,))}
        if given is not None
        else set(range(rank))
    )
    if isinstance(x.place, Partial):
        return _over_partial(s, name, x, dims, args, kwargs)
    place = x.place
    if not isinstance(place, Shard):
        return Result(None)
    at = 3 if name in KEEPDIM_FOURTH else 2
    keepdim = kwargs.get("keepdim", args[at] if len(args) > at else False) is True
    after = place if name in KEEPS or keepdim else place.at(place.dim - sum(d < place.dim for d in dims))
    if place.dim in dims:
        if name == "sum" and not place.stream:
            return Result(PARTIAL, keep(x))
        raise Refuse(f"{name} goes over the split dimension")
    return Result(after, keep(x))


def _over_partial(
    s: Setting, name: str, x: Operand, dims: set[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Result:
    if name in ("sum", "mean", "cumsum", "flip", "roll"):
        return Result(PARTIAL, keep(x))
    place = s.stream(x.shape)
    if place is None or place.dim in dims:
        return Result(None)
    return over(s, name, Operand(x.slot, x.shape, place), *args[1:], **kwargs)


def _dims_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    for key in ("dim", "dims", "axis"):
        if key in kwargs:
            return kwargs[key]
    at = NAMED_DIM.get(name, 1)
    if len(args) > at:
        return args[at] if not isinstance(args[at], bool) else None
    defaults = {"topk": -1, "sort": -1, "argsort": -1, "normalize": 1, "kthvalue": -1}
    return defaults.get(name)


def norm(s: Setting, x: Operand, normalized_shape: Any, *args: Any, **kwargs: Any) -> Result:
    """layer_norm and rms_norm: over the last dimensions."""
    length = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    place = x.place if isinstance(x.place, Shard) else s.stream(x.shape) if isinstance(x.place, Partial) else None
    if isinstance(place, Shard) and place.dim >= len(x.shape) - length:
        if x.place is place:
            raise Refuse("normalises over the split dimension")
        place = None
    return Result(place, {x.slot: place})


def glu(s: Setting, x: Operand, dim: int = -1) -> Result:
    if not isinstance(x.place, Shard) or x.place.dim != wrap(dim, len(x.shape)):
        if isinstance(x.place, Partial):
            return Result(None)
        return Result(x.place, keep(x))
    halves = chunk(s, x, 2, dim).places(2)
    first, second = halves
    assert isinstance(first, Shard) and isinstance(second, Shard)
    if first.segments != second.segments:
        raise Refuse("its halves consist of different parts")
    return Result(first, keep(x))


def pad(s: Setting, x: Operand, pad: Any, mode: str = "constant", value: Any = None) -> Result:
    touched = {len(x.shape) - 1 - i // 2 for i, size in enumerate(pad) if size}
    if isinstance(x.place, Shard) and x.place.dim not in touched and (mode == "constant" or x.place.stream):
        return Result(x.place, keep(x))
    if isinstance(x.place, Partial) and mode == "constant" and not value:
        return Result(PARTIAL, keep(x))
    if isinstance(x.place, Shard):
        raise Refuse("pads the split dimension")
    return Result(None)


def last_two(s: Setting, x: Operand, *args: Any, **kwargs: Any) -> Result:
    """tril and triu."""
    if isinstance(x.place, Shard) and x.place.dim >= len(x.shape) - 2:
        raise Refuse("looks along the split dimension")
    return Result(x.place, keep(x))


# ---------------------------------------------------------------- by index


def index_select(s: Setting, x: Operand, dim: int, index: Operand) -> Result:
    dim = wrap(dim, len(x.shape))
    if isinstance(x.place, Shard) and x.place.dim == dim:
        raise Refuse("picks entries of the split dimension")
    return Result(x.place, keep(x))


def gather(s: Setting, x: Operand, dim: int, index: Operand, **_: Any) -> Result:
    dim = wrap(dim, len(x.shape))
    place = x.place
    if isinstance(place, Partial) and not isinstance(index.place, Shard):
        return Result(PARTIAL, keep(x))
    if not isinstance(place, Shard):
        raise Refuse("is indexed by a split tensor")
    if place.dim == dim:
        raise Refuse("picks entries of the split dimension")
    if index.shape[place.dim] != x.shape[place.dim]:
        raise Refuse("picks from a part of the split dimension")
    return Result(place, {x.slot: place, index.slot: place})


def one_hot(s: Setting, x: Operand, num_classes: int = -1) -> Result:
    if num_classes < 0 or not isinstance(x.place, Shard):
        return Result(None)
    return Result(x.place, keep(x))


ALL: dict[str, Rule] = {
    **dict.fromkeys(LIKE_NUMBERS, elementwise), **dict.fromkeys(LIKE_SHAPES, like_shape),
    **dict.fromkeys(SHAPED_BY, shaped_by), **dict.fromkeys(OVER, over),
    **tensor_views.RULES, **tensor_products.RULES, **tensor_adapted.RULES,
    "dropout": dropout, "layer_norm": norm, "rms_norm": norm, "glu": glu, "pad": pad, "tril": last_two,
    "triu": last_two, "index_select": index_select, "gather": gather, "one_hot": one_hot,
}  # fmt: skip
NEED_NAME = frozenset({elementwise, over})
