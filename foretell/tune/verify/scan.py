"""What a candidate's text gives away before it is run. Easily evaded, so no other stage relies on it; what it finds is told early.

It refuses what no kernel needs and cheats do: looking into frames and the collector, threads and processes, other files, replacing
functions of other modules, and falling back inside `try`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MODULES = {
    "gc": "looks through live objects", "inspect": "looks through frames", "ctypes": "reaches memory by address", "subprocess": "starts processes",
    "multiprocessing": "starts processes", "threading": "starts threads", "concurrent": "starts threads", "asyncio": "defers work",
    "socket": "talks to the network", "urllib": "talks to the network", "requests": "talks to the network", "http": "talks to the network",
    "atexit": "defers work", "signal": "changes how the process ends", "mmap": "reaches memory by address", "faulthandler": "looks through frames",
    "traceback": "looks through frames", "pickle": "runs what it reads", "resource": "changes limits", "faketime": "changes the clock",
}  # fmt: skip
CALLS = {
    "eval": "runs text", "exec": "runs text", "compile": "runs text", "open": "reads or writes files", "__import__": "imports by text",
    "globals": "looks through names",
}  # fmt: skip
ATTRIBUTES = {
    "_getframe": "looks through frames", "settrace": "hooks into calls", "setprofile": "hooks into calls",
    "from_address": "reaches memory by address",
    "string_at": "reaches memory by address", "fork": "starts processes", "_exit": "ends the process", "system": "starts processes",
    "sleep": "waits", "use_deterministic_algorithms": "changes global settings", "set_default_dtype": "changes global settings",
    "set_float32_matmul_precision": "changes global settings", "allow_tf32": "changes global settings",
}  # fmt: skip


@dataclass(frozen=True)
class ScanFinding:
    line: int
    text: str


def findings(text: str) -> list[ScanFinding]:
    """In the order of lines."""
    tree = ast.parse(text)
    imported = {
        (one.asname or one.name).split(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for one in node.names
    }  # fmt: skip
    found = {*_modules(tree), *_calls(tree), *_replaced(tree, imported), *_fallbacks(tree)}
    return sorted(found, key=lambda one: (one.line, one.text))


def _modules(tree: ast.Module) -> Iterator[ScanFinding]:
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in MODULES:
                yield ScanFinding(getattr(node, "lineno", 0), f"imports {name}, which {MODULES[name.split('.')[0]]}")


def _calls(tree: ast.Module) -> Iterator[ScanFinding]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield ScanFinding(node.lineno, f"calls {node.func.id}, which {CALLS[node.func.id]}")
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield ScanFinding(node.lineno, f"uses {node.attr}, which {ATTRIBUTES[node.attr]}")


def _replaced(tree: ast.Module, imported: set[str]) -> Iterator[ScanFinding]:
    """`torch.allclose = ...`, `setattr(torch, ...)`."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
        for target in targets:
            root = _root(target)
            if isinstance(target, ast.Attribute) and root in imported:
                yield ScanFinding(target.lineno, f"assigns to {ast.unparse(target)}, which is not its own")
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args else ""
        if isinstance(node, ast.Call) and called in ("setattr", "delattr") and _root(node.args[0]) in imported:
            yield ScanFinding(node.lineno, f"{called} on {ast.unparse(node.args[0])}, which is not its own")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _fallbacks(tree: ast.Module) -> Iterator[ScanFinding]:
    """`try` inside a function: what fails is answered by something else."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Try) and node.handlers:
                    yield ScanFinding(node.lineno, f"has a try in {function.name}: what fails there is answered by something else")
