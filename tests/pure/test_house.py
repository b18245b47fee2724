"""The house: folders of a size that one can see through, a class name for one thing, no cycle between files, nothing private across them."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 18
"""In a folder."""
APART = ("foretell/zoo", "foretell/eject/pieces", "foretell/tune/corpus")
"""Plain models, pieces of scripts that are written for others, and kernels that are run as anybody's: each stands alone."""


@functools.cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Module → its file and its syntax."""
    found = {}
    for path in sorted((ROOT / "foretell").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@functools.cache
def walked(tree: ast.AST) -> list[ast.AST]:
    """All of it, once for all rules."""
    return list(ast.walk(tree))


def is_apart(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(APART)


# ---------------------------------------------------------------- folders


def test_folders_can_be_seen_through() -> None:
    files = collections.Counter(path.parent for path, _ in sources().values())
    assert {str(folder.relative_to(ROOT)): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    silent = [name for name, (path, tree) in sources().items() if path.name == "__init__.py" and not ast.get_docstring(tree)]
    assert silent == []


def test_what_a_folder_names_is_there() -> None:
    """Single words in backticks on the page of a folder are its files and folders, or other rooms."""
    missing = []
    for name, (path, tree) in sources().items():
        if path.name == "__init__.py" and name != "foretell" and not is_apart(path):
            for word in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py)?)`", ast.get_docstring(tree) or ""):
                here = path.parent / word
                if not (here.exists() or here.with_suffix(".py").exists() or (ROOT / "foretell" / word).exists()):
                    missing.append(f"{name}: {word}")
    assert missing == []


# ---------------------------------------------------------------- names


def test_a_class_name_has_one_meaning() -> None:
    where = collections.defaultdict(set)
    for path, tree in sources().values():
        if not is_apart(path):
            for node in walked(tree):
                if isinstance(node, ast.ClassDef):
                    where[node.name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in where.items() if len(files) > 1} == {}


def private_across() -> Iterator[str]:
    for path, tree in sources().values():
        modules: dict[str, str] = {}
        for node in walked(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretell"):
                for one in node.names:
                    if f"{node.module}.{one.name}" in sources():
                        modules[one.asname or one.name] = f"{node.module}.{one.name}"
                    elif one.name.startswith("_") and not one.name.startswith("__"):
                        yield f"{path.relative_to(ROOT)}: {node.module}.{one.name}"
        names = {name for name, module in modules.items() if not shadowed(tree, name)}
        for node in walked(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names and re.match("_[^_]", node.attr):
                yield f"{path.relative_to(ROOT)}: {modules[node.value.id]}.{node.attr}"


def shadowed(tree: ast.Module, name: str) -> bool:
    """Whether a function has an argument or a variable of that name."""
    return any(
        (isinstance(node, ast.arg) and node.arg == name) or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        for node in walked(tree)
    )


def test_what_other_files_use_is_public() -> None:
    assert list(private_across()) == []


# ---------------------------------------------------------------- imports


def imports(tree: ast.Module) -> Iterator[str]:
    """Of foretell, wherever they stand, but for those that only name types."""
    types = {id(inner) for node in walked(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for inner in walked(node)}
    for node in walked(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretell"):
            for one in node.names:
                yield f"{node.module}.{one.name}" if f"{node.module}.{one.name}" in sources() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in sources())


def test_no_files_import_each_other() -> None:
    """Not even late: the package itself, which offers what `api` has, stands aside."""
    pairs = ((name, other) for name, (_, tree) in sources().items() for other in imports(tree))
    graph = nx.DiGraph(pair for pair in pairs if pair[0] != pair[1] and "foretell" not in pair)
    assert [sorted(one) for one in nx.strongly_connected_components(graph) if len(one) > 1] == []


def test_no_file_hides_what_its_folder_offers() -> None:
    """A submodule that is imported later than a function of the same name takes its place."""
    hidden = []
    for name, (path, tree) in sources().items():
        if path.name == "__init__.py":
            offers = {one.asname or one.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names}
            hidden += [f"{name}.{one}" for one, origin in offers.items() if f"{name}.{one}" in sources() and origin not in (name, f"{name}.{one}")]
    assert hidden == []


@pytest.mark.parametrize("cycle", [True, False])
def test_a_cycle_would_be_seen(cycle: bool) -> None:
    trees = {"a": "import b", "b": "import c", "c": "import a" if cycle else ""}
    graph = nx.DiGraph((name, one.names[0].name) for name, text in trees.items() for one in ast.parse(text).body if isinstance(one, ast.Import))
    assert any(len(one) > 1 for one in nx.strongly_connected_components(graph)) == cycle
