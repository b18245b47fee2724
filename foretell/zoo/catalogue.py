"""The zoo as a catalogue: each module with its text, settings and measured rows, found by tag. No torch is imported.

What is said of a module is read from its source, so that nothing is written down twice.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell.zoo import ENTRIES, Entry
from foretell.zoo.places import FOLDER, folders, path_of
from foretell.zoo.tags import LEVELS, TASKS, domains_of, level_of

MEASURED = FOLDER / "measured.jsonl"
"""What `foretell zoo check` measured and kept: a JSON object a line."""
TAGS = ("task", "domain", "motif", "level", "paper")
"""What modules can be asked for, besides by name."""
_SUMS: dict[type[ast.operator], Callable[[int, int], Any]] = {
    ast.Add: operator.add, ast.Mult: operator.mul, ast.Pow: operator.pow, ast.LShift: operator.lshift,
}  # fmt: skip
_IMPORT = re.compile(r"^[ ]*(?:import ([\w., ]+)|from ([\w.]+) import (\([^)]*\)|[^\n#]+))", re.MULTILINE)
_CITED = re.compile(r"\(([^()]*\b(?:19|20)\d\d\b[^()]*)\)")


@dataclass(frozen=True)
class Card:
    """One module of the zoo and what is known of it."""

    module: str
    entries: tuple[Entry, ...]
    source: str = field(repr=False)
    rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """Measured, oldest first."""

    @property
    def file(self) -> str:
        """Where its source is, from the root of the repository."""
        return f"foretell/zoo/{folders()[self.module]}/{self.module}.py"

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.source)

    @property
    def text(self) -> str:
        """The module's docstring."""
        return ast.get_docstring(self.tree) or ""

    @property
    def title(self) -> str:
        """What the docstring begins with, up to whom it is by."""
        return re.split(r" \(|: |\. ", _one_line(self.text) + " (")[0].rstrip(",.")

    @property
    def citation(self) -> str:
        """Authors, year and title as the docstring has them; empty where it names no year."""
        found = _CITED.search(_one_line(self.text))
        return found[1] if found else ""

    @property
    def level(self) -> str:
        return level_of(self.module)

    @property
    def papers(self) -> tuple[str, ...]:
        return _unique(entry.paper for entry in self.entries if entry.paper)

    @property
    def tasks(self) -> tuple[str, ...]:
        return _unique(entry.task for entry in self.entries if entry.task)

    @property
    def domains(self) -> tuple[str, ...]:
        return _unique(domain for entry in self.entries for domain in domains_of(entry))

    @property
    def motifs(self) -> tuple[str, ...]:
        return _unique(entry.motif for entry in self.entries if entry.motif)

    @property
    def traps(self) -> tuple[str, ...]:
        return _unique(entry.trap for entry in self.entries if entry.trap)

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of `build` and what they are if not given."""
        build = functions(self).get("build")
        return arguments(build) if build is not None else {}

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that are trained in turn; empty where there is one."""
        return _constants(self.tree).get("PHASES", ())

    @property
    def samplers(self) -> tuple[str, ...]:
        """Phases for inference only."""
        return _constants(self.tree).get("SAMPLERS", ())

    @property
    def needs(self) -> tuple[str, ...]:
        """Other modules of the zoo that its code imports, and theirs."""
        found: list[str] = []
        waiting = [*imported(self.source)]
        while waiting:
            found.append(waiting.pop(0))
            waiting += [name for name in imported(source_of(found[-1])) if name not in (self.module, *found, *waiting)]
        return tuple(found)


def cards(measured: Path = MEASURED, entries: Iterable[Entry] | None = None) -> tuple[Card, ...]:
    """A card for each module, in the order of the listing."""
    listed = tuple(ENTRIES.values() if entries is None else entries)
    rows = read_rows(measured)
    return tuple(
        _with_rows(Card(name, tuple(one for one in listed if one.module == name), source_of(name)), rows)
        for name in _unique(entry.module for entry in listed)
    )


def read_rows(path: Path = MEASURED) -> tuple[Mapping[str, Any], ...]:
    """Measured rows, oldest first; none where there is no such file, and a line that was cut off does not count."""
    if not path.is_file():
        return ()
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            rows.append(row)
    return tuple(rows)


def newest(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Of the rows of one entry, phase and device the last one."""
    kept: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        key = (row["name"], row.get("phase"), row.get("device"))
        kept.pop(key, None)
        kept[key] = row
    return tuple(kept.values())


def select(found: Iterable[Card], name: str | None = None, **wanted: str | None) -> tuple[Card, ...]:
    """Cards with the entries that have all that is wanted (`TAGS`), and of their rows only theirs.

    A motif and a paper may be given in part; a name is that of a module, with all its entries, or of an entry.
    """
    asked = {tag: text.casefold() for tag, text in wanted.items() if text is not None}
    unknown = set(asked) - set(TAGS)
    if unknown:
        raise TypeError(f"no such tag: {', '.join(sorted(unknown))}")
    kept = []
    for card in found:
        entries = tuple(
            entry
            for entry in card.entries
            if name in (None, card.module, entry.name) and all(_has(card, entry, tag, text) for tag, text in asked.items())
        )
        if entries:
            kept.append(_with_rows(replace(card, entries=entries), card.rows))
    return tuple(kept)


def terms(found: Iterable[Card], tag: str) -> tuple[str, ...]:
    """All that can be asked for under a tag, in order of the alphabet; levels in theirs."""
    if tag == "level":
        return LEVELS
    held = tuple(found)
    if tag == "task":
        return tuple(sorted(_unique(task for card in held for task in card.tasks)))
    if tag == "domain":
        return tuple(sorted(_unique(domain for card in held for domain in card.domains)))
    if tag == "motif":
        return tuple(sorted(_unique(part for card in held for motif in card.motifs for part in re.split(r"[,;] ", motif))))
    if tag == "paper":
        return tuple(sorted(_unique(paper for card in held for paper in (card.papers or (card.title,)))))
    raise TypeError(f"no such tag: {tag}")


# --- reading sources -------------------------------------------------------------------------------------------------


@cache
def source_of(module: str) -> str:
    """The text of a module of the zoo."""
    return path_of(module).read_text(encoding="utf-8")


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports(source: str) -> tuple[str, ...]:
    """Modules that a source imports, wherever it does; of `from here import this` also what this is."""
    found: list[str] = []
    for plain, package, names in _IMPORT.findall(source):
        found += [name.split()[0] for name in plain.split(",")] if plain else [package]
        found += [f"{package}.{name.split()[0]}" for name in re.sub(r"[()\s]+", " ", names).split(",") if name.strip()]
    return _unique(found)


def imported(source: str) -> tuple[str, ...]:
    """Modules of the zoo that a source imports."""
    names = [name.split(".")[3] for name in imports(source) if name.startswith("foretell.zoo.") and name.count(".") > 2]
    return _unique(name for name in names if name in folders())


def functions(card: Card) -> dict[str, ast.FunctionDef]:
    """Functions of the module by name; one that is another module's (`batch = resnet.batch`) as it is there."""
    found = {node.name: node for node in card.tree.body if isinstance(node, ast.FunctionDef)}
    for node in card.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Attribute):
            holder, name = ast.unparse(node.value.value), node.value.attr
            if holder in imported(card.source):
                there = _parsed(source_of(holder)).body
                same = [one for one in there if isinstance(one, ast.FunctionDef) and one.name == name]
                found |= dict.fromkeys([node.targets[0].id], same[0]) if same else {}
    return found


def arguments(function: ast.FunctionDef) -> dict[str, Any]:
    """Arguments with their defaults: a value, or its text where it is no literal; None where there is none."""
    plain = [*function.args.posonlyargs, *function.args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(function.args.defaults))
    pairs = [*zip(plain, [*missing, *function.args.defaults], strict=True)]
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {argument.arg: _value(default) for argument, default in pairs}


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, tuple(_SUMS)):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int) and isinstance(right, int) and abs(right) < 64:
            return _SUMS[type(node.op)](left, right)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names of the module that hold a literal."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


# --- small things ----------------------------------------------------------------------------------------------------


def _with_rows(card: Card, rows: Iterable[Mapping[str, Any]]) -> Card:
    names = {entry.name for entry in card.entries}
    return replace(card, rows=tuple(row for row in rows if row["name"] in names))


def _has(card: Card, entry: Entry, tag: str, text: str) -> bool:
    if tag == "task":
        return text in (entry.task, TASKS.get(entry.task, "").casefold())
    if tag == "domain":
        return text in domains_of(entry)
    if tag == "level":
        return text == card.level
    if tag == "motif":
        return text in entry.motif.casefold()
    said = f"{entry.paper} {'' if entry.paper and len(card.papers) > 1 else f'{card.title} {card.citation}'}"
    return text in said.casefold()


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _one_line(text: str) -> str:
    return " ".join(text.split())
