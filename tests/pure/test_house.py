"""The house: folders of a size that one can see through, a class name for one thing, no cycle between files, nothing private across them."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 18
"""In a folder."""
APART = ("foretell/zoo", "foretell/eject/pieces", "foretell/tune/corpus")
"""Plain models, pieces of scripts that are written for others, and kernels that are run as anybody's: each stands alone."""


@dataclass(frozen=True)
class Source:
    """What rules ask about a file. Its syntax is not kept: a million nodes that stay are looked at by every collection of garbage."""

    path: Path
    says: str
    classes: frozenset[str]
    imports: tuple[str, ...]
    """Of foretell, wherever they stand, but for those that only name types."""
    offers: tuple[tuple[str, str | None], ...]
    """Names that are imported at the top, and from where."""
    private: tuple[str, ...]
    """What it uses of other files that is theirs alone."""


@functools.cache
def paths() -> dict[str, Path]:
    found = sorted((ROOT / "foretell").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in found}


@functools.cache
def sources() -> dict[str, Source]:
    """Module → its file and what is asked about it."""
    return {name: read(path) for name, path in paths().items()}


def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(statements(tree, types=True))
    offers = [(one.asname or one.name, node.module) for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names]
    return Source(
        path, ast.get_docstring(tree) or "", frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        tuple(imports(statements(tree, types="TYPE_CHECKING" not in text))), tuple(offers), tuple(private_across(path, text, tree, nodes)),
    )  # fmt: skip


def statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """All of them, wherever they stand, without what they are made of; or without those that only a type checker reads."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        if part == "body" and not types and isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
            continue
        for node in getattr(tree, part, ()):
            yield node
            yield from statements(node, types)


def is_apart(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(APART)


# ---------------------------------------------------------------- folders


def test_folders_can_be_seen_through() -> None:
    files = collections.Counter(path.parent for path in paths().values())
    assert {str(folder.relative_to(ROOT)): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    silent = [name for name, source in sources().items() if source.path.name == "__init__.py" and not source.says]
    assert silent == []


def test_what_a_folder_names_is_there() -> None:
    """Single words in backticks on the page of a folder are its files and folders, or other rooms."""
    missing = []
    for name, source in sources().items():
        if source.path.name == "__init__.py" and name != "foretell" and not is_apart(source.path):
            for word in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py)?)`", source.says):
                here = source.path.parent / word
                if not (here.exists() or here.with_suffix(".py").exists() or (ROOT / "foretell" / word).exists()):
                    missing.append(f"{name}: {word}")
    assert missing == []


# ---------------------------------------------------------------- names


def test_a_class_name_has_one_meaning() -> None:
    where = collections.defaultdict(set)
    for source in sources().values():
        if not is_apart(source.path):
            for name in source.classes:
                where[name].add(str(source.path.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in where.items() if len(files) > 1} == {}


def private_across(path: Path, text: str, tree: ast.Module, nodes: list[ast.AST]) -> Iterator[str]:
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretell"):
            for one in node.names:
                if f"{node.module}.{one.name}" in paths():
                    modules[one.asname or one.name] = f"{node.module}.{one.name}"
                elif one.name.startswith("_") and not one.name.startswith("__"):
                    yield f"{path.relative_to(ROOT)}: {node.module}.{one.name}"
    if not modules or not re.search(rf"\b({'|'.join(modules)})\s*\.\s*_[^_]", text):
        return
    everything = list(ast.walk(tree))
    names = {name for name in modules if not shadowed(everything, name)}
    for node in everything:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names and re.match("_[^_]", node.attr):
            yield f"{path.relative_to(ROOT)}: {modules[node.value.id]}.{node.attr}"


def shadowed(nodes: list[ast.AST], name: str) -> bool:
    """Whether a function has an argument or a variable of that name."""
    return any(
        (isinstance(node, ast.arg) and node.arg == name) or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        for node in nodes
    )


def test_what_other_files_use_is_public() -> None:
    assert [one for source in sources().values() for one in source.private] == []


PRIVATE = (
    "from foretell.units import _gib", "from foretell import units\nx = units._gib", "def f():\n    from foretell import units as u\n    u . _gib()",
)  # fmt: skip


@pytest.mark.parametrize("text", [*PRIVATE, "from foretell import units\nx = units.gib", "from foretell import units\nfor units in x: units._gib"])
def test_what_is_private_is_found(text: str) -> None:
    tree = ast.parse(text)
    assert bool(list(private_across(ROOT / "planted.py", text, tree, list(statements(tree, types=True))))) == (text in PRIVATE)


# ---------------------------------------------------------------- imports


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foretell"):
            for one in node.names:
                yield f"{node.module}.{one.name}" if f"{node.module}.{one.name}" in paths() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in paths())


def test_no_files_import_each_other() -> None:
    """Not even late: the package itself, which offers what `api` has, stands aside."""
    pairs = ((name, other) for name, source in sources().items() for other in source.imports)
    graph = nx.DiGraph(pair for pair in pairs if pair[0] != pair[1] and "foretell" not in pair)
    assert [sorted(one) for one in nx.strongly_connected_components(graph) if len(one) > 1] == []


def test_no_file_hides_what_its_folder_offers() -> None:
    """A submodule that is imported later than a function of the same name takes its place."""
    hidden = []
    for name, source in sources().items():
        if source.path.name == "__init__.py":
            offers = dict(source.offers)
            hidden += [f"{name}.{one}" for one, origin in offers.items() if f"{name}.{one}" in paths() and origin not in (name, f"{name}.{one}")]
    assert hidden == []


@pytest.mark.parametrize("cycle", [True, False])
def test_a_cycle_would_be_seen(cycle: bool) -> None:
    trees = {"a": "import b", "b": "import c", "c": "import a" if cycle else ""}
    graph = nx.DiGraph((name, one.names[0].name) for name, text in trees.items() for one in ast.parse(text).body if isinstance(one, ast.Import))
    assert any(len(one) > 1 for one in nx.strongly_connected_components(graph)) == cycle
