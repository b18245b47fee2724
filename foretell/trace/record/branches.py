"""What the code that reads a truth value does with it: a healthy run takes no exit that a check guards.

    assert finite.all()            true
    torch._check(ok)               true
    if bad.any(): raise ...        not taken
    if done.all(): break           not taken: a step that goes on is the larger one
    while not converged: ...       once

A question that is asked again and again in one call of a module is answered otherwise in the end: loops end. Those over a
range or a list end by themselves and need no such help.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import FrameType
from typing import NamedTuple, TypeAlias

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


@functools.cache
def _counted(file: str) -> frozenset[ast.AST]:
    """The statements of a file whose innermost loop is a `for`: it ends by itself, whatever its exits are told."""
    found: set[ast.AST] = set()

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if inside:
                found.add(child)
            if isinstance(child, (ast.For, ast.AsyncFor)):
                walk(child, not _is_endless(child.iter))
            else:
                walk(child, inside and not isinstance(child, (ast.While, ast.FunctionDef, ast.Lambda, ast.ClassDef)))

    tree = _tree(file)
    if tree is not None:
        walk(tree, False)
    return frozenset(found)


def _is_endless(over: ast.expr) -> bool:
    """Whether a loop goes over something that may have no end: `count()`, `cycle(x)`, `iter(f, None)`."""
    names = {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(over) if isinstance(node, (ast.Name, ast.Attribute))}
    return bool(names & {"count", "cycle", "repeat", "iter"})


class Condition(NamedTuple):
    """A condition of the user's code, at the moment it is asked."""

    answer: bool | None
    """What keeps a healthy step going; None where the code does not say."""
    where: str
    loops: bool
    """It is that of a `while`."""
    guards: bool
    """It decides whether the code raises."""
    counted: bool
    """It stands in a loop that ends by itself."""


def asked(frame: FrameType | None) -> Condition | None:
    """The condition that a truth value or a number is read for; None where it is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        position = None if _is_machinery(file) else _position(frame)
        if position is not None:
            for test, owner in _tests(file):
                if _covers(test, position):
                    whole, guards = _whole(owner)
                    answer = None if whole is None else _of_part(test, whole, position)
                    return Condition(answer, f"{short(file)}:{test.lineno}", isinstance(owner, ast.While), guards, owner in _counted(file))
        if file.endswith("/torch/__init__.py") and frame.f_code.co_name.startswith("_check"):  # torch._check and its kin raise
            return Condition(True, f"{short(file)}:{frame.f_lineno}", False, True, False)
        if "/torch/" not in file and not _is_machinery(file):
            return None
        frame = frame.f_back
    return None


def asker(frame: FrameType | None) -> FrameType | None:
    """The frame of the code that asks, past what is between it and us."""
    while frame is not None and ("/torch/" in frame.f_code.co_filename or _is_machinery(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


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


def _whole(owner: ast.AST) -> tuple[bool | None, bool]:
    """What the whole condition is in a healthy run, and whether code raises otherwise."""
    if isinstance(owner, ast.Assert):
        return True, True
    if isinstance(owner, ast.While):
        return True, False
    if isinstance(owner, ast.If) and isinstance(owner.body[-1], _EXITS):
        return False, isinstance(owner.body[-1], ast.Raise)
    if isinstance(owner, ast.If) and owner.orelse and isinstance(owner.orelse[-1], ast.Raise):
        return True, True
    return None, False


def _of_part(test: ast.expr, whole: bool, position: Position) -> bool | None:
    """What the part that is asked must be for the whole condition to be this."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not whole if _range(test) == position else _of_part(test.operand, not whole, position)
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            if _covers(part, position):
                return _of_part(part, whole, position)
        return whole
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool" and test.args:
        return whole
    return whole if _range(test) == position else None
