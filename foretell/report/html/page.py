"""A report as one HTML file that needs nothing else: styles, charts and figures are inside. No torch.

    html_data.read(path)        → Subject     what the files say
    html_detail.of_plan(plan)   → Detail      the plan costed once more, moment by moment
    html_sections.page(...)     → Page        what is told, in order: words, charts, tables
    render(page)                → text        of the file

Every chart has its table as plain HTML under it, so that the page reads without scripts as well. A browser may load
nothing from elsewhere and run nothing but the two scripts named by their hashes: the page itself forbids it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from foretell.report.schema import plain

ECHARTS = "6.1.0"
OPEN_ROWS = 12
"""Rows that a table shows at once; a longer one opens on demand."""
NARROW = 3
"""Columns that fit on a phone side by side."""
WRAPS = 34
"""Letters of a cell that stay on one line."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text of a table with a mark: counted, measured, assumed, good, bad, chosen."""

    text: str
    mark: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; columns named in `numbers` are aligned at their right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    numbers: frozenset[int] = frozenset()
    what: str = "Table"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What the page's script draws: a kind it knows, and the figures."""

    name: str
    kind: str
    """bands, lines, bars, areas, gantt or scatter."""
    data: Mapping[str, Any]
    told: str
    """The same in a sentence, for those who do not see it."""
    height: int = 300


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart and the table under it."""

    table: Table
    chart: Chart | None = None
    title: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and its answer."""

    name: str
    title: str
    lead: str
    figures: tuple[Figure, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    """Label and sentence."""
    items: tuple[str, ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    """Label and text to copy."""
    links: tuple[tuple[str, str], ...] = ()
    """File beside the report, and what it is."""
    columns: bool = False
    """Figures stand side by side where there is room."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure that is told first."""

    label: str
    value: str
    unit: str = ""
    known: str = ""
    """counted, measured or assumed."""
    beside: str = ""
    good: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    about: tuple[str, ...]
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    conclusion: str = ""
    """What came of it, in one sentence."""
    commands: tuple[tuple[str, str], ...] = ()
    """What comes next, and the command to copy."""
    made: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)


# --- the file --------------------------------------------------------------------------------------------------------


def render(page: Page) -> str:
    """The text of the file."""
    library, script, style = (_asset(name) for name in ("echarts.min.js", "page.js", "page.css"))
    allowed = " ".join(f"'sha256-{_hash(text)}'" for text in (library, script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    charts = [
        {"name": figure.chart.name, "kind": figure.chart.kind, "height": figure.chart.height, **figure.chart.data}
        for section in page.sections for figure in section.figures if figure.chart is not None
    ]  # fmt: skip
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<meta name="generator" content="foretell; Apache ECharts {ECHARTS}">',
        f"<title>{escape(page.title)} · foretell</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        *_body(page),
        f'<script type="application/json" id="charts">{embedded(charts)}</script>',
        f"<script>{library}</script>",
        f"<script>{script}</script>",
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def embedded(value: Any) -> str:
    """JSON that no HTML parser reads as anything else, whatever names it holds."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _asset(name: str) -> str:
    text = (resources.files("foretell.report") / "assets" / name).read_text(encoding="utf-8")
    assert "</script" not in text.lower() and "</style" not in text.lower(), f"{name} would end its own element"
    return text


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _body(page: Page) -> list[str]:
    lines = ["<main>", "<header>", f'<p class="kind">foretell report{_after(page.made)}</p>', f"<h1>{escape(page.title)}</h1>"]
    lines += [f'<p class="conclusion">{told(page.conclusion)}</p>'] if page.conclusion else []
    lines += [f'<p class="subtitle">{told(page.subtitle)}</p>'] if page.subtitle else []
    lines += [f'<p class="about">{" <i>·</i> ".join(escape(one) for one in page.about)}</p>'] if page.about else []
    lines += ["</header>"]
    if page.facts:
        columns = len(page.facts) if len(page.facts) <= 4 else 3 if len(page.facts) <= 6 else 4
        lines += [f'<dl class="facts" style="--columns:{columns}">', *(_fact(fact) for fact in page.facts), "</dl>"]
    lines += [f'<p class="remark">{told(note)}</p>' for note in page.notes]
    if page.commands:
        rows = (f"<div><dt>{escape(label)}</dt><dd><pre><code>{escape(text)}</code></pre></dd></div>" for label, text in page.commands)
        lines += ['<dl class="commands">', *rows, "</dl>"]
    if len(page.sections) > 3:
        links = "".join(f'<li><a href="#{escape(one.name)}">{escape(one.title)}</a></li>' for one in page.sections)
        lines += [f'<nav aria-label="Sections"><ul>{links}</ul></nav>']
    for section in page.sections:
        lines += _section(section)
    return [*lines, *_legend(), "</main>"]


_UNITS = re.compile(r"(?<=\d) (?=(?:%|s|ms|µs|[KMGT]iB|B|k?J|MJ)(?![A-Za-z]))")


def told(text: str) -> str:
    """Text as HTML; a figure and its unit stay on one line."""
    return escape(_UNITS.sub("\u00a0", text))


def _after(text: str) -> str:
    return f" <i>·</i> {escape(text)}" if text else ""


def _fact(fact: Fact) -> str:
    unit = f' <span class="unit">{escape(fact.unit)}</span>' if fact.unit else ""
    state = {None: "beside", True: "good", False: "bad"}[fact.good]
    beside = f'<dd class="{state}">{told(fact.beside)}</dd>' if fact.beside else ""
    return f'<div><dt>{escape(fact.label)} {_known(fact.known)}</dt><dd class="value">{escape(fact.value)}{unit}</dd>{beside}</div>'


def _known(how: str) -> str:
    word = how.partition(":")[0].strip()
    return f'<span class="known {word}" title="{escape(how)}">{word}</span>' if word in ("counted", "measured", "assumed") else ""


def _section(section: Section) -> list[str]:
    lines = [f'<section id="{escape(section.name)}">', f"<h2>{escape(section.title)}</h2>"]
    lines += [f'<p class="lead">{told(section.lead)}</p>'] if section.lead else []
    if section.terms:
        lines += ['<dl class="terms">', *(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in section.terms), "</dl>"]
    lines += ['<div class="columns">'] if section.columns else []
    for figure in section.figures:
        lines += _figure(figure)
    lines += ["</div>"] if section.columns else []
    lines += ["<ul>", *(f"<li>{told(item)}</li>" for item in section.items), "</ul>"] if section.items else []
    if section.links:
        links = (f'<li><a href="{escape(name)}">{escape(name)}</a> {escape(what)}</li>' for name, what in section.links)
        lines += ['<ul class="files">', *links, "</ul>"]
    for label, text in section.code:
        shut = text.count("\n") >= OPEN_ROWS
        body = f"<pre><code>{escape(text)}</code></pre>"
        lines.append(f"<details><summary>{escape(label)}</summary>{body}</details>" if shut else f'<p class="label">{escape(label)}</p>{body}')
    return [*lines, "</section>"]


def _figure(figure: Figure) -> list[str]:
    lines = ["<figure>"]
    lines += [f"<figcaption>{escape(figure.title)}</figcaption>"] if figure.title else []
    chart = figure.chart
    if chart is not None:
        lines.append(
            f'<div class="chart" id="chart-{escape(chart.name)}" role="img" aria-label="{escape(chart.told)}"'
            f' style="height:{chart.height}px"></div>'
        )
    lines += _table(figure.table, folds=chart is not None)
    return [*lines, *([f'<p class="note">{told(figure.note)}</p>'] if figure.note else []), "</figure>"]


def _table(table: Table, *, folds: bool = False) -> list[str]:
    """On a narrow screen a row of many columns becomes a card, each figure under its heading. Under a chart it opens on demand."""
    head = "".join(f'<th scope="col"{_right(table, column)}>{escape(name)}</th>' for column, name in enumerate(table.head))
    rows = []
    for row in table.rows:
        cells = [_cell(table, column, cell) for column, cell in enumerate(row)]
        chosen = any(isinstance(cell, Cell) and cell.mark == "chosen" for cell in row)
        rows.append(f'<tr class="chosen">{"".join(cells)}</tr>' if chosen else f"<tr>{''.join(cells)}</tr>")
    kind = ' class="cards"' if len(table.head) > NARROW else ""
    body = [f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>', *rows, "</tbody></table></div>"]
    if len(rows) <= OPEN_ROWS and not folds:
        return body
    return [f"<details><summary>{escape(table.what)}, {len(rows)} {'row' if len(rows) == 1 else 'rows'}</summary>", *body, "</details>"]


def _right(table: Table, column: int) -> str:
    return ' class="n"' if column in table.numbers else ""


def _cell(table: Table, column: int, cell: str | Cell) -> str:
    text, mark = (cell.text, cell.mark) if isinstance(cell, Cell) else (cell, "")
    inner = escape(text)
    if mark in ("counted", "measured", "assumed"):
        inner = _known(text if text else mark)
    elif mark in ("good", "bad"):
        inner = f'<span class="{mark}">{inner}</span>'
    tag = 'th scope="row"' if column == 0 else "td"
    wraps = ' class="w"' if len(text) > WRAPS and column not in table.numbers else ""
    head = table.head[column] if column < len(table.head) else ""
    label = f' data-label="{escape(head)}"' if head and len(table.head) > NARROW else ""
    return f"<{tag}{_right(table, column)}{wraps}{label}>{inner}</{'th' if column == 0 else 'td'}>"


def _legend() -> list[str]:
    meanings: Sequence[tuple[str, str]] = (
        ("counted", "follows from the traced step, op by op"),
        ("measured", "rests on measurements of this kind of device, or of this run"),
        ("assumed", "rests on a figure nobody measured here, such as a catalogue's rate"),
    )
    rows = "".join(f"<div><dt>{_known(word)}</dt><dd>{meaning}</dd></div>" for word, meaning in meanings)
    return [f'<footer><dl class="terms">{rows}</dl></footer>']
