"""The sections of a report that have charts: what was predicted and measured, loss, time, memory, pipeline, blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from foretell.plan import paths
from foretell.quantities import CATEGORIES, Memory
from foretell.report import words
from foretell.report.comparison import BYTES, SECONDS, Comparison, Line
from foretell.report.html.data import LogRow, Subject
from foretell.report.html.detail import BlockCost, Detail, EventSlot
from foretell.report.html.memory import AROUND, REST, MemoryCurve
from foretell.report.html.page import Cell, Chart, Figure, Section, Table
from foretell.units import GIB, KIB, MIB, gib, human_bytes, relative_error

KINDS = {
    "gemm": "products", "attention": "attention", "convolution": "convolutions", "recurrent": "recurrent layers",
    "memory": "moving bytes", "communication": "waiting for messages", "waiting_for_host": "waiting for the host",
    "waiting_for_ranks": "waiting for other stages",
}  # fmt: skip
"""What a step's seconds go to."""
MODES = {"keep": "kept", "recompute": "computed again", "selective": "partly computed again",
         "host": "in host memory", "disk": "on disk", "recompute-host": "computed again from inputs in host memory"}  # fmt: skip
EVENTS = {
    "F": ("forward", 0), "B": ("backward", 1), "I": ("gradients of inputs", 1), "W": ("gradients of weights", 2),
    "update": ("update", 7),
}  # fmt: skip
"""Kind of event → its name and colour."""
POINTS = 600
"""Steps of a curve; of more, every so many."""
ROWS = 24
"""Steps in the table under it."""
OTHER = "other"
COLOURS = {name: number for number, name in enumerate((*CATEGORIES, REST, OTHER))}
"""Category of bytes → its colour, the same in every chart."""


def size(count: float | None) -> str:
    """Bytes for people."""
    return "–" if count is None else gib(count) if abs(count) >= GIB else human_bytes(count)


def seconds(value: float | None) -> str:
    return "–" if value is None else words.seconds(value) if value else "0 s"


_SIZES = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def sizes(values: Sequence[float | None]) -> list[str]:
    """Bytes of a column, all in the unit of the largest."""
    return _alike(values, _SIZES)


def times(values: Sequence[float | None]) -> list[str]:
    return _alike(values, _TIMES)


def _alike(values: Sequence[float | None], units: Sequence[tuple[str, float]]) -> list[str]:
    most = max((abs(value) for value in values if value), default=0.0)
    unit, scale = next(((unit, scale) for unit, scale in units if most >= 0.9995 * scale), units[-1])
    places = 0 if most >= 1000 * scale or unit == "B" else 1 if most >= 100 * scale else 2
    least = 0.5 * 10**-places * scale

    def told(value: float | None) -> str:
        return "–" if value is None else f"< {10**-places:.{places}f} {unit}" if 0 < value < least else f"{value / scale:,.{places}f} {unit}"

    return [told(value) for value in values]


def share(part: float, whole: float) -> str:
    """`52 %`; something that is nearly nothing is told as such."""
    return words.percent(part / whole) if not part or part >= 0.0005 * whole else "< 0.1 %"


def amount(value: float | None, unit: str) -> str:
    """A figure of a comparison."""
    return "–" if value is None else size(value) if unit == BYTES else seconds(value) if unit == SECONDS else words.number(value)


# --- predicted against measured --------------------------------------------------------------------------------------


def compared(subject: Subject) -> Section | None:
    found = subject.comparison
    if found is None or not found.comparable:
        return None
    lines = [line for line in found.lines if line.predicted is not None or line.measured is not None]
    held = [line for line in lines if line.inside is not None]
    inside = sum(bool(line.inside) for line in held)
    skipped = f", without the first {found.skipped_steps}" if found.skipped_steps else ""
    lead = (
        f"{inside} of {len(held)} measured figures lie where they were expected. "
        f"Measured is the median of {found.steps} steps{skipped}; the error is predicted / measured − 1."
    )
    figures = [Figure(chart=_bands(lines), table=_compared_table(lines), title="Error (predicted / measured − 1) and where it was expected")]
    figures += [figure] if (figure := _every_step(subject, found)) else []
    return Section(name="compared", title="Predicted against measured", lead=lead, figures=tuple(figures))


def _bands(lines: Sequence[Line]) -> Chart | None:
    rows = []
    for line in lines:
        if line.error is None or not line.predicted:
            continue
        both = f"predicted {amount(line.predicted, line.unit)}, measured {amount(line.measured, line.unit)}"
        told = f"{name_of(line)}: {both}, error {signed(line.error)}"
        rows.append({
            "name": name_of(line), "error": line.error, "told": told,
            "low": relative_error(line.predicted, line.high) if line.low and line.high else None,
            "high": relative_error(line.predicted, line.low) if line.low and line.high else None,
        })  # fmt: skip
    if not rows:
        return None
    told = "; ".join(str(row["told"]) for row in rows)
    return Chart(name="bands", kind="bands", data={"rows": rows}, told=told, height=78 + 46 * len(rows))


def name_of(line: Line) -> str:
    return {"step": "step", "process": "process RAM"}.get(line.name, line.unit if line.name == "throughput" else line.name)


def _compared_table(lines: Sequence[Line]) -> Table:
    rows = []
    for line in lines:
        verdict = {True: Cell(text="inside", mark="good"), False: Cell(text="outside", mark="bad"), None: Cell(text="–")}[line.inside]
        known = line.known.partition(":")[0]
        expected = "–" if line.low is None or line.high is None else f"{amount(line.low, line.unit)} – {amount(line.high, line.unit)}"
        error = "–" if line.error is None else signed(line.error)
        rows.append((
            name_of(line), amount(line.predicted, line.unit), Cell(text=line.known, mark=known), expected,
            amount(line.measured, line.unit), error, verdict,
        ))  # fmt: skip
    head = ("", "predicted", "known", "expected", "measured", "error", "")
    return Table(head=head, rows=tuple(rows), numbers=frozenset({1, 3, 4, 5}), what="Predicted and measured")


def signed(share: float) -> str:
    """`+3.1 %`, `−12 %`."""
    text = words.percent(abs(share))
    return f"+{text}" if share > 0 else f"−{text}" if share < 0 else text


def _every_step(subject: Subject, found: Comparison) -> Figure | None:
    steps = [row for row in subject.steps if row.seconds is not None]
    if len(steps) < 2:
        return None
    step = found.line("step")
    band = [step.low, step.high] if step is not None and step.low is not None and step.high is not None else None
    shown = thinned(steps, POINTS)
    data = {
        "unit": "seconds", "zero": True, "series": [{"name": "a step", "points": [[row.step, row.seconds] for row in shown]}],
        "band": band, "band_name": "expected", "mark": step.predicted if step is not None else None,
    }  # fmt: skip
    drift = found.drift
    told = f"Seconds of {len(steps)} steps" + (f": {seconds(drift.first_seconds)} at first, {seconds(drift.last_seconds)} at last" if drift else "")
    rows = tuple((f"{row.step:,}", seconds(row.seconds)) for row in thinned(steps, ROWS))
    note = f"First third {seconds(drift.first_seconds)}, last third {seconds(drift.last_seconds)} ({signed(drift.change)})." if drift else ""
    return Figure(
        chart=Chart(name="steps", kind="lines", data=data, told=told, height=250), title="Seconds of every step", note=note,
        table=Table(head=("step", "seconds"), rows=rows, numbers=frozenset({0, 1}), what="Seconds of steps"),
    )  # fmt: skip


def thinned(rows: Sequence[LogRow], most: int) -> list[LogRow]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


# --- loss ------------------------------------------------------------------------------------------------------------


def loss(subject: Subject) -> Section | None:
    steps = [row for row in subject.steps if row.loss is not None]
    if not steps:
        return None
    held = [row for row in subject.evaluations if row.loss is not None]
    series: list[dict[str, Any]] = [{"name": "training", "points": [[row.step, row.loss] for row in thinned(steps, POINTS)]}]
    series += [{"name": "held out", "dots": True, "points": [[row.step, row.loss] for row in held]}] if held else []
    lost = len(subject.steps) - len(steps)
    lead = f"From {steps[0].loss:.4f} to {steps[-1].loss:.4f} in {steps[-1].step:,} steps"
    lead += f"; {held[-1].loss:.4f} on held-out samples." if held else "."
    lead += f" At {lost} {'step' if lost == 1 else 'steps'} it was no number." if lost else ""
    at = {row.step: row.loss for row in held}
    rows = tuple(
        (f"{row.step:,}", f"{row.loss:.4f}", f"{at[row.step]:.4f}" if row.step in at else "–",
         "–" if row.rate is None else f"{row.rate:.3g}", "–" if row.norm is None else words.number(row.norm))
        for row in thinned(steps, ROWS)
    )  # fmt: skip
    head = ("step", "loss", "held out", "learning rate", "gradient norm")
    chart = Chart(name="loss", kind="lines", data={"unit": "", "series": series}, told=lead, height=280)
    table = Table(head=head, rows=rows, numbers=frozenset(range(5)), what="Loss")
    return Section(name="loss", title="Loss", lead=lead, figures=(Figure(chart=chart, table=table),))


# --- where the time went ---------------------------------------------------------------------------------------------


def time(subject: Subject, said: Mapping[str, Any], known: str) -> Section | None:
    breakdown = {name: float(value) for name, value in (said.get("breakdown") or {}).items() if value}
    total = sum(breakdown.values())
    if not total:
        return None
    names = {**KINDS, "waiting_for_host": "the host's own time"} if said.get("device") == "CPU" else KINDS
    kinds = sorted(breakdown.items(), key=lambda item: -item[1])
    first = kinds[0]
    binds = f" The step is bound by {said['binds']}." if said.get("binds") else ""
    lead = f"{words.percent(first[1] / total)} of a step goes to {names.get(first[0], first[0])}, as predicted.{binds}"
    labels = [names.get(name, name) for name, _ in kinds]
    told = times([value for _, value in kinds])
    rows = tuple((label, text, share(value, total)) for label, text, (_, value) in zip(labels, told, kinds, strict=True))
    chart = Chart(
        name="time", kind="bars", height=48 + 32 * len(kinds), told=lead,
        data={"unit": "seconds", "across": True, "names": labels, "series": [{"name": "predicted", "values": [value for _, value in kinds]}]},
    )  # fmt: skip
    table = Table(head=("", "seconds", "share"), rows=rows, numbers=frozenset({1, 2}), what="Seconds")
    note = f"How that is known: {known}." if known else ""
    figures = [Figure(chart=chart, table=table, title="By what the device does", note=note)]
    figures += [figure] if (figure := _phases(subject, said)) else []
    return Section(name="time", title="Where the time went" if subject.finished else "Where the time goes", lead=lead, figures=tuple(figures))


def _phases(subject: Subject, said: Mapping[str, Any]) -> Figure | None:
    """Phases of a step: predicted, and measured where there was a run."""
    if subject.comparison is not None and subject.comparison.comparable:
        parts = [part for part in subject.comparison.parts if part.measured is not None or part.predicted is not None]
        names = [part.name for part in parts]
        predicted, measured = [part.predicted for part in parts], [part.measured for part in parts]
        notes = [part.note for part in parts]
    else:
        phases = {name: float(value) for name, value in (said.get("phases") or {}).items() if value}
        names, predicted, measured, notes = list(phases), list(phases.values()), [None] * len(phases), [""] * len(phases)
    if not names:
        return None
    series: list[dict[str, Any]] = [{"name": "predicted", "values": predicted, "colour": 9}]
    series += [{"name": "measured", "values": measured, "colour": 0}] if any(value is not None for value in measured) else []
    rows = tuple((name, seconds(a), seconds(b), note) for name, a, b, note in zip(names, predicted, measured, notes, strict=True))
    told = "; ".join(f"{row[0]}: predicted {row[1]}, measured {row[2]}" for row in rows)
    chart = Chart(
        name="phases", kind="bars", told=told, height=48 + (26 + 16 * len(series)) * len(names),
        data={"unit": "seconds", "across": True, "names": names, "series": series},
    )  # fmt: skip
    head, keep = ("", "predicted", "measured", ""), len(series) > 1
    table = Table(
        head=head if keep else head[:2], rows=rows if keep else tuple(row[:2] for row in rows), numbers=frozenset({1, 2}), what="Phases",
    )  # fmt: skip
    return Figure(chart=chart, table=table, title="By phase of the step" + ("" if keep else ": seconds in which the device computes"))


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(subject: Subject, said: Mapping[str, Any], detail: Detail | None) -> Section | None:
    device, capacity, verdict = said.get("memory_bytes"), said.get("capacity_bytes"), said.get("verdict")
    if device is None and detail is None:
        return None
    where = "of RAM" if said.get("device") == "CPU" else "on the device"
    worst = " of the worst rank" if subject.plan.mesh.world > 1 else ""
    lead = f"{size(device)} of {size(capacity)} {where}{worst} are predicted to be in use: {verdict}." if device and capacity else ""
    figures: list[Figure] = []
    if detail is not None:
        figures.append(_curve(detail.curve, detail.cost.worst.memory))
        figures += [_holders(detail.cost.worst.memory)] if detail.cost.worst.memory.holders else []
    else:
        names = (("allocated_bytes", "tensors"), ("reserved_bytes", "with the allocator's cache"), ("memory_bytes", "with context and libraries"))
        rows = tuple((label, size(said[name])) for name, label in names if said.get(name) is not None)
        figures.append(Figure(table=Table(head=("", "peak"), rows=rows, numbers=frozenset({1}))))
    return Section(name="memory", title="Memory of a step", lead=lead, figures=tuple(figures))


def _curve(curve: MemoryCurve, found: Memory) -> Figure:
    values = [[row[place] for row in curve.bytes] for place in range(len(curve.categories))]
    at = curve.at[curve.peak] if curve.at else 0.0
    moment = f"{seconds(at)} into the step" if curve.unit == "seconds" else f"op {int(at):,}"
    who = f"{curve.peak_op} of {curve.peak_module}" if curve.peak_module else curve.peak_op
    told = f"Allocated bytes over a step; the peak is {size(curve.peak_bytes)}, {moment}, in {who}"
    data = {
        "x": curve.unit, "names": curve.categories, "at": curve.at, "end": curve.end, "values": values, "peak": curve.peak,
        "phases": _merged(curve.phases), "limit": found.capacity_bytes, "colours": [COLOURS[name] for name in curve.categories],
    }  # fmt: skip
    peak = curve.bytes[curve.peak] if curve.bytes else ()
    pairs = sorted(zip(curve.categories, peak, strict=True), key=lambda pair: -pair[1])
    pairs = [("total", curve.peak_bytes), *((name, value) for name, value in pairs if value)]
    held = sizes([value for _, value in pairs])
    rows = [(name, text, share(value, max(1, curve.peak_bytes))) for (name, value), text in zip(pairs, held, strict=True)]
    rows = [*rows[1:], rows[0]]
    rank = f" on rank {curve.rank} of the pipeline" if curve.rank else ""
    note = f"The peak comes {moment}, in {who}."
    if found.allocated_bytes > 1.005 * curve.peak_bytes:
        note += f" Outside a steady step, in the first one or an evaluation, it is {size(found.allocated_bytes)}."
    return Figure(
        chart=Chart(name="memory", kind="areas", data=data, told=told, height=340), note=note,
        title=f"Allocated bytes over a steady step{rank}, by what they are held for",
        table=Table(head=("at the peak", "bytes", "share"), rows=tuple(rows), numbers=frozenset({1, 2}), what="Bytes at the peak"),
    )  # fmt: skip


def _merged(phases: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Phases without those that take no time, neighbours of one name joined."""
    found: list[tuple[str, float, float]] = []
    for name, start, end in phases:
        if not name or end <= start:
            continue
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1], end)
        else:
            found.append((name, start, end))
    return found


def _holders(found: Memory) -> Figure:
    held = sizes([holder.bytes for holder in found.holders])
    rows = tuple((holder.name, holder.category, text) for holder, text in zip(found.holders, held, strict=True))
    table = Table(head=("module", "held for", "bytes"), rows=rows, numbers=frozenset({2}))
    return Figure(title="Largest allocations at the peak", table=table)


# --- pipeline --------------------------------------------------------------------------------------------------------


def pipeline(subject: Subject, detail: Detail | None) -> Section | None:
    if detail is None or not detail.slots:
        return None
    step = detail.cost.time.step_seconds if detail.cost.time else max(slot.finish for slot in detail.slots)
    ranks = sorted({slot.rank for slot in detail.slots})
    assert subject.plan.pipeline is not None
    lead = (
        f"Ranks wait {words.percent(detail.cost.bubble)} of the step for each other (the bubble): {subject.plan.pipeline.schedule}, "
        f"{subject.plan.pipeline.stages} stages, {subject.plan.accumulate} micro-batches."
    )
    slots = [[ranks.index(slot.rank), slot.start, slot.finish, slot.kind, _event(slot)] for slot in detail.slots]
    kinds = [{"key": key, "name": name, "colour": colour} for key, (name, colour) in EVENTS.items()]
    chart = Chart(
        name="pipeline", kind="gantt", told=lead, height=48 + max(26, min(44, 420 // len(ranks))) * len(ranks),
        data={"rows": [f"rank {rank}" for rank in ranks], "slots": slots, "kinds": kinds, "end": step},
    )  # fmt: skip
    table = Table(
        head=("rank", "stages", "busy", "waits", "share", "memory"), rows=tuple(_ranks(detail, step)),
        numbers=frozenset({2, 3, 4, 5}), what="Ranks",
    )  # fmt: skip
    return Section(name="pipeline", title="Pipeline", lead=lead, figures=(Figure(chart=chart, table=table),))


def _event(slot: EventSlot) -> str:
    name = EVENTS.get(slot.kind, (slot.kind, 0))[0]
    return f"{name} of micro-batch {slot.micro}, stage {slot.stage}, rank {slot.rank}" if slot.micro >= 0 else f"{name}, rank {slot.rank}"


def _ranks(detail: Detail, step: float) -> Iterator[tuple[str, ...]]:
    busy: dict[int, float] = {}
    for slot in detail.slots:
        busy[slot.rank] = busy.get(slot.rank, 0.0) + slot.finish - slot.start
    ranks = detail.cost.ranks
    mine = [busy.get(one.rank, 0.0) for one in ranks]
    waits = [max(0.0, step - one) for one in mine]
    told, used = times([*mine, *waits]), sizes([one.memory.device_bytes for one in ranks])
    for place, one in enumerate(ranks):
        yield (
            str(one.rank), ", ".join(map(str, one.stages)), told[place], told[len(ranks) + place],
            share(waits[place], step or 1.0), used[place],
        )  # fmt: skip


# --- blocks ----------------------------------------------------------------------------------------------------------


def blocks(detail: Detail | None) -> Section | None:
    if detail is None or len(detail.blocks) < 2:
        return None
    found = detail.blocks
    slowest = max(found[:-1], key=lambda one: sum(one.seconds.values()))
    lead = f"{len(found) - 1} blocks, seconds of a step and bytes at the peak."
    if any(one.seconds for one in found):
        lead += f" The slowest is {slowest.name} with {seconds(sum(slowest.seconds.values()))}."
    where = f" of rank {detail.curve.rank}" if detail.slots else ""
    figures = [
        figure for figure in (
            _block_figure(found, "seconds", "Seconds of a step", ("forward", "backward", "recompute", "update")),
            _block_figure(found, "bytes", f"Bytes at the peak{where}", detail.curve.categories),
        ) if figure is not None
    ]  # fmt: skip
    return Section(name="blocks", title="Block by block", lead=lead, figures=tuple(figures)) if figures else None


def _block_figure(found: Sequence[BlockCost], what: str, title: str, names: Sequence[str]) -> Figure | None:
    found = [one for one in found if any(getattr(one, what).values()) or one.name == AROUND]
    if len(found) < 2:
        return None
    columns = _columns(found, what, names)
    used = list(columns[found[0].name])
    totals = [sum(columns[one.name].values()) for one in found]
    shown = found if totals[-1] <= 3 * max(totals[:-1]) else found[:-1]
    common = found[0].name.rpartition(".")[0]
    plain = bool(common) and all(one.name.rpartition(".")[0] == common for one in found[:-1])
    labels = ["around" if one.name == AROUND else one.name.rpartition(".")[2] if plain else one.name for one in shown]
    series = [
        {"name": name, "values": [columns[one.name][name] for one in shown], "colour": COLOURS.get(name, place)}
        for place, name in enumerate(used)
    ]
    note = f"{AROUND.capitalize()}: embeddings, head and loss{'' if shown is found else '; in the table alone, they would hide the blocks'}."
    return Figure(
        title=f"{title}, {common}.N" if plain else f"{title}, block by block", note=note, table=_block_table(found, columns, used, what),
        chart=Chart(name=f"blocks-{what}", kind="bars", told=f"{title} of every block", height=260,
                    data={"unit": what, "stacked": True, "names": labels, "series": series}),
    )  # fmt: skip


def _columns(found: Sequence[BlockCost], what: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Block → name → figure; what is a hundredth of all blocks or less is told together."""
    whole = {name: sum(getattr(one, what).get(name, 0) for one in found[:-1]) for name in names}
    least = 0.01 * sum(whole.values()) if len(names) > 4 else -1.0
    large = [name for name in names if whole[name] > least and any(getattr(one, what).get(name) for one in found)]
    rest = any(getattr(one, what).get(name) for one in found for name in names if name not in large)
    return {
        one.name: {name: getattr(one, what).get(name, 0) for name in large}
        | ({OTHER: sum(value for name, value in getattr(one, what).items() if name not in large)} if rest else {})
        for one in found
    }


def _block_table(found: Sequence[BlockCost], columns: Mapping[str, Mapping[str, float]], used: Sequence[str], what: str) -> Table:
    """A row for every run of blocks that are alike."""
    flat = [value or None for one in found for value in (*columns[one.name].values(), sum(columns[one.name].values()))]
    told, wide = (times if what == "seconds" else sizes)(flat), len(used) + 1
    mixed = len({one.mode for one in found[:-1]}) > 1
    cells = [
        (one.name, (*([MODES.get(one.mode, one.mode) or "–"] if mixed else []), *told[place * wide : (place + 1) * wide]))
        for place, one in enumerate(found)
    ]
    rows = []
    for same, run in groupby(cells, key=lambda pair: pair[1]):
        named = [name for name, _ in run]
        rows.append((AROUND if AROUND in named else ", ".join(paths.fold_names(named)), *same))
    several = len(rows) < len(found)
    return Table(
        head=("each of" if several else "block", *(["saved"] if mixed else []), *used, "total"), rows=tuple(rows),
        numbers=frozenset(range(1 + mixed, 1 + mixed + wide)), what="Blocks",
    )  # fmt: skip
