"""What a search found, for people: the best plan, the front, why others lost, what other hardware would change."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from foretell.report.command import with_flag, without
from foretell.report.words import kilowatt_hours, money, run_span, seconds
from foretell.units import gib, human_bytes, human_count

if TYPE_CHECKING:
    from foretell.quantities import Run
    from foretell.search.advice.relax import Relaxation
    from foretell.search.solve.explain import WhatIf
    from foretell.search.solve.find import Finalist, SearchResult
    from foretell.search.solve.found import Reason
    from foretell.search.solve.planned_batch import BatchAdvice
    from foretell.simulate.plan import PlanCost

SHOWN = 6
"""Of a list that explains, so many."""
NEXT = 2
"""Plans that lost and are told of where nothing more is asked for: with them the answer is one screen."""


def best_lines(found: SearchResult) -> Iterator[str]:
    """The best plan and its figures."""
    from foretell.search.solve.explain import told

    assert found.best is not None
    yield f"  {told(found.best.point.layout)}"
    yield from figures(found.best)
    if found.fewer is not None:
        yield f"  fewer   {found.fewer[0]} {'device is' if found.fewer[0] == 1 else 'devices are'} too few: {gib(found.fewer[1])} short on each"
    if found.best.verdict == "tight":
        yield "  NOTE    memory is tight: what is left is within what the prediction may be off by"
    if found.best.placed is not None:
        yield f"  NOTE    {found.best.placed.words()}"
    if found.best.cost is None:
        yield "  NOTE    estimated from the costs of its blocks; --exact costs it op by op"
    if found.stopped:
        yield f"  NOTE    the search was ended early ({found.stopped}): the best so far"


def law_lines(law: BatchAdvice | None) -> Iterator[str]:
    """What the Step Law says of the run."""
    for number, line in enumerate(law.lines() if law is not None else ()):
        yield f"  {'law' if not number else '':<6}  {line}"


def run_lines(run: Run | None) -> Iterator[str]:
    """Time, money and energy of the whole run."""
    if run is None:
        return
    worth = [f"{human_count(run.amount)} {run.unit}", f"{human_count(run.steps)} steps", run_span(run.seconds, run.low_seconds, run.high_seconds)]
    worth += [money(run.money)] if run.money is not None else []
    worth += [kilowatt_hours(run.joules)] if run.joules is not None else []
    yield f"  run     {', '.join(worth)}"


def figures(one: Finalist) -> Iterator[str]:
    """Memory, step, money and energy of a plan, and what it sends."""
    point, said = one.point, one.plan.predicted
    left = (point.capacity_bytes - point.memory_bytes) / point.capacity_bytes
    yield f"  memory  {human_bytes(point.memory_bytes)} of {human_bytes(point.capacity_bytes)} ({one.verdict}, {left:.0%} to spare)"
    low, high = said.get("low_seconds", point.seconds), said.get("high_seconds", point.seconds)
    how = said.get("provenance", {}).get("time", "")
    yield (
        f"  step    {seconds(point.seconds)} ({seconds(low)} to {seconds(high)}), {point.per_second:,.0f} "
        f"{unit_of(one)}/s; bound by {said.get('binds', '')}; {how}"
    )
    worth = [f"${point.dollars * 1e9 / point.per_step:,.2f} a billion {unit_of(one)}"] if point.dollars is not None else []
    worth += [f"{point.joules / point.per_step:.3g} J a {unit_of(one)[:-1]}"] if point.joules is not None else []
    if worth:
        yield f"  costs   {', '.join(worth)}"
    yield from sent(one.cost)


def sent(cost: PlanCost | None) -> Iterator[str]:
    for one in cost.worst.collectives[:SHOWN] if cost is not None else ():
        yield f"  sends   {one.times} × {one.name} of {human_bytes(one.nbytes)} over {one.axis} ({one.ranks} ranks)"


def unit_of(one: Finalist) -> str:
    return "samples" if "samples_per_step" in one.plan.predicted else "tokens"


def front_lines(found: SearchResult) -> Iterator[str]:
    """A numbered table: time, memory, money, energy."""
    from foretell.search.solve.explain import told

    rows = [("", "step", f"{unit_of(found.front[0])}/s", "memory", "$ / 1e9", "J / 1e3", "devices", "plan")]
    for number, one in enumerate(found.front, 1):
        point = one.point
        mark = "*" if one.point is found.best.point else " "  # type: ignore[union-attr]
        rows.append((
            f"{mark}{number}", seconds(point.seconds), f"{point.per_second:,.0f}", gib(point.memory_bytes),
            f"{point.dollars * 1e9 / point.per_step:,.0f}" if point.dollars is not None else "",
            f"{point.joules * 1e3 / point.per_step:,.1f}" if point.joules is not None else "", str(point.devices),
            told(point.layout) + (" (tight)" if one.verdict == "tight" else ""),
        ))  # fmt: skip
    yield "Trade-offs, * the best; --point N saves another:"
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:>{size}}" for cell, size in zip(row[:-1], wide, strict=True)]
        yield f"  {'  '.join([*cells, row[-1]])}".rstrip()


def reason_lines(found: SearchResult, all_of_them: bool = False) -> Iterator[str]:
    """What binds, and where each other plan loses."""
    from foretell.search.solve.explain import told

    if all_of_them and found.binds:
        yield "What holds it back:"
        yield from (f"  {line}" for line in found.binds)
    if found.runners_up:
        yield "Next best:"
        for one in found.runners_up[: None if all_of_them else NEXT]:
            yield f"  {told(one.point.layout)}: {one.point.per_second:,.0f} {unit_of(one)}/s; {one.why}"
    if found.dropped:
        yield "Not possible:"
        yield from (f"  {told(one.point.layout)}: {one.why}" for one in found.dropped[:SHOWN])


def what_if_lines(rows: Iterable[WhatIf]) -> Iterator[str]:
    yield "What would change it:"
    made = [("", "speed", "money", "")]
    for row in rows:
        speed = "" if row.faster is None else f"{row.faster:+.0%}"
        money = "" if row.cheaper is None else f"{-row.cheaper:+.0%}"
        made.append((row.change, speed, money, row.words))
    wide = max(len(row[0]) for row in made)
    for change, speed, money, words in made:
        yield f"  {change:<{wide}}  {speed:>6}  {money:>6}  {words}".rstrip()


def no_plan(reasons: Sequence[Reason], model: str, hardware: str, costed: str, verb: str = "fits") -> str:
    """That there is none, and why, by count."""
    from foretell.search.solve.reasons import sentence

    why = f": {sentence(reasons)}" if reasons else f" {verb}"
    return f"No plan for {model} on {hardware}{why}; {costed} costed."


def nothing_lines(found: SearchResult, reasons: Sequence[Reason], model: str, hardware: str) -> Iterator[str]:
    """Why no plan can be had."""
    were = "1 layout was" if found.costed == 1 else f"{found.costed} layouts were"
    yield no_plan(reasons, model, hardware, were, "keeps the limits" if found.unmet else "fits")
    if found.nearest is not None:
        from foretell.search.solve.explain import told

        yield f"The nearest is {human_bytes(found.short_bytes)} short on {hardware}: {told(found.nearest.point.layout)}"
    if found.unmet:
        yield f"  {found.unmet}"
    elif found.nearest is not None:
        yield f"It needs {human_bytes(found.short_bytes)} more on each device."
    if found.infeasible is not None:
        yield "At its peak:"
        yield from (f"  {human_bytes(h.bytes):>10}  {h.category}  {h.name}" for h in found.infeasible.holders[:SHOWN])
    yield from (f"note: {note}" for note in found.notes)


def relaxation_lines(relaxed: Sequence[Relaxation], tried: int, typed: Sequence[str]) -> Iterator[str]:
    """Commands that were searched for and find a plan; that none does, where none was found."""
    if not relaxed and tried:
        yield f"Nothing tried here fits: {tried} {'way' if tried == 1 else 'ways'} tried."
    elif relaxed:
        yield "Tried, and found:"
    for one in relaxed:
        changed = bool(one.flag or one.drops)
        step = f", {seconds(one.seconds)} a step" if one.seconds is not None else ""
        yield f"  {shlex.join(['foretell', *retyped(typed, one)])}" if changed and typed else f"  {one.change}"
        yield f"      {one.verdict}, {human_bytes(one.memory_bytes)} of {human_bytes(one.capacity_bytes)}{step}: {one.change}; {one.plan}"


def retyped(typed: Sequence[str], one: Relaxation) -> list[str]:
    """The command that was typed, with the change."""
    words = list(typed)
    for option in one.drops:
        words = without(words, option, has_value=True)
    return with_flag(words, one.flag)


# ---------------------------------------------------------------------- JSON


def content(found: SearchResult) -> dict[str, Any]:
    """The same for programs."""
    return {
        "placement": found.best.placed.to_json() if found.best is not None and found.best.placed is not None else None,
        "front": [point_json(one, number) for number, one in enumerate(found.front, 1)],
        "binds": list(found.binds),
        "what_if": [row.to_json() for row in found.what_if],
        "needs": found.needs if found.best is None else None,
        "bytes_short": found.short_bytes if found.best is None else None,
        "search": {"layouts": found.there, "costed": found.costed, "seconds": found.seconds, "stopped": found.stopped},
    }  # fmt: skip


def point_json(one: Finalist, number: int) -> dict[str, Any]:
    from foretell.search.solve.explain import told

    point = one.point
    return {
        "number": number, "plan": told(point.layout), "devices": point.devices, "step_seconds": point.seconds,
        f"{unit_of(one)}_per_second": point.per_second, "memory_bytes": point.memory_bytes, "verdict": one.verdict,
        "dollars_per_step": point.dollars, "joules_per_step": point.joules, "exact": one.cost is not None,
    }  # fmt: skip
