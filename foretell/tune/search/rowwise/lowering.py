"""aten ops of a traced forward as a row-wise program. Pure; raises `NotRowWise` with the op that stands against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.tune.search.rowwise.program import (
    COLUMN,
    FULL,
    ROW,
    ROWMAX,
    ROWSUM,
    SCALAR,
    WHERE,
    NotRowWise,
    RowBuilder,
    RowInput,
    RowProgram,
)

Shape = tuple[int, ...]
_SAME = (
    "view", "_unsafe_view", "reshape", "unsqueeze", "expand", "clone", "contiguous", "_to_copy", "alias", "detach", "squeeze", "lift_fresh",
    "_reshape_alias",
)  # fmt: skip
_UNARY = {"neg": "neg", "exp": "exp", "log": "log", "sqrt": "sqrt", "rsqrt": "rsqrt", "abs": "abs", "sigmoid": "sigmoid", "tanh": "tanh",
          "erf": "erf", "sin": "sin", "cos": "cos"}  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne")


@dataclass
class _Lowering:
    """Values by the numbers that the trace gives them."""

    full: Shape
    build: RowBuilder = field(default_factory=RowBuilder)
    values: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    aliased: set[int] = field(default_factory=set)
    """Tensors that may share their memory with another one."""

    # --- arguments -----------------------------------------------------------------------------------------------------

    def of(self, one: Any) -> int:
        """A tensor of the trace, or a number."""
        if isinstance(one, Mapping):
            if one["t"] not in self.values:
                raise NotRowWise("a tensor made on the way")
            return self.values[one["t"]]
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise NotRowWise(f"an argument {one!r}")
        return self.build.const(one)

    def last(self, dims: Any, shape: Shape) -> None:
        """Only the last dim is reduced."""
        given = dims if isinstance(dims, list) else [dims]
        if len(given) != 1 or given[0] not in (-1, len(shape) - 1) or shape != self.full:
            raise NotRowWise(f"a reduction over dims {given} of {list(shape)}")

    # --- pieces --------------------------------------------------------------------------------------------------------

    def mean(self, one: int) -> int:
        return self.build.add("div", self.build.add(ROWSUM, one), self.build.width())

    def variance(self, one: int, correction: float) -> tuple[int, int, int]:
        """Mean, value less its mean, variance."""
        add = self.build.add
        middle = self.mean(one)
        apart = add("sub", one, middle)
        count = add("sub", self.build.width(), self.build.const(correction))
        return middle, apart, add("div", add(ROWSUM, add("mul", apart, apart)), count)

    def power(self, one: int, by: float) -> int:
        add = self.build.add
        if by in (2.0, 3.0, 4.0):
            square = add("mul", one, one)
            return square if by == 2.0 else add("mul", square, one if by == 3.0 else square)
        if by in (0.5, -0.5):
            return add("sqrt" if by > 0 else "rsqrt", one)
        if by in (1.0, -1.0):
            return one if by > 0 else add("div", self.build.const(1.0), one)
        raise NotRowWise(f"a power of {by:g}")


Rule = Callable[[_Lowering, Sequence[Any], Mapping[str, Any], Shape], int]


def program_of(traced: Mapping[str, Any]) -> RowProgram:
    """`traced`: inputs, ops and outputs as `inside.graph` tells them."""
    tensors = {one["t"]: tuple(one["shape"]) for one in traced["inputs"]}
    shapes = [shape for one in traced["inputs"] if (shape := tensors[one["t"]])]
    full = max(shapes, key=lambda shape: (math.prod(shape), len(shape)), default=())
    if not full:
        raise NotRowWise("no tensor comes in")
    if traced["plain"]:
        raise NotRowWise("forward takes more than tensors")
    known = _Lowering(full)
    inputs = [_input(known, place, one) for place, one in enumerate(traced["inputs"])]
    for op in traced["ops"]:
        _lower(known, op)
    outputs, trailing = [], []
    for one in traced["outputs"]:
        value, shape = known.values.get(one["t"], -1), tuple(one["shape"])
        if value < 0 or known.build.nodes[value].truth or known.build.nodes[value].kind not in (FULL, ROW) or value < len(inputs):
            raise NotRowWise("an output that is not computed for each row")
        _check(known, shape, known.build.nodes[value].kind, "an output")
        if known.build.nodes[value].kind == ROW and shape == full:
            raise NotRowWise("an output that repeats a number")
        outputs.append(value)
        trailing.append(shape != full[:-1])
    if not outputs or len(set(outputs)) < len(outputs):
        raise NotRowWise("what it returns is not one tensor, or several different ones")
    used = {int(node.value) for node in known.build.nodes if node.op == "input"}
    if len(used) < len(inputs):
        raise NotRowWise("a tensor that nothing reads")
    return RowProgram(
        nodes=tuple(known.build.nodes), inputs=tuple(inputs), outputs=tuple(outputs), trailing=tuple(trailing), arguments=traced["arguments"],
        width=full[-1],
    )  # fmt: skip


def _input(known: _Lowering, place: int, one: Mapping[str, Any]) -> RowInput:
    shape, truth = tuple(one["shape"]), one["dtype"] == "bool"
    if not truth and one["dtype"] not in ("float32", "bfloat16", "float16"):
        raise NotRowWise(f"a tensor of {one['dtype']}")
    kind = _kind(shape, known.full)
    known.values[one["t"]] = known.build.input(place, kind, truth)
    known.shapes[one["t"]] = shape
    return RowInput(kind, one.get("argument", -1), one.get("state", ""), bool(one.get("learned")), truth)


def _kind(shape: Shape, full: Shape) -> str:
    if shape == full:
        return FULL
    if math.prod(shape) == 1:
        return SCALAR
    if math.prod(shape) == shape[-1] == full[-1] and len(shape) <= len(full):
        return COLUMN
    if shape in (full[:-1], (*full[:-1], 1)):
        return ROW
    raise NotRowWise(f"a tensor of {list(shape)} beside one of {list(full)}")


def _check(known: _Lowering, shape: Shape, kind: str, name: str) -> None:
    """Whether a result has the shape that goes with its kind."""
    allowed = {FULL: (known.full,), ROW: (known.full[:-1], (*known.full[:-1], 1), known.full)}
    one_row = math.prod(known.full[:-1]) == 1
    fine = shape in allowed[kind] if kind in allowed else True
    if kind == COLUMN:
        fine = math.prod(shape) == known.full[-1] or shape == known.full
    if not fine and not (one_row and math.prod(shape) in (1, known.full[-1])):
        raise NotRowWise(f"{name} of {list(shape)} where rows are {list(known.full)}")


def _lower(known: _Lowering, op: Mapping[str, Any]) -> None:
    name, _, overload = op["op"].partition(".")
    (out, *more) = op["outputs"]
    shape = tuple(op["shapes"][0])
    args = op["args"]
    first = args[0]["t"] if args and isinstance(args[0], Mapping) else -1
    plain = name[:-1] if name.endswith("_") and not name.startswith("_") else name
    if plain != name and (first in known.aliased or first not in known.values or known.build.nodes[known.values[first]].op == "input"):
        raise NotRowWise(f"{name} changes an input, or what others see")
    _aligned(known, name, args, shape)
    if plain in _SAME:
        value = known.of(args[0])
        known.aliased |= {first, out}
    elif plain in _RULES:
        value = _RULES[plain](known, args, op["kwargs"], known.shapes.get(first, ()))
    else:
        raise NotRowWise(f"the op {name}.{overload}")
    _check(known, shape, known.build.nodes[value].kind, name)
    known.values[out], known.shapes[out] = value, shape
    for one in more:
        known.values.pop(one, None)


def _aligned(known: _Lowering, name: str, args: Sequence[Any], shape: Shape) -> None:
    """A row's number without a dim of its own would be broadcast along another one."""
    for one in args:
        if isinstance(one, Mapping) and one["t"] in known.values and (name not in _SAME or name == "expand"):
            mine = known.shapes[one["t"]]
            row = known.build.nodes[known.values[one["t"]]].kind == ROW
            if row and len(mine) < len(shape) == len(known.full) and math.prod(mine) > 1:
                raise NotRowWise(f"{name} of {list(mine)} beside {list(shape)}")


# ---------------------------------------------------------------- rules


def _unary(primitive: str) -> Rule:
    return lambda known, args, more, shape: known.build.add(primitive, known.of(args[0]))


def _binary(primitive: str) -> Rule:
    def rule(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
        if more.get("rounding_mode"):
            raise NotRowWise("a rounded division")
        right = known.of(args[1])
        if more.get("alpha", 1) != 1:
            right = known.build.add("mul", right, known.of(more["alpha"]))
        return known.build.add(primitive, known.of(args[0]), right)

    return rule


def _rsub(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add("sub", known.of(args[1]), known.of(args[0]))


def _silu(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    one = known.of(args[0])
    return known.build.add("mul", one, known.build.add("sigmoid", one))


def _gelu(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    add, const, one = known.build.add, known.build.const, known.of(args[0])
    half = add("mul", one, const(0.5))
    if more.get("approximate", "none") == "tanh":
        cubed = add("mul", add("mul", one, one), one)
        inner = add("mul", add("add", one, add("mul", cubed, const(0.044715))), const(math.sqrt(2 / math.pi)))
        return add("mul", half, add("add", add("tanh", inner), const(1.0)))
    return add("mul", half, add("add", add("erf", add("mul", one, const(math.sqrt(0.5)))), const(1.0)))


def _clamp(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    one = known.of(args[0])
    low, high = [*args[1:3], None, None][:2]
    one = known.build.add("maximum", one, known.of(low)) if low is not None else one
    return known.build.add("minimum", one, known.of(high)) if high is not None else one


def _where(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add(WHERE, *(known.of(one) for one in args))


def _masked_fill(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add(WHERE, known.of(args[1]), known.of(args[2]), known.of(args[0]))


def _leaky(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    one = known.of(args[0])
    slope = known.of(args[1] if len(args) > 1 else 0.01)
    return known.build.add(WHERE, known.build.add("gt", one, known.build.const(0.0)), one, known.build.add("mul", one, slope))


def _hardswish(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    add, const, one = known.build.add, known.build.const, known.of(args[0])
    gate = add("minimum", add("maximum", add("add", one, const(3.0)), const(0.0)), const(6.0))
    return add("div", add("mul", one, gate), const(6.0))


def _pow(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    if isinstance(args[1], Mapping):
        raise NotRowWise("a power that is a tensor")
    return known.power(known.of(args[0]), float(args[1]))


def _mean(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1] if len(args) > 1 else None, shape)
    return known.mean(known.of(args[0]))


def _sum(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1] if len(args) > 1 else None, shape)
    return known.build.add(ROWSUM, known.of(args[0]))


def _amax(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1] if len(args) > 1 else None, shape)
    return known.build.add(ROWMAX, known.of(args[0]))


def _var(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1] if len(args) > 1 else None, shape)
    return known.variance(known.of(args[0]), float(more.get("correction", 1)))[2]


def _std(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add("sqrt", _var(known, args, more, shape))


def _norm(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[2] if len(args) > 2 else None, shape)
    one = known.of(args[0])
    if args[1] == 2:
        return known.build.add("sqrt", known.build.add(ROWSUM, known.build.add("mul", one, one)))
    if args[1] == 1:
        return known.build.add(ROWSUM, known.build.add("abs", one))
    raise NotRowWise(f"a norm of order {args[1]}")


def _softmax(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1], shape)
    add, one = known.build.add, known.of(args[0])
    raised = add("exp", add("sub", one, known.build.shift(one)))
    return add("div", raised, add(ROWSUM, raised))


def _log_softmax(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1], shape)
    add, one = known.build.add, known.of(args[0])
    below = add("sub", one, known.build.shift(one))
    return add("sub", below, add("log", add(ROWSUM, add("exp", below))))


def _logsumexp(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    known.last(args[1], shape)
    add, one = known.build.add, known.of(args[0])
    highest = known.build.shift(one)
    return add("add", highest, add("log", add(ROWSUM, add("exp", add("sub", one, highest)))))


def _layer_norm(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    if list(args[1]) != [known.full[-1]] or shape != known.full:
        raise NotRowWise(f"a norm over {args[1]}")
    add = known.build.add
    _, apart, spread = known.variance(known.of(args[0]), 0.0)
    found = add("mul", apart, add("rsqrt", add("add", spread, known.build.const(args[4]))))
    found = add("mul", found, known.of(args[2])) if args[2] is not None else found
    return add("add", found, known.of(args[3])) if args[3] is not None else found


def _rms_norm(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    if list(args[1]) != [known.full[-1]] or shape != known.full:
        raise NotRowWise(f"a norm over {args[1]}")
    add, one = known.build.add, known.of(args[0])
    epsilon = args[3] if len(args) > 3 and args[3] is not None else 2.0**-23
    found = add("mul", one, add("rsqrt", add("add", known.mean(add("mul", one, one)), known.build.const(epsilon))))
    return add("mul", found, known.of(args[2])) if args[2] is not None else found


def _relu(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add("maximum", known.of(args[0]), known.build.const(0.0))


def _reciprocal(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    return known.build.add("div", known.build.const(1.0), known.of(args[0]))


def _addcmul(known: _Lowering, args: Sequence[Any], more: Mapping[str, Any], shape: Shape) -> int:
    product = known.build.add("mul", known.of(args[1]), known.of(args[2]))
    return known.build.add("add", known.of(args[0]), known.build.add("mul", product, known.of(more.get("value", 1))))


_RULES: Mapping[str, Rule] = {
    **{name: _unary(primitive) for name, primitive in _UNARY.items()}, **{name: _binary(name) for name in _BINARY},
    "rsub": _rsub, "silu": _silu, "gelu": _gelu, "clamp": _clamp, "clamp_min": _clamp, "hardtanh": _clamp, "where": _where,
    "masked_fill": _masked_fill, "leaky_relu": _leaky, "hardswish": _hardswish, "pow": _pow, "mean": _mean, "sum": _sum, "amax": _amax,
    "var": _var, "std": _std, "linalg_vector_norm": _norm, "_softmax": _softmax, "_log_softmax": _log_softmax, "logsumexp": _logsumexp,
    "native_layer_norm": _layer_norm, "_fused_rms_norm": _rms_norm, "relu": _relu, "reciprocal": _reciprocal, "addcmul": _addcmul,
}  # fmt: skip
