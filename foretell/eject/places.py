"""Where in a Python file a change goes, and the file with it: statements by line, calls by name, text for text. No torch.

    File("train.py").statement(70)     the innermost simple statement there
    .call(69, "DataLoader")            the call of that name there
    .replace(node, text), .insert(line, [text]), .guard(statements, condition)    collected, then `.text` and `.diff`
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Assert, ast.Delete)


class NotFound(Exception):
    """The place is not one that can be told by its lines."""


class SourceFile:
    """One file of the user's, and what is to change in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.source = Path(path).read_text(encoding="utf-8")
        self.tree = ast.parse(self.source)
        self.lines = self.source.splitlines()
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        starts = [0]
        for line in self.source.encode().split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        self._starts = starts
        self.edits: list[tuple[int, int, int, int, str]] = []
        """From byte, to byte, which of those at one place comes first, number, text."""
        self.guarded: set[int] = set()
        """Lines that are under a new condition."""

    # ------------------------------------------------------------------ finding

    def statement(self, line: int) -> ast.stmt:
        """The innermost simple statement that covers a line, alone on its lines."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, _SIMPLE) and node.lineno <= line <= (node.end_lineno or 0)]
        if not found:
            raise NotFound(f"{self.path}:{line} is no plain statement")
        node = min(found, key=lambda one: (one.end_lineno or 0) - one.lineno)
        self.alone(node)
        return node

    def alone(self, node: ast.stmt) -> None:
        before, after = self.lines[node.lineno - 1][: node.col_offset], self.lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :]
        if before.strip() or after.split("#")[0].strip():
            raise NotFound(f"{self.path}:{node.lineno} has more than one statement")

    def calls(self, name: str, first: int = 1, last: int = 10**9) -> list[ast.Call]:
        """Calls by the last part of their name, on these lines."""
        every = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and called(node) == name]
        return [node for node in every if node.lineno <= last and (node.end_lineno or 0) >= first]

    def call(self, line: int, name: str) -> ast.Call:
        found = self.calls(name, line, line)
        if len(found) != 1:
            raise NotFound(f"{self.path}:{line} does not call {name} once")
        return found[0]

    def loops(self, node: ast.AST) -> list[ast.stmt]:
        """Loops around a node inside of its function, the innermost first."""
        return [one for one in self._above(node) if isinstance(one, LOOPS)]

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self._parents.get(node)) is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield parent
            node = parent

    def segment(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def imports_end(self) -> int:
        """The line after the imports at the top."""
        last = 0
        for node in self.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                last = node.end_lineno or last
            elif last and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                break
        if not last:
            raise NotFound(f"{self.path} imports nothing at its top")
        return last + 1

    def start(self) -> tuple[int, str]:
        """The first line of what runs: under `if __name__ == "__main__"`, or after the imports; and how far it is indented."""
        for node in self.tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test):
                first = node.body[0]
                self.alone(first) if isinstance(first, _SIMPLE) else None
                return first.lineno, " " * first.col_offset
        return self.imports_end(), ""

    def imported(self, name: str) -> bool:
        """Whether a module is imported at the top under its own name."""
        there = [one for node in self.tree.body if isinstance(node, ast.Import) for one in node.names]
        return any(one.name == name and one.asname in (None, name) for one in there)

    # ------------------------------------------------------------------ changing

    def replace(self, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        self._edit(self._byte(node.lineno, node.col_offset), self._byte(node.end_lineno or node.lineno, node.end_col_offset or 0), text)

    def append(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Right after a node."""
        end = self._byte(node.end_lineno or node.lineno, node.end_col_offset or 0)
        self._edit(end, end, text)

    def insert(self, line: int, text: Sequence[str], order: int = 0) -> None:
        """Before a line; of several there, those of the lowest order stand first."""
        at = min(self._byte(line, 0), len(self.source.encode()))
        self._edit(at, at, "".join(f"{one}\n" for one in text), order)

    def guard(self, statements: Sequence[ast.stmt], condition: str) -> None:
        """Statements only under a condition; those that follow each other under one."""
        ordered = sorted(statements, key=lambda one: one.lineno)
        for place, node in enumerate(ordered):
            self.alone(node)
            before = ordered[place - 1] if place else None
            if before is None or (before.end_lineno or 0) + 1 != node.lineno or before.col_offset != node.col_offset:
                self.insert(node.lineno, [f"{' ' * node.col_offset}if {condition}:"], 1)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                self._edit(self._byte(line, 0), self._byte(line, 0), "    ", 2)
                self.guarded.add(line)

    def _byte(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _edit(self, start: int, end: int, text: str, order: int = 0) -> None:
        self.edits.append((start, end, order, len(self.edits), text))

    def text(self) -> str:
        """The file with all changes."""
        content = self.source.encode()
        if not content.endswith(b"\n"):
            content += b"\n"
        for start, end, _, _, text in sorted(self.edits, reverse=True):
            content = content[:start] + text.encode() + content[end:]
        return content.decode()

    def diff(self) -> str:
        """For `patch -p0`."""
        new = self.text()
        compile(new, self.path, "exec")
        before = self.source if self.source.endswith("\n") else self.source + "\n"
        return "".join(difflib.unified_diff(before.splitlines(True), new.splitlines(True), self.path, self.path))


def called(node: ast.Call) -> str:
    """The last part of what is called: `step` of `self.optimizer.step()`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def receiver(node: ast.Call) -> str:
    """What a method is called of, as it is written."""
    return ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""

