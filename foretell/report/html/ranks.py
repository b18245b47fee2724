"""Ranks over time: who worked longer than the others, what was found, and who waited for whom where a run ended badly."""

from __future__ import annotations

from foretell.report import words
from foretell.report.html.data import Subject
from foretell.report.html.figures import seconds
from foretell.report.html.page import Chart, Figure, Section, Table
from foretell.runtime.detect.history import RankTimes, last_hang, read_history

COLUMNS = 60
"""Stretches of time that are drawn; of more, neighbours are joined."""
RANKS = 64
"""Rows that are drawn: where there are more ranks, those that worked longest."""
FULL = 0.3
"""Share of a step that is drawn in full colour."""
FINDINGS = 50


def ranks(subject: Subject) -> Section | None:
    if subject.run is None:
        return None
    rows = read_history(subject.run)
    hang = last_hang(subject.run) if not subject.finished else None
    if not rows and hang is None and not subject.findings:
        return None
    items = list(subject.findings[-FINDINGS:])
    lead = "Nobody was found slow." if not items else f"{len(subject.findings)} found while it ran; the last of them are below the chart."
    if hang is not None:
        lead = f"When it ended: {hang.words()}."
        items += [f"At the end, {line}" for line in hang.graph[:RANKS]]
    heat = _heat(_fewer(rows)) if rows and rows[0].excess else None
    return Section(name="ranks", title="Ranks over time", lead=lead, figures=(heat,) if heat is not None else (), items=tuple(items))


def _fewer(rows: list[RankTimes]) -> list[RankTimes]:
    size = -(-len(rows) // COLUMNS)
    return [_joined(rows[first : first + size]) for first in range(0, len(rows), size)]


def _joined(rows: list[RankTimes]) -> RankTimes:
    weights = [max(1, row.steps[1] - row.steps[0] + 1) for row in rows]
    whole = sum(weights)

    def mean(name: str) -> tuple[float, ...]:
        return tuple(sum(weight * value for weight, value in zip(weights, values, strict=True)) / whole
                     for values in zip(*(getattr(row, name) for row in rows), strict=True))  # fmt: skip

    return RankTimes(
        steps=(rows[0].steps[0], rows[-1].steps[1]), excess=mean("excess"), mean_excess=mean("mean_excess"), waited=mean("waited"),
        delayed=mean("delayed"), step_seconds=sum(weight * row.step_seconds for weight, row in zip(weights, rows, strict=True)) / whole,
    )  # fmt: skip


def _heat(rows: list[RankTimes]) -> Figure:
    """A row for each rank, a column for a stretch of steps; the colour is how much longer it worked than the others."""
    shares = [[max(0.0, value) / row.step_seconds if row.step_seconds > 0 else 0.0 for value in row.mean_excess] for row in rows]
    world = len(rows[0].mean_excess)
    shown = sorted(sorted(range(world), key=lambda rank: -max(column[rank] for column in shares))[:RANKS])
    names, columns = [f"rank {rank}" for rank in shown], [f"{row.steps[0]}–{row.steps[1]}" for row in rows]
    cells = [[at, line, round(min(1.0, shares[at][rank] / FULL), 3), f"{words.percent(shares[at][rank])} of a step"]
             for at in range(len(rows)) for line, rank in enumerate(shown)]  # fmt: skip
    table, mean = [], _joined(rows)
    for rank in shown:
        by_time = [column[rank] for column in shares]
        longest = max(range(len(rows)), key=by_time.__getitem__)
        table.append((
            f"rank {rank}", words.percent(sum(by_time) / len(rows)), f"{words.percent(by_time[longest])} (steps {columns[longest]})",
            seconds(mean.waited[rank]), seconds(mean.delayed[rank]),
        ))  # fmt: skip
    average, most = max((sum(column[rank] for column in shares) / len(rows), rank) for rank in range(world))
    told = f"Rank {most} worked longest: {words.percent(average)} of a step more than the others on average"
    chart = Chart(name="ranks", kind="heat", height=70 + 18 * len(shown), told=told, data={"rows": names, "columns": columns, "cells": cells})
    head = ("", "longer than the others", "at most", "waits a step", "without a core")
    return Figure(
        title="How much longer a rank worked than the others", chart=chart,
        table=Table(head=head, rows=tuple(table), numbers=frozenset({1, 2, 3, 4}), what="Ranks"),
        note=f"Full colour: {words.percent(FULL)} of a step or more. While one rank works, the others wait for it.",
    )  # fmt: skip
