"""Files of a task and of a candidate, read without running them.

A task is a file with a class `Model`, `get_inputs()` and, where the class takes arguments, `get_init_inputs()`: KernelBench's
format. A candidate is a file with a class `ModelNew` that takes the same. Where one file has both, the reference is run without
the candidate's part of it: only what `Model` and the two functions name, directly or through others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from foretell.errors import FileFormatError, MissingModel, UserError

MODEL, CANDIDATE, INPUTS, ARGUMENTS = "Model", "ModelNew", "get_inputs", "get_init_inputs"


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text of a file and the class of it that is run."""

    path: str
    text: str
    kind: str

    @property
    def name(self) -> str:
        return Path(self.path).stem


def read(path: str, kind: str = CANDIDATE) -> tuple[str, ast.Module]:
    remedy = f"give a Python file with a class {kind}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingModel(f"there is no file {path}", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", remedy) from None
    try:
        return text, ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no Python: {error}", remedy) from None


def defined(tree: ast.Module) -> set[str]:
    """Names that the file's own statements make."""
    return {name for statement in tree.body for name in _made(statement)}


def candidate(path: str) -> Code:
    text, tree = read(path)
    if CANDIDATE not in defined(tree):
        raise MissingModel(f"{path} has no class {CANDIDATE}", f"name the module that is to be verified {CANDIDATE}")
    return Code(path=path, text=text, kind=CANDIDATE)


def reference(path: str) -> Code:
    """The file's reference; what of the file it does not need is left out."""
    text, tree = read(path, MODEL)
    known = defined(tree)
    missing = [name for name in (MODEL, INPUTS) if name not in known]
    if missing:
        remedy = f"name the task's file (of tune verify: --reference FILE), with a class {MODEL} and {INPUTS}()"
        raise UserError(f"{path} has no {' and no '.join(missing)}", remedy)
    return Code(path=path, text=_slice(text, tree), kind=MODEL)


def _slice(text: str, tree: ast.Module) -> str:
    """The statements that `Model` and the inputs need, at their lines."""
    needed = {MODEL, INPUTS, ARGUMENTS}
    kept: set[int] = set()
    while True:
        more = {
            place for place, statement in enumerate(tree.body)
            if place not in kept and ((isinstance(statement, ast.ImportFrom) and statement.module == "__future__") or _made(statement) & needed)
        }  # fmt: skip
        if not more:
            break
        kept |= more
        needed |= {name for place in more for name in _used(tree.body[place])}
    lines = text.splitlines()
    wanted = [""] * len(lines)
    for place in kept:
        statement = tree.body[place]
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        wanted[first - 1 : statement.end_lineno] = lines[first - 1 : statement.end_lineno]
    return "\n".join(wanted) + "\n"


def _made(statement: ast.stmt) -> set[str]:
    """Names that a statement of the file binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).split(".")[0] for one in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    found = {node.id for target in targets if target is not None for node in ast.walk(target) if isinstance(node, ast.Name)}
    inner = [one for part in ("body", "orelse", "handlers", "finalbody") for one in getattr(statement, part, [])]
    for one in inner:
        found |= {name for each in getattr(one, "body", []) for name in _made(each)} if isinstance(one, ast.ExceptHandler) else _made(one)
    return found


def _used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
