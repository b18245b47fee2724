"""The part of the screen about time: how long a step takes and why, what it costs, and a whole run of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from foretell.quantities import ASSUMED, MEASURED, NO, Cost, Energy, Prediction, Run, Time
from foretell.report import command, goodput, words
from foretell.report.terminal import bar
from foretell.units import human_count

GUTTER = 11
"""Columns for the name of a line."""
BRIEF, PLAIN, FULL, BAR = 0, 1, 2, 3
"""How much is told: the step and what it costs; what its time goes to; how all that is known; a bar of the time as well."""
_BINDS = {"host": "CPU-bound (launch overhead)", "network": "bound by the network"}


def lines(prediction: Prediction, width: int, detail: int) -> list[Text]:
    """Nothing where nothing is known; of a step that does not fit, how long it would take."""
    time = prediction.time
    if time is None:
        return []
    room = width - GUTTER
    shown = _step(prediction, time, room, detail)
    if prediction.verdict != NO:
        shown += _goes_to(time, room, detail) if detail > BRIEF else []
        shown += _costs(prediction.cost, prediction.energy, room, detail)
    if prediction.run is not None:
        told = _run(prediction.run, prediction, room)
        shown += told[:3] if detail == BRIEF else told
    if prediction.goodput:
        found = goodput.pieces(prediction.goodput) + goodput.sources(prediction.goodput, reasons=detail >= FULL)
        shown += _flowed("goodput", found, room, "bold")
    return shown + (_sources(prediction, time, room) if detail >= FULL else [])


def _step(prediction: Prediction, time: Time, room: int, detail: int) -> list[Text]:
    """`142 ms (131–155)`, `57,700 tokens/s`, `MFU 52 %`, `bound by compute`."""
    taken = words.step_span(time.step_seconds, time.low_seconds, time.high_seconds)
    before = [taken if detail > BRIEF else f"{taken} {_word(time.provenance)}"]
    rate, mfu = prediction.throughput, prediction.mfu
    after = []
    if mfu is not None:
        again = f" (HFU {words.percent(mfu.hfu)})" if mfu.hfu > 1.005 * mfu.value else ""
        after.append(f"MFU {words.percent(mfu.value)}{again}")
    after.append("if it fit" if prediction.verdict == NO else _BINDS.get(time.binds, f"bound by {time.binds}"))
    if rate is None:
        return _flowed("step", [*before, *after], room, "bold")
    all_of_them = f"{words.number(rate.per_second)} {rate.unit}/s"
    each = f"{all_of_them} ({words.number(rate.per_second_per_device)} each)"
    shown = _flowed("step", [*before, each, *after], room, "bold")
    if len(shown) == 1 and command.device_count(prediction) > 1:
        return shown
    shown = _flowed("step", [*before, all_of_them, *after], room, "bold")
    return shown[:2] if detail == BRIEF else shown


def _goes_to(time: Time, room: int, detail: int) -> list[Text]:
    """Shares of the step, rounded so that they add up to 100."""
    parts = bar.time_parts(time)
    shares = bar.cells([part.seconds for part in parts], 100)
    entries = [(part, f"{part.name} {share} %") for part, share in zip(parts, shares, strict=True) if share]
    if detail < BAR:
        return _flowed("time", [text for _, text in entries], room)
    counts = bar.cells([part.seconds for part in parts], room)
    row = Text().join(Text(part.mark * count, part.style) for part, count in zip(parts, counts, strict=True))
    legend = [Text.assemble((part.mark, part.style), f" {text}") for part, text in entries]
    return [_label("time") + row, *_flowed("", legend, room)]


def _costs(cost: Cost | None, energy: Energy | None, room: int, detail: int) -> list[Text]:
    """Money and joules, all devices together."""
    pieces = []
    if cost is not None:
        pieces = [f"{words.money(cost.per_hour, cost.currency)}/h", words.per_steps(cost.per_step, cost.currency)]
        if cost.per_billion is not None:
            pieces.append(f"{words.money(cost.per_billion, cost.currency)} per 1B {cost.unit}")
    if energy is not None:
        spread = words.about(energy.joules_per_step, energy.low_joules, energy.high_joules)
        pieces.append(f"{words.joules(energy.joules_per_step)}/step {spread}".rstrip())
    shown = _flowed("cost" if cost is not None else "energy", pieces, room)
    return (shown[:1] if detail == BRIEF else shown) if pieces else []


def _run(run: Run, prediction: Prediction, room: int) -> list[Text]:
    """`1T tokens`, `200 days (185–219)`, money, kWh, CO2, and years of devices where there are several."""
    pieces = [f"{human_count(run.amount)} {run.unit}", words.run_span(run.seconds, run.low_seconds, run.high_seconds)]
    if run.money is not None:
        pieces.append(words.money(run.money, prediction.cost.currency if prediction.cost else "USD"))
    if run.joules is not None:
        pieces.append(words.kilowatt_hours(run.joules))
    if run.carbon_kilograms is not None:
        pieces.append(f"{words.mass(run.carbon_kilograms)} CO2")
    if command.device_count(prediction) > 1:
        pieces.append(f"{words.number(run.device_years)} device-years")
    shown = _flowed("run", pieces, room, "bold")
    if run.embodied_carbon_kilograms is None:
        return shown
    more = _flowed("run", [*pieces, f"{words.mass(run.embodied_carbon_kilograms)} CO2 of making them"], room, "bold")
    return more if len(more) == len(shown) else shown


def _sources(prediction: Prediction, time: Time, room: int) -> list[Text]:
    """How time, energy and price are known."""
    cost, energy = prediction.cost, prediction.energy
    known = " ".join(time.provenance.split())
    if known == MEASURED:
        known += f" on {command.device_name(prediction) or 'such a device'}"
    spread = words.about(time.step_seconds, time.low_seconds, time.high_seconds)
    pieces = [" ".join(filter(None, ("time", known, spread)))]
    if prediction.verdict != NO or prediction.run is not None:
        pieces += [f"energy {_word(energy.provenance)}"] if energy is not None else []
        origin = _word(cost.source) if cost is not None else ""
        pieces += [origin if "price" in origin else f"price {origin}"] if origin else []
    return _flowed("confidence", pieces, room)


# --- words -----------------------------------------------------------------------------------------------------------


def _word(provenance: str) -> str:
    """`measured` or `assumed` without its reasons; of any other text its beginning."""
    text = " ".join(provenance.split())
    word = text.partition(":")[0]
    return word if word in (MEASURED, ASSUMED) else text.partition(",")[0]


def _label(label: str) -> Text:
    return Text(f"{label:<{GUTTER}}", "bright_black" if label else "")


def _flowed(label: str, pieces: Sequence[str | Text], room: int, first: str = "") -> list[Text]:
    """Pieces beside each other, two spaces between them, on as many lines as they take; `first` is the first one's style."""
    shown = [_label(label)]
    for number, piece in enumerate(pieces):
        text = piece if isinstance(piece, Text) else Text(piece, first if not number else "")
        used = shown[-1].cell_len - GUTTER
        if used and used + 2 + text.cell_len > room:
            shown.append(_label(""))
            used = 0
        shown[-1] = Text.assemble(shown[-1], "  " if used else "", text)
    return shown
