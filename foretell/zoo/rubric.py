"""How well a module of the zoo is written down, counted from facts that can be looked up; nothing is typed in by hand.

The six categories, each from 0 to 5, are those of the MLCommons Science benchmark collection: software, specification,
dataset, metrics, reference solution, documentation (Hawks et al. 2025, "An MLCommons Scientific Benchmarks Ontology",
arXiv:2511.05614; the schema is `source/benchmarks-format.yaml` of github.com/mlcommons-science/benchmark). There people rate;
here each category is five facts of this zoo, a point each, and a point that is lost says why. The score is the mean of six.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretell.zoo.catalogue import Card, arguments, functions, imports, newest

CATEGORIES = ("software", "specification", "dataset", "metrics", "reference solution", "documentation")
POINTS = 5
CALLS = ("build", "batch", "loss")
BYTES_WITHIN, SECONDS_WITHIN = 0.05, 0.25
PASSED = "pass"
_READERS = frozenset({"open", "urlopen", "urlretrieve", "read_text", "read_bytes", "fromfile", "imread"})
_FEW_WORDS = 50
_GPU = re.compile(r"nvidia|instinct|radeon|geforce|tesla|rtx|cuda|gpu|\bmi\d{3}|\b(?:gh|gb|[abhlvt])\d{1,3}s?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Rating:
    """Points of one category, with the reason of each that is lost."""

    category: str
    points: int
    lost: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """What the rubric says of a module."""

    module: str
    ratings: tuple[Rating, ...]

    @property
    def mean(self) -> float:
        return sum(rating.points for rating in self.ratings) / len(self.ratings)

    @property
    def lost(self) -> tuple[str, ...]:
        """`category: reason` of every lost point."""
        return tuple(f"{rating.category}: {reason}" for rating in self.ratings for reason in rating.lost)


def rate(card: Card) -> Score:
    """The score of a module; of its entries all must be there, since some facts are about all of them."""
    return Score(card.module, tuple(_rating(category, card) for category in CATEGORIES))


def _rating(category: str, card: Card) -> Rating:
    lost = tuple(said for said in _FACTS[category](card) if said)
    return Rating(category, POINTS - len(lost), lost)


def unless(holds: object, reason: str) -> str:
    """The reason, unless the fact holds."""
    return "" if holds else reason


# --- the six ---------------------------------------------------------------------------------------------------------


def _software(card: Card) -> Iterator[str]:
    calls = functions(card)
    missing = [name for name in CALLS if name not in calls]
    yield unless(not missing, f"no {' and no '.join(missing)}")
    foreign = sorted(_foreign(card.source))
    yield unless(not foreign, f"it imports {', '.join(foreign)}: more than torch and what Python brings")
    bare = [name for name in CALLS if name in calls and not _annotated(calls[name])]
    yield unless(not bare, f"{', '.join(bare)} without types")
    yield unless(any(entry.small for entry in card.entries), "no entry is small enough to run anywhere")
    known = any(all(row.get(key) for key in ("torch", "commit", "date")) for row in card.rows)
    yield unless(known, "no measured row says torch, commit and date")


def _specification(card: Card) -> Iterator[str]:
    tagged = all(entry.domain and entry.task and entry.motif for entry in card.entries)
    yield unless(tagged, "an entry without domain, task or motif")
    yield unless(re.match(r"\W*(the methods compared by )?[A-Z]", card.citation), "the docstring names no authors with a year")
    yield unless(re.search(r"\bKept\b", card.text), "the docstring does not say what is kept of the paper")
    yield unless(re.search(r"\b[Ll]eft\s+out\b", card.text), "the docstring does not say what is left out")
    yield unless(all(entry.trap for entry in card.entries), "no trap: nothing says what a planner gets wrong of it")


def _dataset(card: Card) -> Iterator[str]:
    batch = functions(card).get("batch")
    if batch is None:
        yield from (f"no batch: nothing can be said of {what}" for what in ("sizes", "files", "samples", "chance", "growth"))
        return
    yield unless(list(arguments(batch))[:4] == ["model", "micro_batch", "seq", "image"], "batch cannot be asked for a size")
    reads = sorted(_called(batch) & _READERS)
    yield unless(not reads, f"batch reads what does not come with it ({', '.join(reads)})")
    yield unless(ast.get_docstring(batch), "batch does not say what a sample is")
    yield unless(not _unseeded(card.source), "its chance cannot be repeated: random numbers without a seed")
    yield unless(any(isinstance(node, ast.Name) and node.id == "micro_batch" for node in ast.walk(batch)), "all batches are alike")


def _metrics(card: Card) -> Iterator[str]:
    loss = functions(card).get("loss")
    said = loss is not None and loss.returns is not None and ast.get_docstring(loss)
    yield unless(said, "loss does not say what is minimised")
    rows = newest(card.rows)
    yield unless(any(_pair(row, "bytes") for row in rows), "no row of bytes, predicted and measured")
    yield unless(any(_pair(row, "seconds") for row in rows), "no row of seconds, predicted and measured")
    yield unless(any(not is_cpu(row) for row in rows), "no row from a GPU")
    there = {phase for row in rows for phase in str(row.get("phase", "")).split("+")}
    without = [phase for phase in card.phases if len(card.phases) > 1 and phase not in there]
    yield unless(rows and not without, f"no row of the phase {', '.join(without)}" if without else "no row of a step")


def _reference(card: Card) -> Iterator[str]:
    sizes = {entry.small for entry in card.entries}
    yield unless(sizes == {True, False}, "not both a size for tests and a full one")
    settings = card.defaults
    strange = [key for entry in card.entries for key in entry.config if key not in settings]
    unset = [key for key, default in settings.items() if default is None]
    yield unless(settings and not strange and not unset, f"settings without a default: {', '.join(unset + strange) or 'all'}")
    rows = [row for row in newest(card.rows) if is_cpu(row)]
    passed = {row["name"] for row in rows} - {row["name"] for row in rows if row.get("status") != PASSED}
    waiting = [entry.name for entry in card.entries if entry.small and entry.name not in passed]
    yield unless(passed and not waiting, f"no passed check of {', '.join(waiting) or 'any entry'}")
    yield _off(rows, "bytes", BYTES_WITHIN)
    yield _off(rows, "seconds", SECONDS_WITHIN)


def _documentation(card: Card) -> Iterator[str]:
    yield unless('"' in card.text.split("\n\n")[0], "the docstring does not give the paper's title")
    words = len(card.text.split())
    yield unless(words >= _FEW_WORDS, f"the docstring has {words} words, fewer than {_FEW_WORDS}")
    unnamed = [phase for phase in (*card.phases, *card.samplers) if len(card.phases) > 1 and phase not in card.text]
    yield unless(not unnamed, f"the docstring does not name the phase {', '.join(unnamed)}")
    summaries = {entry.summary for entry in card.entries if entry.summary}
    yield unless(len(summaries) == len(card.entries), "entries without a summary of their own")
    told = f"{card.text} {ast.get_docstring(functions(card)['build']) or ''}" if card.defaults else ""
    choices = [key for key, default in card.defaults.items() if isinstance(default, str) and key != "phase"]
    silent = [key for key in choices if f"`{key}`" not in told and f'"{card.defaults[key]}"' not in told]
    yield unless(not silent, f"the docstring does not say what {', '.join(silent)} may be")


_FACTS: Mapping[str, Callable[[Card], Iterator[str]]] = {
    "software": _software,
    "specification": _specification,
    "dataset": _dataset,
    "metrics": _metrics,
    "reference solution": _reference,
    "documentation": _documentation,
}


# --- facts -----------------------------------------------------------------------------------------------------------


def is_cpu(row: Mapping[str, Any]) -> bool:
    """Whether a row was measured on a CPU: on whatever does not have the name of a GPU."""
    return _GPU.search(str(row.get("device", ""))) is None


def error_of(row: Mapping[str, Any], what: str) -> float | None:
    """By how much of the measured figure (`bytes`, `seconds`) the predicted one is off; None without both."""
    pair = _pair(row, what)
    return pair[0] / pair[1] - 1 if pair else None


def _pair(row: Mapping[str, Any], what: str) -> tuple[float, float] | None:
    predicted, measured = row.get(f"predicted_{what}"), row.get(f"measured_{what}")
    return (predicted, measured) if predicted and measured else None


def _off(rows: list[Mapping[str, Any]], what: str, within: float) -> str:
    """Why the predictions of a CPU's rows are not good enough; empty where all are."""
    errors = [(abs(error), row) for row in rows if (error := error_of(row, what)) is not None]
    if not errors:
        return f"{what} were never held against a measurement on a CPU"
    worst, row = max(errors, key=lambda item: item[0])
    return unless(worst <= within, f"{what} of {row['name']} are off by {worst:.0%}, more than {within:.0%}")


def _foreign(source: str) -> set[str]:
    """Packages that a module imports besides torch, what Python brings and the zoo itself."""
    allowed = {"torch", *sys.stdlib_module_names}
    return {name for name in imports(source) if name.split(".")[0] not in allowed and not name.startswith("foretell.zoo")}


def _annotated(function: ast.FunctionDef) -> bool:
    every = [*function.args.args, *function.args.kwonlyargs]
    return function.returns is not None and all(argument.annotation is not None for argument in every)


def _called(function: ast.FunctionDef) -> set[str]:
    """Last names of what a function calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def _unseeded(source: str) -> bool:
    """Whether `random` or numpy is used in another way than `random.Random(seed)`."""
    return bool({"random", "numpy"} & set(imports(source)) and re.search(r"\b(random|np|numpy)\.(?!Random\b)\w", source))
