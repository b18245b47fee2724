"""What the code that reads a truth value does with it: a healthy run takes no exit that a check guards.

    assert finite.all()            true
    if bad.any(): raise ...        not taken
    if done.all(): break           not taken: a step that goes on is the larger one
    while not converged: ...       once
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import FrameType
from typing import TypeAlias

Position: TypeAlias = tuple[int, int, int, int]
_EXITS = (ast.Raise, ast.Break, ast.Return, ast.Continue)


@functools.cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@functools.cache
def _tests(file: str) -> tuple[tuple[ast.expr, ast.AST], ...]:
    """Every condition of a file and what it belongs to."""
    tree = _tree(file)
    nodes = ast.walk(tree) if tree is not None else ()
    return tuple((node.test, node) for node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.Assert, ast.While)))


def wanted(frame: FrameType | None, looked: dict[tuple[int, int], int]) -> tuple[bool, str] | None:
    """The answer that keeps a healthy step going, and where it is asked; None where the code does not say.

    `looked` counts how often a frame's `while` was asked."""
    while frame is not None:
        file = frame.f_code.co_filename
        position = None if _is_machinery(file) else _position(frame)
        if position is not None:
            for test, owner in _tests(file):
                if _covers(test, position):
                    found = _answer(test, owner, position, (id(frame), test.lineno), looked)
                    return None if found is None else (found, f"{short(file)}:{test.lineno}")
        if "/torch/" not in file and not _is_machinery(file):
            return None
        frame = frame.f_back
    return None


def short(file: str) -> str:
    """A file's name, with its folder where it is one of many of that name in a package."""
    return "/".join(file.split("/")[-2:]) if "/site-packages/" in file else file.rpartition("/")[2]


@functools.cache
def _is_machinery(file: str) -> bool:
    """Code between the line that asks and us."""
    return "/foretell/trace/" in file or "/torch/_" in file or "/torch/utils/" in file or file.startswith("<")


def _position(frame: FrameType) -> Position | None:
    """Of the expression whose truth is asked, or of the call that asks.

    Some Pythons say of a conditional jump only which statement it belongs to; what came before it made the value."""
    positions = list(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2 + 1))
    statements = {_range(owner) for _, owner in _tests(frame.f_code.co_filename)}
    while positions and positions[-1] in statements:
        positions.pop()
    found = positions[-1] if positions else (None,)
    return None if None in found else found  # type: ignore[return-value]


def _range(node: ast.AST) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined,no-any-return]


def _covers(node: ast.expr, position: Position) -> bool:
    first, last, start, end = position
    inside = (node.lineno, node.col_offset) <= (first, start)
    return inside and (last, end) <= (node.end_lineno or 0, node.end_col_offset or 0)


def _answer(
    test: ast.expr, owner: ast.AST, position: Position, at: tuple[int, int], looked: dict[tuple[int, int], int]
) -> bool | None:  # fmt: skip
    if isinstance(owner, ast.Assert):
        whole = True
    elif isinstance(owner, ast.While):
        looked[at] = looked.get(at, 0) + 1
        whole = looked[at] == 1
    elif isinstance(owner, ast.If) and isinstance(owner.body[-1], _EXITS):
        whole = False
    elif isinstance(owner, ast.If) and owner.orelse and isinstance(owner.orelse[-1], ast.Raise):
        whole = True
    else:
        return None
    return _of_part(test, whole, position)


def _of_part(test: ast.expr, whole: bool, position: Position) -> bool | None:
    """What the part that is asked must be for the whole condition to be this."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _of_part(test.operand, not whole, position)
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            if _covers(part, position):
                return _of_part(part, whole, position)
        return whole
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool" and test.args:
        return whole
    return whole if _range(test) == position else None
