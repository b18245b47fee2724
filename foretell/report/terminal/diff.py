"""Two revisions on a terminal: the outcome first, a table for each model, what grew below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from foretell.report.diff import text
from foretell.report.diff.judge import (
    BROKEN,
    BYTES,
    COUNT,
    GROWN,
    NEW,
    UNCOMPARED,
    WITHIN,
    Growth,
    ModelDiff,
    RevisionDiff,
)
from foretell.report.words import folded

_STYLES = {WITHIN: "bold green", GROWN: "bold red", NEW: "bold cyan", BROKEN: "bold red", UNCOMPARED: "bold yellow"}
_ASCII = str.maketrans({"→": ">", "…": "...", "±": "+-", "µ": "u", "–": "-"})
_INDENT = "  "


def render(found: RevisionDiff, width: int = 80, *, ascii_only: bool = False) -> Text:
    """The whole screen."""
    lines = [Text(f"{found.base.shown} → {found.head.shown}: {text.summary(found)}", "bold")]
    for one in found.models:
        lines += _model(one, width)
    lines += [Text()]
    said = [f"bounds      growth of {text.bounds(found)}"]
    known = list(dict.fromkeys(text.confidence(one) for one in found.models if one.rows))
    both = any(one.base is not None and one.head is not None for model in found.models for one in model.rows)
    said += [f"confidence  {known[0]}{f'; {text.COMMON_CAUSE}' if both else ''}"] if known else []
    said += [f"note        {note}" for note in found.notes]
    lines += [Text(line) for line in folded(said, width)]
    page = Text("\n").join(lines)
    return Text(page.plain.translate(_ASCII)) if ascii_only else page


def _model(one: ModelDiff, width: int) -> Iterator[Text]:
    yield Text()
    yield Text.assemble((text.VERDICTS[one.verdict], _STYLES[one.verdict]), f"  {text.title(one)}")
    if one.verdict in (BROKEN, NEW, UNCOMPARED) or one.stops_fitting:
        for line in folded([f"{_INDENT}{text.outcome(one)}"], width):
            yield Text(line)
    if one.verdict in (BROKEN, UNCOMPARED) and one.remedy:
        for line in folded([f"{_INDENT}try: {one.remedy}"], width):
            yield Text(line)
    if one.detail and one.verdict == BROKEN:
        for line in one.detail.splitlines():
            yield Text(f"{_INDENT}{_INDENT}{line}")
    yield from _rows(one)
    yield from _growths("memory by category", one.categories, BYTES)
    yield from _growths("new or larger tensors", one.tensors, BYTES)
    yield from _growths("parameters by module", one.modules, COUNT)


def _rows(one: ModelDiff) -> Iterator[Text]:
    if not one.rows:
        return
    cells = [("", "before", "after", "change", "bound")]
    cells += [(row.name, text.value(row.base, row.unit), text.value(row.head, row.unit), text.change(row), text.bound(row)) for row in one.rows]
    words = ["", *(text.verdict(row) for row in one.rows)]
    for line, word in zip(_columns(cells), words, strict=True):
        yield Text.assemble(f"{_INDENT}{line}", f"  {word}" if word == "ok" else (f"  {word}" if word else "", "bold red"))
    if one.base_fits != one.head_fits and one.base_fits and one.head_fits:
        yield Text(f"{_INDENT}{text.FITS_WORDS[one.base_fits]} → {text.FITS_WORDS[one.head_fits]}")


def _growths(name: str, growths: Sequence[Growth], unit: str) -> Iterator[Text]:
    if not growths:
        return
    cells = [(name, "", "", "")]
    for one in growths[: text.SHOWN]:
        called = f"{_INDENT}{one.name} ({one.category})" if one.category else f"{_INDENT}{one.name}"
        cells.append((called, text.before(one, unit), text.value(one.head, unit), text.signed(one.change, unit)))
    for line in _columns(cells):
        yield Text(f"{_INDENT}{line}")
    if more := len(growths[text.SHOWN :]):
        yield Text(f"{_INDENT * 2}{more} more with --json")


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers below each other."""
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:>{size}}" if place else f"{cell:<{size}}" for place, (cell, size) in enumerate(zip(row, wide, strict=True))).rstrip()
            for row in cells]  # fmt: skip
