"""Put an ejected script together from its parts: what the plan does not need is left out, imports are those used.

A part is a Python file. A statement whose first line ends with `# if: CONDITION` stays only where the condition holds;
comments right above it go with it. Nothing here knows what the parts say.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InternalError, UserError
from foretell.plan.text import plain, quoted

PIECES = Path(__file__).parent / "pieces"
OWN = "foretell."
"""Imports that begin so are between parts."""
_MARK = re.compile(r"\s+# if: (.+)$")
Import = tuple[str, str, str]
"""Module, name (empty for the module itself), and what it is called here (empty for its own name)."""


@dataclass(frozen=True, kw_only=True)
class ScriptPart:
    """One stretch of the script."""

    title: str
    body: str
    imports: frozenset[Import] = frozenset()


def piece(name: str, flags: Mapping[str, bool], values: Mapping[str, str] | None = None) -> ScriptPart:
    """A part of the folder `pieces` as this plan needs it; `values` replace those of its constants."""
    return part_of((PIECES / f"{name}.py").read_text(encoding="utf-8"), flags, values)


def part_of(source: str, flags: Mapping[str, bool] | None = None, values: Mapping[str, str] | None = None) -> ScriptPart:
    """Any Python text as a part: without its docstring, which becomes the title, and without its imports.

    Conditions are looked for where there are flags: in foretell's own pieces, never in text that holds names of a plan.
    """
    tree = ast.parse(source)
    lines: list[str | None] = list(source.split("\n"))
    for node in ast.walk(tree) if flags is not None else ():
        if isinstance(node, ast.stmt):
            _keep_or_drop(node, lines, flags or {})
    for node in tree.body:
        name = _constant(node)
        if name in (values or {}) and lines[node.lineno - 1] is not None:
            assert values is not None
            _set(node, lines, values[name])
        if isinstance(node, ast.Import | ast.ImportFrom):
            _drop(node, lines)
    title = ast.get_docstring(tree) or ""
    if title:
        _drop(tree.body[0], lines)
    body = re.sub(r"\n{4,}", "\n\n\n", "\n".join(line for line in lines if line is not None).strip("\n"))
    return ScriptPart(title=title, body=body, imports=frozenset(imports_of(tree)))


def script(header: str, parts: Iterable[ScriptPart]) -> str:
    """The whole file."""
    parts = [part for part in parts if part.body]
    body = "\n\n\n".join(f"# {'-' * 3} {part.title} {'-' * max(3, 92 - len(part.title))}\n\n{part.body}" for part in parts)
    _refuse_clashes(body)
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    wanted = {item for part in parts for item in part.imports if _called(item) in used}
    text = f'"""{_documented(header)}\n"""\n\nfrom __future__ import annotations\n\n{_import_lines(wanted)}\n{body}\n'
    missing = unknown_names(text)
    if missing:
        raise InternalError(f"the script would use names that it does not have: {', '.join(missing)}")
    return text


def _documented(header: str) -> str:
    """The inside of a docstring, whatever names are in it."""
    lines = [plain(line.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')) for line in header.rstrip().split("\n")]
    return "\n".join(lines)


# --- statements ------------------------------------------------------------------------------------------------------


def _keep_or_drop(node: ast.stmt, lines: list[str | None], flags: Mapping[str, bool]) -> None:
    first = lines[node.lineno - 1]
    mark = _MARK.search(first) if first is not None else None
    if mark is None:
        return
    assert first is not None
    if eval(mark.group(1), {"__builtins__": {}}, dict(flags)):
        lines[node.lineno - 1] = first[: mark.start()]
    else:
        _drop(node, lines)


def _drop(node: ast.stmt, lines: list[str | None]) -> None:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    lines[first : node.end_lineno] = [None] * ((node.end_lineno or node.lineno) - first)
    while first > 0 and (lines[first - 1] or "").lstrip().startswith("#"):
        first -= 1
        lines[first] = None


def _constant(node: ast.stmt) -> str:
    """The name a top-level statement gives a value to, if it is one name."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def _set(node: ast.stmt, lines: list[str | None], text: str) -> None:
    """Give a constant another value; a comment behind it stays, above it where the value is long."""
    first = lines[node.lineno - 1]
    assert first is not None
    comment = re.search(r"  # .*$", first)
    tail = comment.group() if comment else ""
    line = f"{_constant(node)} = {text}"
    wide = "\n" in text or len(line + tail) > 100
    lines[node.lineno - 1] = f"{tail.strip()}\n{line}" if wide and tail else line + tail
    lines[node.lineno : node.end_lineno] = [None] * ((node.end_lineno or node.lineno) - node.lineno)


# --- imports and names -----------------------------------------------------------------------------------------------


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Everything a text imports, but for its own parts and the future."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or ""
        elif isinstance(node, ast.ImportFrom):
            module = node.module or OWN
            for alias in node.names if module != "__future__" and not module.startswith(OWN) else ():
                yield module, alias.name, alias.asname or ""


def _called(item: Import) -> str:
    module, name, alias = item
    return alias or name or module.partition(".")[0]


def _import_lines(items: Iterable[Import]) -> str:
    """Standard library first, then the rest; plain imports before names from modules."""
    items = set(items)
    plain = sorted((module, alias) for module, name, alias in items if not name)
    taken: dict[str, list[str]] = {}
    for module, name, alias in sorted(items):
        if name:
            taken.setdefault(module, []).append(f"{name} as {alias}" if alias else name)
    groups = []
    for standard in (True, False):
        lines = [f"import {m} as {a}" if a else f"import {m}" for m, a in plain if _is_standard(m) is standard]
        lines += [_from(m, names) for m, names in taken.items() if _is_standard(m) is standard]
        groups.append("\n".join(lines))
    return "\n\n".join(filter(None, groups)) + "\n"


def _from(module: str, names: list[str]) -> str:
    """Constants, classes and functions in this order, in lines of their own where one line would be too long."""
    names = sorted(names, key=lambda name: (not (name.isupper() and len(name) > 1), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= 88 else f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _refuse_clashes(body: str) -> None:
    seen: set[str] = set()
    for node in ast.parse(body).body:
        name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else _constant(node)
        if name and name in seen:
            raise InternalError(f"two parts of the script define {name}")
        seen.add(name)


def unknown_names(text: str) -> list[str]:
    """Names a file reads and nowhere binds."""
    bound, read = {"__file__", "__doc__", "__name__", *dir(builtins)}, set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return sorted(read - bound)


# --- taking definitions out of other files ---------------------------------------------------------------------------


def literal(value: Any) -> str:
    """A value as Python text that reads as the same value, strings in double quotes. Plain values alone have one."""
    if isinstance(value, str):
        return quoted(value) if value.isprintable() else ascii(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise UserError(f"a {type(value).__name__} cannot be written in a script", "give plain values alone")


def dotted(owner: str, name: str) -> str:
    """An attribute, also where its name could not be written after a dot."""
    return f"{owner}.{name}" if is_word(name) else f"getattr({owner}, {literal(name)})"


def is_word(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def taken(source: str, names: Iterable[str]) -> str:
    """Those definitions of a file, and what of the same file they need, with its imports."""
    tree = ast.parse(source)
    defined = {_name(node): node for node in tree.body if _name(node)}
    wanted, queue = set[str](), list(names)
    while queue:
        name = queue.pop()
        if name in defined and name not in wanted:
            wanted.add(name)
            queue += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    kept = [node for node in tree.body if _name(node) in wanted or isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n\n\n".join(filter(None, (_text(node, source) for node in kept)))


def _name(node: ast.stmt) -> str:
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else _constant(node)


def _text(node: ast.stmt, source: str) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(source.split("\n")[first - 1 : node.end_lineno])
