"""A page of serving: tokens a second against seconds a token, pages over time, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.report import words
from foretell.report.html.figures import seconds, signed
from foretell.report.html.page import Cell, Chart, Fact, Figure, Page, Section, Table
from foretell.report.html.served import ServedSubject, ServeLine, ServePointTold


def page(subject: ServedSubject, *, made: str = "") -> Page:
    found = (_front(subject), _compared(subject.lines), _pages(subject))
    facts = [Fact(label=label, value=_fact(value, unit), known="measured") for label, value, unit in subject.facts]
    best = next((one for one in subject.points if one.chosen), None)
    if best is not None:
        how = "measured" if best.measured else "assumed"
        facts += [Fact(label="Tokens a second", value=f"{best.rate:,.0f}", known=how)]
        facts += [Fact(label="Seconds a token", value=seconds(best.tpot), known=how)]
        facts += [Fact(label="Inside the limits", value=words.percent(best.inside), known=how)] if best.inside is not None else []
    return Page(
        title=subject.model, subtitle=subject.kind, about=subject.about, facts=tuple(facts), commands=subject.commands,
        sections=tuple(one for one in found if one is not None), made=made, notes=subject.notes, conclusion=_conclusion(subject, best),
    )  # fmt: skip


def _fact(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else f"{value:,.0f}"


def _conclusion(subject: ServedSubject, best: ServePointTold | None) -> str:
    if best is not None:
        return f"{'Measured' if best.measured else 'Predicted'}: {best.rate:,.0f} tokens a second at {seconds(best.tpot)} a token ({best.name})."
    if subject.points:
        most = max(subject.points, key=lambda one: one.rate)
        return f"At most {most.rate:,.0f} tokens a second, at {seconds(most.tpot)} a token ({most.name})."
    if subject.facts:
        return f"{subject.facts[0][1]:,.0f} requests were answered."
    return ""


def beaten(one: ServePointTold, others: Sequence[ServePointTold]) -> bool:
    """Whether another has no fewer tokens a second and no more seconds a token, and one of them better."""
    return any(
        other.rate >= one.rate and other.tpot <= one.tpot and (other.rate, -other.tpot) != (one.rate, -one.tpot) for other in others
    )  # fmt: skip


def _front(subject: ServedSubject) -> Section | None:
    points = subject.points
    if not points:
        return None
    drawn = [
        {"x": one.tpot, "y": one.rate, "label": one.name if len(points) <= 12 and len(one.name) < 16 else str(number + 1), "name": one.name,
         "why": one.note, "chosen": one.chosen, "front": not beaten(one, points)}
        for number, one in enumerate(points)
    ]  # fmt: skip
    rows = tuple(
        (Cell(text=f"{number + 1}  {one.name}", mark="chosen" if one.chosen else ""), f"{one.rate:,.0f}", seconds(one.tpot), seconds(one.ttft),
         "–" if one.inside is None else words.percent(one.inside), one.note)
        for number, one in enumerate(points)
    )  # fmt: skip
    told = "; ".join(f"{one.name}: {one.rate:,.0f} tokens a second, {seconds(one.tpot)} a token" for one in points[:24])
    data = {"unit": "", "what": "tokens a second", "points": drawn, "for": f"a token ({subject.quantile})"}
    chart = Chart(name="rate", kind="scatter", told=told, data=data)
    head = ("", "tokens a second", f"a token {subject.quantile}", f"first token {subject.quantile}", "inside", "")
    how = "Measured" if any(one.measured for one in points) else "Predicted"
    return Section(
        name="rate", title="Tokens a second against seconds a token", lead=f"{how}. Higher and further left is better.",
        figures=(Figure(chart=chart, table=Table(head=head, rows=rows, numbers=frozenset({1, 2, 3, 4}), what="Points")),),
    )  # fmt: skip


def _compared(lines: Sequence[ServeLine]) -> Section | None:
    known = [one for one in lines if one.measured is not None]
    if not known:
        return None
    both = [one for one in known if one.predicted is not None]
    errors = {one.name: one.predicted / one.measured - 1 for one in both if one.predicted is not None and one.measured}

    def shown(one: ServeLine, value: float | None) -> str:
        if value is None:
            return "–"
        return seconds(value) if one.seconds else words.percent(value) if "share" in one.name else f"{value:,.0f}"

    rows = tuple(
        (one.name, shown(one, one.predicted), shown(one, one.measured), signed(errors[one.name]) if one.name in errors else "–") for one in known
    )
    table = Table(head=("", "predicted", "measured", "error"), rows=rows, numbers=frozenset({1, 2, 3}), what="Predicted and measured")
    bands = [
        {"name": one.name, "error": errors[one.name], "low": None, "high": None,
         "told": f"{one.name}: predicted {shown(one, one.predicted)}, measured {shown(one, one.measured)}"}
        for one in both if one.name in errors
    ]  # fmt: skip
    told = "; ".join(str(one["told"]) for one in bands)
    chart = Chart(name="bands", kind="bands", data={"rows": bands}, told=told, height=78 + 46 * len(bands)) if bands else None
    lead = "The error is predicted / measured − 1." if bands else "Nothing was predicted of these requests."
    return Section(name="compared", title="Predicted against measured", lead=lead, figures=(Figure(chart=chart, table=table),))


def _pages(subject: ServedSubject) -> Section | None:
    moments = subject.moments
    if len(moments) < 2:
        return None
    series = [{"name": "pages held", "points": [[one.at, one.pages] for one in moments]}]
    if moments[0].running is not None:
        series += [{"name": name, "points": [[one.at, getattr(one, name)] for one in moments]} for name in ("running", "waiting")]
    most = max(one.pages for one in moments)
    share = f", {most / subject.pages:.0%} of {subject.pages:,}" if subject.pages else ""
    told = f"At most {most:,} pages are held{share}, over {seconds(moments[-1].at - moments[0].at)}."
    every = max(1, len(moments) // 24)
    rows = tuple(
        (f"{one.at:,.2f} s", f"{one.pages:,}", *(() if one.running is None else (f"{one.running:,}", f"{one.waiting or 0:,}")))
        for one in moments[::every]
    )
    head = ("at", "pages", *(() if moments[0].running is None else ("running", "waiting")))
    table = Table(head=head, rows=rows, numbers=frozenset(range(1, len(head))), what="Moments")
    drawn = {"series": series[:1], "unit": "", "zero": True, "x": "seconds"}
    charts = [Figure(chart=Chart(name="pages", kind="lines", told=told, data=drawn), table=table, title="Pages held")]
    if len(series) > 1:
        most_running, most_waiting = (max(getattr(one, name) or 0 for one in moments) for name in ("running", "waiting"))
        said = f"At most {most_running:,} requests generate and {most_waiting:,} wait."
        data = {"series": series[1:], "unit": "", "zero": True, "x": "seconds"}
        charts.append(Figure(chart=Chart(name="queue", kind="lines", told=said, data=data), table=table, title="Requests"))
    return Section(name="pages", title="Pages over time", lead=told, figures=tuple(charts))
