"""`foretell zoo`: which models are known by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.prove import zoo_models as zoo_find

if TYPE_CHECKING:
    from foretell.zoo import Entry
    from foretell.zoo.catalogue import Card
    from foretell.zoo.rubric import Score


def listing(
    context: typer.Context,
    every: bool = typer.Option(False, "--all", help="A line for each model at each size, not for each module."),
    task: str | None = typer.Option(None, "--task", help=zoo_find.TASK_HELP),
    domain: str | None = typer.Option(None, "--domain", help=zoo_find.DOMAIN_HELP),
    motif: str | None = typer.Option(None, "--motif", help=zoo_find.MOTIF_HELP),
    level: str | None = typer.Option(None, "--level", help=zoo_find.LEVEL_HELP),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """List the models known by name: what they do, at which sizes, and how well each is written down."""
    if context.invoked_subcommand is not None:
        return common.YES
    cards = zoo_find.found(task=task, domain=domain, motif=motif, level=level)
    if json:
        return common.emit_json({"models": [_as_json(card, entry) for card in cards for entry in card.entries]})
    common.emit("\n".join(_entries(cards) if every else _modules(cards)))
    return common.YES


def _as_json(card: Card, entry: Entry) -> dict[str, Any]:
    from foretell.zoo.tags import SCIENCES

    return {
        "name": entry.name, "domain": entry.domain, "summary": entry.summary, "seq": entry.seq, "image": entry.image,
        "small": entry.small, "settings": dict(entry.config), "module": entry.module, "task": entry.task,
        "motif": entry.motif, "level": card.level, "science": SCIENCES.get(entry.module), "paper": entry.paper,
        "trap": entry.trap, "score": round(score(card.module).mean, 2),
    }  # fmt: skip


@cache
def score(module: str) -> Score:
    """What the rubric says of a module, with all its entries."""
    from foretell.zoo import rubric

    return rubric.rate(_whole()[module])


@cache
def _whole() -> dict[str, Card]:
    return {card.module: card for card in zoo_find.catalogue()}


def _sizes(entry: Entry) -> str:
    seq = f"{entry.seq} tokens" if entry.seq else ""
    side = f"{entry.image}x{entry.image}" if entry.image else ""
    return ", ".join(filter(None, (seq, side))) or "-"


def _modules(cards: Sequence[Card]) -> list[str]:
    """A line for each module under what it works on, and what the words mean."""
    from foretell.zoo.tags import TASKS

    heads = ("module", "task", "level", "score", "models", "what it is: what it computes")
    rows = {card.module: _row(card) for card in cards}
    widths = [max(len(row[column]) for row in (heads, *rows.values())) for column in range(5)]
    groups = list(dict.fromkeys(card.entries[0].domain for card in cards))
    lines = [_line(heads, widths)]
    for domain in sorted(groups, key=lambda group: -sum(card.entries[0].domain == group for card in cards)):
        lines += ["", domain, *(_line(rows[card.module], widths) for card in cards if card.entries[0].domain == domain)]
    tasks = dict.fromkeys(task for card in cards for task in card.tasks)
    count = sum(len(card.entries) for card in cards)
    return [
        *lines,
        "",
        f"{len(cards)} modules, {count} models; a score is of 5, `foretell zoo query NAME` says what it is made of.",
        "Tasks:  " + ", ".join(f"{task} = {TASKS.get(task, task)}" for task in sorted(tasks)),
        "Others: hf:TYPE, hf:ORG/NAME, hf:config.json, timm:NAME, torchvision:NAME, file.py:function",
        f"Next:   foretell zoo --all; foretell zoo query {cards[0].module}; foretell fit {cards[0].entries[0].name} --on H100",
    ]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join([*(cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)), row[-1]])


def _row(card: Card) -> tuple[str, ...]:
    names = [entry.name for entry in card.entries]
    sizes = ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)})"
    what = ", ".join(card.papers) or card.title
    return card.module, ",".join(card.tasks), card.level, f"{score(card.module).mean:.1f}", sizes, f"{what}: {'; '.join(card.motifs)}"


def _entries(cards: Sequence[Card]) -> list[str]:
    rows = [("name", "domain", "task", "level", "default size", "what it is")]
    rows += [
        (entry.name, entry.domain, entry.task, card.level, _sizes(entry), entry.summary) for card in cards for entry in card.entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join([*(cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)), row[5]]) for row in rows]
    return [
        *lines,
        "",
        "Others: hf:TYPE, hf:ORG/NAME, hf:config.json, timm:NAME, torchvision:NAME, file.py:function",
        f"Next:   foretell fit {cards[0].entries[0].name} --on H100",
    ]
