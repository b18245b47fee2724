"""Two revisions as GitHub shows Markdown: a table, and what grew in it, folded. Names come from the code of a pull request: all are escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

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

MARK = "<!-- foretell-diff -->"
"""The first line: by it a workflow finds its own comment again."""
_SIGNS = {WITHIN: "✅ ok", GROWN: "❌ grown", NEW: "🆕 new", BROKEN: "❌ broken", UNCOMPARED: "⚠️ not compared"}


def render(found: RevisionDiff, command: str = "") -> str:
    """All of it; `command` repeats it."""
    lines = [MARK, f"### foretell: {code(found.base.shown)} → {code(found.head.shown)}: {text.summary(found)}", ""]
    lines += ["| model | on | quantity | before | after | change | bound | verdict |", "| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for one in found.models:
        lines += _table(one)
    lines.append("")
    for one in found.models:
        lines += _problem(one)
        lines += _details(one)
    lines += [f"- {plain(note)}" for note in found.notes]
    lines += ["", f"<sub>Bounds on growth: {text.bounds(found)}. Predicted without a GPU; {text.COMMON_CAUSE}."]
    lines += [f"Repeat it: {code(command)}</sub>" if command else "</sub>"]
    return "\n".join(lines) + "\n"


def code(said: str) -> str:
    """A code span, in a table too: nothing in it is a mention, a link or markup."""
    flat = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", " ", said).split())
    return f"`{flat.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if flat else ""


def escaped(said: str) -> str:
    """Inside HTML."""
    return html.escape(said).replace("`", "&#96;")


def plain(said: str) -> str:
    """Text that is nothing but text."""
    return re.sub(r"([\\`*_{}\[\]<>()#+\-!|~@:])", r"\\\1", " ".join(said.split()))


def _table(one: ModelDiff) -> Iterator[str]:
    name = code(" ".join(filter(None, (one.model, one.options))))
    first = True
    for row in one.rows:
        sign = {"ok": "✅", "GROWN": "❌ grown", "": ""}[text.verdict(row)]
        cells = (row.name, text.value(row.base, row.unit), text.value(row.head, row.unit), text.change(row), text.bound(row), sign)
        yield "| " + " | ".join((name if first else "", code(one.on) if first else "", *cells)) + " |"
        first = False
    if one.stops_fitting:
        yield f"| | | fits | yes | **no** | | | ❌ no longer fits on {code(one.on)} |"
    if one.verdict in (NEW, BROKEN, UNCOMPARED):
        yield f"| {name if first else ''} | {code(one.on) if first else ''} | | | | | | {_SIGNS[one.verdict]} |"


def _problem(one: ModelDiff) -> Iterator[str]:
    if one.verdict == BROKEN:
        yield f"**{code(one.model)} cannot be traced** {code(one.head_problem)}" + (f"; try: {code(one.remedy)}" if one.remedy else "")
        if one.detail:
            yield f"\n<details><summary>Where it failed</summary>\n\n<pre>{escaped(one.detail)}</pre>\n\n</details>"
        yield ""
    elif one.verdict == UNCOMPARED:
        yield f"{code(one.model)} is not compared: the base cannot be traced: {code(one.base_problem)}"
        yield ""


def _details(one: ModelDiff) -> Iterator[str]:
    """What grew, folded; nothing where nothing changed."""
    tables = (
        ("Memory at the peak by category", one.categories, BYTES), ("Largest tensors that are new or larger", one.tensors, BYTES),
        ("Parameters by module", one.modules, COUNT),
    )  # fmt: skip
    if not any(growths for _, growths, _ in tables):
        return
    yield f"<details><summary>What changed in <code>{escaped(one.model)}</code> on <code>{escaped(one.on)}</code></summary>"
    yield ""
    for title, growths, unit in tables:
        yield from _growths(title, growths, unit)
    yield f"How it is known: {text.confidence(one)}."
    yield ""
    yield "</details>"
    yield ""


def _growths(title: str, growths: Sequence[Growth], unit: str) -> Iterator[str]:
    if not growths:
        return
    yield f"| {title} | | before | after | change |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for one in growths[: 2 * text.SHOWN]:
        yield f"| {code(one.name)} | {one.category} | {text.before(one, unit)} | {text.value(one.head, unit)} | {text.signed(one.change, unit)} |"
    if more := len(growths[2 * text.SHOWN :]):
        yield f"| … {more} more with `--json` | | | | |"
    yield ""
