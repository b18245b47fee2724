"""The shape of the package: rooms import one way, pure modules do without torch, files and functions stay short."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "foretell"

ROOMS = (
    "errors", "units", "files", "decode", "cores", "notebook", "quantities", "zoo", "kernels", "trace", "hardware", "options", "plan", "lower",
    "price", "simulate",
    "checkpoint", "runtime", "search", "prove", "tune", "serve", "report", "eject", "export", "observe", "api", "cli",
)  # fmt: skip
"""Top to bottom: a room imports itself and rooms before it."""

PURE = ("errors", "units", "files", "decode", "cores", "notebook", "options", "trace.types", "trace.recipe", "quantities", "hardware", "plan",
        "lower", "price", "simulate", "search.solve.choose", "runtime.detect.hangs", "runtime.detect.slow", "runtime.detect.links",
        "runtime.detect.detector", "runtime.detect.history", "runtime.detect.ring")  # fmt: skip
"""Modules, and rooms with all their modules, that must import without torch."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


# ---------------------------------------------------------------- which module is which


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`foretell.simulate.plan` → cost; the package itself → empty."""
    room = module.split(".")[1] if "." in module else ""
    return "cli" if room == "__main__" else room


CALLED = ("import_module", "__import__")
LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.If, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache(maxsize=1)
def parsed(source: str) -> list[ast.AST]:
    """What rules look at. Inside expressions only a call that imports is, and such a file has its name."""
    tree = ast.parse(source)
    nodes = ast.walk(tree) if any(name in source for name in CALLED) else statements(tree)
    return [node for node in nodes if isinstance(node, LOOKED_AT)]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, wherever they stand, without what they are made of."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(tree, part, ()):
            yield node
            yield from statements(node)


# ---------------------------------------------------------------- one-way imports


def violations(source: str, module: str, *, package: bool = False) -> list[str]:
    """What `source`, as the text of `module`, imports against the order of the rooms."""
    nodes = parsed(source)
    here = room_of(module)
    if here and here not in ROOMS:
        return [f"{module}: '{here}' is no room; give it a place in ROOMS"]
    lazy = _lazy_lines(nodes)
    found = []
    for line, target in sorted(_imports(nodes, module, package)):
        complaint = _complaint(here, target, lazy=line in lazy)
        if complaint:
            found.append(f"{module}, line {line}: {complaint}")
    return found


def _complaint(here: str, target: str, *, lazy: bool) -> str:
    """Why room `here` may not import room `target`; empty when it may."""
    if not here:
        if target != "api":
            return f"the package itself imports {target}, and may import api alone"
        return "" if lazy else "the package itself imports api before anyone asked for it"
    if target not in ROOMS:
        return f"{here} imports '{target}', which is no room"
    if here == "zoo" and target != "zoo":
        return f"zoo imports {target}, and may import nothing of foretell but itself"
    if ROOMS.index(target) > ROOMS.index(here):
        return f"{here} imports {target}, which stands below it"
    return ""


def _imports(nodes: list[ast.AST], module: str, package: bool) -> Iterator[tuple[int, str]]:
    """Line and room of every import of foretell, wherever it stands."""
    for node in nodes:
        for name in _imported_names(node, module, package):
            parts = name.split(".")
            if parts[0] != "foretell" or parts[1:] == ["__version__"]:
                continue
            room = room_of(name)
            is_room = room in ROOMS or _is_there(room)
            # What the package offers without being a room, it has from api.
            yield node.lineno, room if room and (is_room or len(parts) > 2) else "api"


@functools.cache
def _is_there(room: str) -> bool:
    return any((PACKAGE / end).exists() for end in (room, f"{room}.py"))


def _imported_names(node: ast.AST, module: str, package: bool) -> list[str]:
    """Full dotted names that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + package]
            base = ".".join([*parents, base] if base else parents)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and _name_of(node.func) in CALLED:
        text = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            return [text.value]
    return []


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _lazy_lines(nodes: list[ast.AST]) -> set[int]:
    """Lines inside functions, and those that only a type checker reads."""
    lines: set[int] = set()
    for node in nodes:
        only_types = isinstance(node, ast.If) and _name_of(node.test) == "TYPE_CHECKING"
        if only_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            lines.update(range(body[0].lineno, (body[-1].end_lineno or 0) + 1))
    return lines


@functools.cache
def complaints() -> tuple[list[str], list[str]]:
    """What imports against the order and what is too long, each file read once: trees that are kept slow down collections of garbage."""
    assert files(), f"no Python files under {PACKAGE}"
    against, long = [], []
    for path in files():
        source = path.read_text(encoding="utf-8")
        against += violations(source, module_of(path), package=path.name == "__init__.py")
        long += too_long(source, module_of(path))
    return against, long


def test_rooms_import_only_rooms_above_them() -> None:
    found, _ = complaints()
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("foretell.simulate.plan", "from foretell.report import table", "simulate imports report"),
        ("foretell.simulate.plan", "import foretell.cli.main", "simulate imports cli"),
        ("foretell.simulate.plan", "import os, foretell.api as api", "simulate imports api"),
        ("foretell.simulate.plan", "from foretell import search", "simulate imports search"),
        ("foretell.simulate.plan", "from foretell import fit", "simulate imports api"),
        ("foretell.simulate.plan", "import foretell", "simulate imports api"),
        ("foretell.simulate.plan", "from ..report import table", "simulate imports report"),
        ("foretell.simulate.plan", "from .. import runtime", "simulate imports runtime"),
        ("foretell.trace.record.step", "def f():\n    from foretell.price import machine", "trace imports price"),
        ("foretell.trace.record.step", "if TYPE_CHECKING:\n    from foretell.plan import Plan", "trace imports plan"),
        ("foretell.trace.record.step", "import importlib\nimportlib.import_module('foretell.simulate')", "trace imports simulate"),
        ("foretell.trace.record.step", "import_module(f'foretell.lower.{name}')", "trace imports lower"),
        ("foretell.errors", "from foretell.units import gib", "errors imports units"),
        ("foretell.zoo.language.gpt", "from foretell.errors import UserError", "zoo imports errors"),
        ("foretell.zoo.language.gpt", "from foretell.units import gib", "zoo imports units"),
        ("foretell.simulate.plan", "from foretell.attic.old import x", "'attic', which is no room"),
        ("foretell.attic", "x = 1", "'attic' is no room"),
        ("foretell", "from foretell.api import fit", "imports api before anyone asked"),
        ("foretell", "def __getattr__(name):\n    from foretell.simulate import memory", "may import api alone"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    found = violations(source, module, package=module == "foretell")
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("foretell.simulate.plan", "from foretell.trace.types import Trace\nfrom foretell.simulate import memory"),
        ("foretell.simulate.plan", "from . import allocator\nfrom ..errors import UserError"),
        ("foretell.simulate.plan", "import torch, foretellish\nfrom cli import main"),
        ("foretell.trace.load.model", "from foretell import zoo"),
        ("foretell.trace.load.model", "from foretell import __version__"),
        ("foretell.zoo.generative.dit", "from foretell.zoo.vision.vit import Mlp"),
        ("foretell.units", "from foretell.errors import UserError"),
        ("foretell.cli.fit.fit", "from foretell import api\nfrom foretell.report import table\nfrom foretell import fit"),
        ("foretell.__main__", "from foretell.cli import main"),
        ("foretell", "def __getattr__(name):\n    from foretell import api\n    return getattr(api, name)"),
        ("foretell", "if TYPE_CHECKING:\n    from foretell.api import fit"),
    ],
)
def test_what_is_allowed_is_not_found(module: str, source: str) -> None:
    assert violations(source, module, package=module == "foretell") == []


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert violations("from .allocator import Block", "foretell.simulate", package=True) == []
    assert violations("from ..report import table", "foretell.simulate", package=True) != []


# ---------------------------------------------------------------- without torch


ONE_BY_ONE = """
import json, os, sys, numpy
left = sys.argv[1:]
while left:
    said, saying = os.pipe()
    if os.fork() == 0:
        os.close(said)
        found = {}
        for module in left:
            try:
                __import__(module)
                found[module] = "it imports torch" if "torch" in sys.modules else ""
            except BaseException as error:
                found[module] = f"{type(error).__name__}: {error}"
            if found[module]:
                break
        os.write(saying, json.dumps(found).encode())
        os._exit(0)
    os.close(saying)
    with open(said) as stream:
        found = json.loads(stream.read())
    os.wait()
    left = [name for name in left if name not in found]
    print(json.dumps(found), flush=True)
"""
"""Imports module after module, and the next in a process of its own where one was wrong: each is forked from one that has done no
more than begin and import numpy. What others have imported before is no matter, as no files import each other (test_house.py)."""


def said_by(modules: list[str], *folders: Path) -> dict[str, str]:
    """Module → what is wrong with importing it alone; nothing where it does without torch."""
    path = os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE, *modules], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return {name: wrong for line in done.stdout.splitlines() if line.startswith("{") for name, wrong in json.loads(line).items()}


def pure_modules() -> list[str]:
    """Every module of PURE that exists, and the two that decide how soon `foretell --help` answers."""
    modules = [module_of(path) for path in files()]
    wanted = [f"foretell.{name}" for name in PURE]
    pure = [name for name in modules if any(f"{name}.".startswith(f"{want}.") and ".probe." not in name for want in wanted)]
    return pure + [name for name in ("foretell", "foretell.cli") if name in modules]


def test_pure_modules_are_found() -> None:
    assert {"foretell.errors", "foretell.units", "foretell.trace.types", "foretell.price", "foretell.simulate"} <= set(pure_modules())


@pytest.fixture(scope="module")
def imported() -> dict[str, str]:
    return said_by(pure_modules())


@pytest.mark.parametrize("module", pure_modules())
def test_pure_modules_import_without_torch(module: str, imported: dict[str, str]) -> None:
    assert imported[module] == ""


def test_a_planted_torch_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "planted.py").write_text("import torch")
    (tmp_path / "broken.py").write_text("1 / 0")
    found = said_by(["foretell.units", "planted", "broken", "foretell.errors"], tmp_path)
    assert found == {"foretell.units": "", "planted": "it imports torch", "broken": "ZeroDivisionError: division by zero", "foretell.errors": ""}


# ---------------------------------------------------------------- short files, short functions


def too_long(source: str, name: str) -> list[str]:
    """The file, if it has too many lines, and its functions that have."""
    count = len(source.splitlines())
    found = [f"{name}: {count} lines, {MAX_FILE_LINES} allowed"] if count > MAX_FILE_LINES else []
    for node in parsed(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{name}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} allowed")
    return found


def test_files_and_functions_are_short() -> None:
    _, found = complaints()
    assert not found, "\n" + "\n".join(found)


def test_what_is_too_long_is_found() -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert too_long("x = 1\n" * MAX_FILE_LINES, "m") == []
    assert too_long("x = 1\n" * (MAX_FILE_LINES + 1), "m") == ["m: 501 lines, 500 allowed"]
    assert too_long(function(MAX_FUNCTION_LINES), "m") == []
    assert too_long(function(MAX_FUNCTION_LINES + 1), "m") == ["m: f has 81 lines, 80 allowed"]
