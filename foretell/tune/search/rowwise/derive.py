"""The backward of a row-wise program, as one itself: gradients of its inputs from those of its outputs. Pure.

An adjoint is linear in what comes back, so sums over rows of parts of the rows can be added up afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foretell.tune.search.rowwise.program import (
    COLSUM,
    COLUMN,
    FULL,
    INPUT,
    ROW,
    ROWMAX,
    ROWSUM,
    SCALAR,
    WHERE,
    NotRowWise,
    RowBuilder,
    RowNode,
    RowProgram,
    needed,
)


@dataclass(frozen=True)
class RowBackward:
    """The nodes of a program and of its backward together; cotangents are further inputs, after the program's own."""

    nodes: tuple[RowNode, ...]
    gradients: tuple[int | None, ...]
    """Of each input; None where it has none."""

    @property
    def wanted(self) -> list[int]:
        return [one for one in self.gradients if one is not None]

    @property
    def order(self) -> list[int]:
        return needed(self.nodes, self.wanted)


def backward_of(program: RowProgram) -> RowBackward:
    """Of every input that is floating."""
    build = RowBuilder()
    for node in program.nodes:
        build.put(node)
    found: dict[int, int] = {}
    for place, output in enumerate(program.outputs):
        kind = program.nodes[output].kind
        _collect(build, found, output, build.input(len(program.inputs) + place, kind))
    for place in reversed(range(len(program.nodes))):
        if place in found and program.nodes[place].args:
            _spread(build, found, place, program.nodes[place])
    by_input = {int(node.value): place for place, node in enumerate(program.nodes) if node.op == INPUT}
    return RowBackward(tuple(build.nodes), tuple(found.get(by_input[place]) for place in range(len(program.inputs))))


def _collect(build: RowBuilder, found: dict[int, int], place: int, more: int) -> None:
    found[place] = build.add("add", found[place], more) if place in found else more


def _spread(build: RowBuilder, found: dict[int, int], place: int, node: RowNode) -> None:
    """What comes back to a value goes on to what it was made of."""
    back = found[place]
    if node.truth or (node.op == ROWMAX and node.value):  # a shift, which the answer does not depend on
        return
    if node.op == ROWSUM:
        _collect(build, found, node.args[0], back)
        return
    if node.op == ROWMAX:
        same = build.add("eq", node.args[0], place)
        chosen = build.add(WHERE, same, build.const(1.0), build.const(0.0))
        _collect(build, found, node.args[0], build.add("mul", chosen, build.add("div", back, build.add(ROWSUM, chosen))))
        return
    if node.op not in _RULES:
        raise NotRowWise(f"the gradient of {node.op}")
    for arg, local in zip(node.args, _RULES[node.op](build, back, place, *node.args), strict=True):
        if local is not None and build.nodes[arg].op not in ("const", "width") and not build.nodes[arg].truth:
            _collect(build, found, arg, _fitted(build, local, node.kind, build.nodes[arg].kind))


def _fitted(build: RowBuilder, back: int, node: str, arg: str) -> int:
    """Summed over what the value was broadcast along; `back` may itself be less than the node it belongs to."""
    kind = build.nodes[back].kind
    if node == arg:
        return back
    if node == FULL and arg == ROW:
        return build.add(ROWSUM, back) if kind == FULL else build.add("mul", back, build.width())
    if node == FULL and arg == COLUMN:
        return build.add(COLSUM, back)
    if node == FULL and arg == SCALAR:
        return build.add(COLSUM, build.add(ROWSUM, back))
    if node == ROW and arg == SCALAR:
        return build.add(COLSUM, back)
    raise NotRowWise(f"the gradient of a {arg} in a {node}")


Local = Callable[..., tuple[int | None, ...]]


def _times(build: RowBuilder, back: int, *factors: int) -> int:
    for one in factors:
        back = build.add("mul", back, one)
    return back


def _add(b: RowBuilder, g: int, y: int, left: int, right: int) -> tuple[int, int]:
    return g, g


def _sub(b: RowBuilder, g: int, y: int, left: int, right: int) -> tuple[int, int]:
    return g, b.add("neg", g)


def _mul(b: RowBuilder, g: int, y: int, left: int, right: int) -> tuple[int, int | None]:
    if left == right:
        return _times(b, b.add("mul", g, b.const(2.0)), left), None
    return _times(b, g, right), _times(b, g, left)


def _div(b: RowBuilder, g: int, y: int, left: int, right: int) -> tuple[int, int]:
    over = b.add("div", g, right)
    return over, b.add("neg", _times(b, over, y))


def _most(compared: str) -> Local:
    """Equal ones share."""

    def rule(b: RowBuilder, g: int, y: int, left: int, right: int) -> tuple[int, int]:
        first, same = b.add(compared, left, right), b.add("eq", left, right)
        half = b.add(WHERE, same, b.add("mul", g, b.const(0.5)), b.const(0.0))
        zero = b.const(0.0)
        return b.add(WHERE, first, g, half), b.add(WHERE, first, zero, b.add(WHERE, same, half, g))

    return rule


def _where(b: RowBuilder, g: int, y: int, chosen: int, left: int, right: int) -> tuple[None, int, int]:
    zero = b.const(0.0)
    return None, b.add(WHERE, chosen, g, zero), b.add(WHERE, chosen, zero, g)


def _tanh(b: RowBuilder, g: int, y: int, x: int) -> tuple[int]:
    return (_times(b, g, b.add("sub", b.const(1.0), b.add("mul", y, y))),)


def _erf(b: RowBuilder, g: int, y: int, x: int) -> tuple[int]:
    return (_times(b, g, b.add("exp", b.add("neg", b.add("mul", x, x))), b.const(2 / math.sqrt(math.pi))),)


def _abs(b: RowBuilder, g: int, y: int, x: int) -> tuple[int]:
    zero = b.const(0.0)
    below = b.add(WHERE, b.add("lt", x, zero), b.add("neg", g), zero)
    return (b.add(WHERE, b.add("gt", x, zero), g, below),)


_RULES: Mapping[str, Local] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "maximum": _most("gt"), "minimum": _most("lt"), WHERE: _where, "tanh": _tanh,
    "erf": _erf, "abs": _abs,
    "neg": lambda b, g, y, x: (b.add("neg", g),), "exp": lambda b, g, y, x: (_times(b, g, y),),
    "log": lambda b, g, y, x: (b.add("div", g, x),), "sqrt": lambda b, g, y, x: (b.add("div", _times(b, g, b.const(0.5)), y),),
    "rsqrt": lambda b, g, y, x: (_times(b, g, y, y, y, b.const(-0.5)),),
    "sigmoid": lambda b, g, y, x: (_times(b, g, y, b.add("sub", b.const(1.0), y)),),
    "sin": lambda b, g, y, x: (_times(b, g, b.add("cos", x)),), "cos": lambda b, g, y, x: (b.add("neg", _times(b, g, b.add("sin", x))),),
}  # fmt: skip
