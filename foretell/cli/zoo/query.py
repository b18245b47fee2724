"""`foretell zoo query`: code, settings and measured rows of models, in one call and without torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.zoo import zoo as zoo_list
from foretell.prove import zoo_models as zoo_find

if TYPE_CHECKING:
    from foretell.zoo import Entry
    from foretell.zoo.catalogue import Card

_WORDS = 110


def query(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="A model or a module of `foretell zoo`."),
    task: str | None = typer.Option(None, "--task", help=zoo_find.TASK_HELP),
    domain: str | None = typer.Option(None, "--domain", help=zoo_find.DOMAIN_HELP),
    motif: str | None = typer.Option(None, "--motif", help=zoo_find.MOTIF_HELP),
    level: str | None = typer.Option(None, "--level", help=zoo_find.LEVEL_HELP),
    paper: str | None = typer.Option(None, "--paper", help=zoo_find.PAPER_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object: code, hyperparameters and measured rows of each."),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Everything known of the models that match: where they are from, settings, what was measured; with --json the code too."""
    wanted = {"task": task, "domain": domain, "motif": motif, "level": level, "paper": paper}
    cards = zoo_find.found(name, **wanted)
    if json:
        asked = {key: value for key, value in {"name": name, **wanted}.items() if value is not None}
        return common.emit_json({"asked": asked, "models": [as_json(card) for card in cards]})
    common.emit("\n".join(line for card in cards for line in lines_of(card)).rstrip("\n"))
    return common.YES


def as_json(card: Card) -> dict[str, Any]:
    """A module with the entries that match; `needs` holds the sources of other modules of the zoo that its code imports."""
    from foretell.zoo.catalogue import source_of

    score = zoo_list.score(card.module)
    return {
        "module": card.module,
        "title": card.title,
        "citation": card.citation,
        "papers": list(card.papers),
        "domains": list(card.domains),
        "tasks": list(card.tasks),
        "motifs": list(card.motifs),
        "level": card.level,
        "traps": list(card.traps),
        "phases": list(card.phases),
        "samplers": list(card.samplers),
        "score": {
            "mean": round(score.mean, 2),
            "categories": {rating.category: rating.points for rating in score.ratings},
            "lost": list(score.lost),
        },
        "code": card.source,
        "needs": {name: source_of(name) for name in card.needs},
        "hyperparameters": {"defaults": card.defaults, "models": [_entry(card, entry) for entry in card.entries]},
        "measured": [dict(row) for row in card.rows],
    }


def _entry(card: Card, entry: Entry) -> dict[str, Any]:
    """One size: what it sets, and what `build` is called with in all."""
    return {
        "name": entry.name, "summary": entry.summary, "small": entry.small, "seq": entry.seq, "image": entry.image,
        "settings": dict(entry.config), "all": {**card.defaults, **entry.config},
    }  # fmt: skip


# --- for people ------------------------------------------------------------------------------------------------------


def lines_of(card: Card) -> Iterator[str]:
    """What people want to know first of a module."""
    score = zoo_list.score(card.module)
    yield f"{card.module}: {card.title}" + (f" ({card.citation})" if card.citation else "")
    yield _told("tags", f"task {', '.join(card.tasks)}; domain {', '.join(card.domains)}; level {card.level}")
    yield _told("computes", "; ".join(card.motifs))
    for trap in card.traps:
        yield _told("trap", trap)
    if card.phases:
        yield _told("phases", ", ".join(card.phases) + (f"; for inference {', '.join(card.samplers)}" if card.samplers else ""))
    yield _told("build", ", ".join(f"{key}={value!r}" for key, value in card.defaults.items()))
    for entry in card.entries:
        yield _told(entry.name, ", ".join(f"{key}={value!r}" for key, value in entry.config.items()) or "as build has it")
    yield from _measured(card)
    points = ", ".join(f"{rating.category} {rating.points}" for rating in score.ratings)
    yield _told("score", f"{score.mean:.1f} of 5: {points}")
    for lost in score.lost:
        yield _told("", f"- {lost}")
    yield _told("code", f"{card.file}, with --json" + (f"; needs {', '.join(card.needs)}" if card.needs else ""))
    yield ""


def _measured(card: Card) -> Iterator[str]:
    from foretell.zoo.catalogue import newest

    rows = newest(card.rows)
    if not rows:
        yield _told("measured", f"nothing that was kept; now: foretell zoo check {card.entries[-1].name if card.entries[-1].small else 'NAME'}")
    for row in rows:
        phase = f" {row['phase']}" if row.get("phase") else ""
        why = f" ({row['reason']})" if row.get("reason") else ""
        told = [text for what in ("bytes", "seconds") if (text := _pair(row, what))]
        yield _told("measured", f"{row['name']}{phase} on {row.get('device', '?')}: {'; '.join([*told, str(row.get('status', '?'))])}{why}")


def _pair(row: Mapping[str, Any], what: str) -> str:
    """`3.1 MiB predicted, 3.0 measured, +1.2 %`; empty without both."""
    from foretell.report.words import seconds
    from foretell.units import human_bytes
    from foretell.zoo.rubric import error_of

    error = error_of(row, what)
    if error is None:
        return ""
    write = human_bytes if what == "bytes" else seconds
    return f"{write(row[f'predicted_{what}'])} predicted, {write(row[f'measured_{what}'])} measured, {error:+.1%}"


def _told(word: str, text: str) -> str:
    """`  word  text`, wrapped under itself."""
    first = f"  {word:<9} "
    return textwrap.fill(text, _WORDS, initial_indent=first, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)
