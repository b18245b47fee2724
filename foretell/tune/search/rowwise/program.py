"""A row-wise program: tensors seen as rows, ops that are pointwise or reduce a row. Pure.

    full     rows × width      row     one number for each row
    column   one for each column, as a norm's weight      scalar   one number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

FULL, ROW, COLUMN, SCALAR = "full", "row", "column", "scalar"
INPUT, CONST, WIDTH, ROWSUM, ROWMAX, COLSUM, WHERE = "input", "const", "width", "rowsum", "rowmax", "colsum", "where"
UNARY = ("neg", "exp", "log", "sqrt", "rsqrt", "abs", "sigmoid", "tanh", "erf", "sin", "cos")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARED = ("gt", "ge", "lt", "le", "eq", "ne")
REDUCTIONS = (ROWSUM, ROWMAX, COLSUM)


class NotRowWise(Exception):
    """What of a task no row-wise program does."""


@dataclass(frozen=True)
class RowNode:
    """One value."""

    op: str
    args: tuple[int, ...]
    kind: str
    value: float = 0.0
    """Of a constant; of an input its place."""
    truth: bool = False
    """True and false instead of numbers."""


@dataclass(frozen=True)
class RowInput:
    """A tensor that comes in: an argument of `forward` by its place, or part of the module's state by name."""

    kind: str
    argument: int = -1
    state: str = ""
    learned: bool = False
    truth: bool = False


@dataclass(frozen=True, kw_only=True)
class RowProgram:
    """What a module computes."""

    nodes: tuple[RowNode, ...]
    inputs: tuple[RowInput, ...]
    outputs: tuple[int, ...]
    trailing: tuple[bool, ...]
    """Of outputs with a number for each row: whether they have a dim for it."""
    arguments: int
    """That `forward` takes."""
    width: int
    """Of a row as it was traced."""

    @property
    def reduces(self) -> bool:
        return any(one.op in (ROWSUM, ROWMAX) for one in self.nodes)

    @property
    def flat(self) -> bool:
        """Nothing depends on where a row ends."""
        return all(one.kind in (FULL, SCALAR) and one.op not in (*REDUCTIONS, WIDTH) for one in self.nodes)


@dataclass
class RowBuilder:
    """Nodes, each once; arithmetic that says nothing is left out."""

    nodes: list[RowNode] = field(default_factory=list)
    _known: dict[RowNode, int] = field(default_factory=dict)

    def put(self, node: RowNode) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def const(self, value: float) -> int:
        return self.put(RowNode(CONST, (), SCALAR, float(value)))

    def width(self) -> int:
        return self.put(RowNode(WIDTH, (), SCALAR))

    def input(self, place: int, kind: str, truth: bool = False) -> int:
        return self.put(RowNode(INPUT, (), kind, float(place), truth))

    def is_const(self, one: int, value: float) -> bool:
        return self.nodes[one].op == CONST and self.nodes[one].value == value

    def add(self, op: str, *args: int) -> int:
        """A value of values."""
        simple = self._simple(op, args)
        if simple is not None:
            return simple
        kinds = [self.nodes[one].kind for one in args]
        if op in (ROWSUM, ROWMAX):
            return self._reduced(op, args[0], kinds[0])
        if op == COLSUM:
            return self.put(RowNode(op, args, {FULL: COLUMN, ROW: SCALAR}[kinds[0]]))
        truth = op in COMPARED or op in ("and", "or", "not")
        return self.put(RowNode(op, args, joined(kinds), truth=truth))

    def shift(self, one: int) -> int:
        """The largest of a row, taken from a row's numbers to keep them small: the answer does not depend on it, so it has no gradient."""
        found = self.add(ROWMAX, one)
        return self.put(RowNode(ROWMAX, (one,), ROW, value=1.0)) if self.nodes[found].op == ROWMAX and self.nodes[found].args == (one,) else found

    def _reduced(self, op: str, arg: int, kind: str) -> int:
        if kind in (ROW, SCALAR):
            return arg if op == ROWMAX else self.add("mul", arg, self.width())
        if kind == COLUMN:
            raise NotRowWise("a sum over a weight")
        return self.put(RowNode(op, (arg,), ROW))

    def _simple(self, op: str, args: tuple[int, ...]) -> int | None:
        if op in ("add", "sub", "mul", "div") and len(args) == 2:
            left, right = args
            if (op in ("add", "sub") and self.is_const(right, 0.0)) or (op in ("mul", "div") and self.is_const(right, 1.0)):
                return left
            if (op == "add" and self.is_const(left, 0.0)) or (op == "mul" and self.is_const(left, 1.0)):
                return right
        if args and all(self.nodes[one].op == CONST for one in args) and op in _FOLDED:
            try:
                return self.const(_FOLDED[op](*(self.nodes[one].value for one in args)))
            except (ArithmeticError, ValueError):
                return None
        return None


_FOLDED: Mapping[str, Callable[..., float]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a: -a,
    "sqrt": math.sqrt, "exp": math.exp,
}  # fmt: skip


def joined(kinds: Iterable[str]) -> str:
    """Of values that are broadcast to each other."""
    found = set(kinds)
    if FULL in found or {ROW, COLUMN} <= found:
        return FULL
    return ROW if ROW in found else COLUMN if COLUMN in found else SCALAR


def needed(nodes: tuple[RowNode, ...] | list[RowNode], wanted: Iterable[int]) -> list[int]:
    """Places of the nodes that `wanted` follow from, in order."""
    found: set[int] = set()
    left = list(wanted)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += nodes[one].args
    return sorted(found)


def numbers(nodes: tuple[RowNode, ...] | list[RowNode]) -> set[int]:
    """Places of what follows from constants and the width alone."""
    found: set[int] = set()
    for place, node in enumerate(nodes):
        if node.op in (CONST, WIDTH) or (node.args and all(arg in found for arg in node.args)):
            found.add(place)
    return found


def last_uses(nodes: tuple[RowNode, ...] | list[RowNode], order: list[int], kept: Iterable[int]) -> dict[int, int]:
    """Place of a node → the last one that reads it; those `kept` are read until the end."""
    found = {arg: one for one in order for arg in nodes[one].args}
    return {**found, **{one: len(nodes) for one in kept}}
