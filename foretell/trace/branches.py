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
        file, position = frame.f_code.co_filename, _position(frame)
        if position is not None:
            for test, owner in _tests(file):
                if _covers(test, position):
                    found = _answer(test, owner, position, (id(frame), test.lineno), looked)
                    return None if found is None else (found, f"{file}:{test.lineno}")
        if "/torch/" not in file and "foretell/trace/" not in file:
            return None
        frame = frame.f_back
    return None


def place(frame: FrameType | None, is_users: object) -> str:
    """The user's line that asks."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):  # type: ignore[operator]
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _position(frame: FrameType) -> tuple[int, int, int, int] | None:
    found = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,))
    return None if None in found else found  # type: ignore[return-value]


def _covers(node: ast.expr, position: tuple[int, int, int, int]) -> bool:
    first, last, start, end = position
    inside = (node.lineno, node.col_offset) <= (first, start)
    return inside and (last, end) <= (node.end_lineno or 0, node.end_col_offset or 0)


def _answer(
    test: ast.expr, owner: ast.AST, position: tuple[int, int, int, int], at: tuple[int, int], looked: dict[tuple[int, int], int]
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


def _of_part(test: ast.expr, whole: bool, position: tuple[int, int, int, int]) -> bool | None:
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
    exact = (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset) == position
    return whole if exact else None
