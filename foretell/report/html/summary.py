"""What a report opens with: the conclusion in a sentence, the figures that matter, total time and cost. No torch.

Money is the device's price for an hour over the seconds that it stands beside: measured seconds of a run, else predicted ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretell.hardware.catalog import GENERIC_CPU, find, find_reported
from foretell.hardware.prices import price_per_hour
from foretell.hardware.types import Device
from foretell.plan.types import Plan
from foretell.price import energy as watts
from foretell.quantities import Cost, Throughput
from foretell.report import words
from foretell.report.comparison import Comparison, Line, device_of
from foretell.report.html.data import Subject
from foretell.report.html.detail import Detail
from foretell.report.html.figures import amount, name_of, seconds, signed, size
from foretell.report.html.page import Fact

STEPS = 1000
"""Steps of which a plan's total is told: it does not say how long the run will be."""


@dataclass(frozen=True, kw_only=True)
class Money:
    """What steps cost at one price: as predicted, and as measured."""

    predicted: Cost | None = None
    measured: Cost | None = None

    @property
    def told(self) -> Cost | None:
        """Of the seconds that the page tells first."""
        return self.measured or self.predicted


def money_of(subject: Subject, said: Mapping[str, Any], detail: Detail | None = None) -> Money:
    """By the price of the device that it ran on, else of the one it is planned for."""
    plan, found = subject.plan, subject.comparison
    unit = next((kind for kind in ("tokens", "samples") if said.get(f"{kind}_per_step")), "samples")
    per_step = int(said.get(f"{unit}_per_step") or plan.global_batch)
    planned = device_of(plan) or (detail.device if detail is not None else None)
    predicted = _cost(planned, said.get("step_seconds"), unit, per_step, plan.mesh.world)
    if found is None or subject.measured is None:
        return Money(predicted=predicted)
    ran_on = _ran_on(found)
    measured = _cost(ran_on, subject.measured["step_seconds"], subject.measured["unit"], int(subject.measured["per_step"]), plan.mesh.world)
    if ran_on is not None and planned is None:  # made for the machine that it ran on
        predicted = _cost(ran_on, said.get("step_seconds"), unit, per_step, plan.mesh.world)
    return Money(predicted=predicted, measured=measured)


def _ran_on(found: Comparison) -> Device | None:
    return find(GENERIC_CPU) if found.hardware.get("kind") == "cpu" else find_reported(str(found.hardware.get("device", "")))


def _cost(device: Device | None, step: Any, unit: str, per_step: int, devices: int) -> Cost | None:
    price, source = price_per_hour(device) if device is not None else (None, "")
    if price is None or not isinstance(step, int | float) or step <= 0 or per_step <= 0:
        return None
    rate = per_step / step
    through = Throughput(unit=unit, per_step=per_step, per_second=rate, per_second_per_device=rate / devices)
    return watts.cost(float(step), through, price, source, devices)


def for_so_long(cost: Cost | None, duration: float) -> str:
    """`$0.12` for some seconds; empty where no price is known."""
    return words.money(cost.per_hour * duration / 3600, cost.currency) if cost is not None else ""


# --- the conclusion --------------------------------------------------------------------------------------------------


def conclusion(subject: Subject, said: Mapping[str, Any], money: Money) -> str:
    """One sentence: what came of it."""
    name = str(subject.plan.model.get("model", "a model"))
    name = name if " " not in name else "The script"
    if subject.comparison is not None and subject.measured is not None:
        return f"{name} {_ran(subject, subject.comparison, subject.measured, money)}"
    if subject.run is not None:
        so_far = f" after {subject.steps[-1].step:,} steps" if subject.steps else ""
        return f"The run of {name} has not ended{so_far}{_expected(said)}."
    verdict, used, room = said.get("verdict"), said.get("memory_bytes"), said.get("capacity_bytes")
    where = f" on {subject.plan.hardware}"
    if verdict == "no":
        return f"{name} does not fit{where}: {size(used)} are needed and there are {size(room)} on a device."
    fits = {"fits": f"{name} fits{where}", "tight": f"{name} fits{where}, but memory is tight"}.get(str(verdict), f"{name}{where}")
    held = f" ({size(used)} of {size(room)})" if used and room else ""
    told = money.told
    worth = f", at {words.money(told.per_billion, told.currency)} a billion {told.unit}" if told is not None and told.per_billion else ""
    return f"{fits}{held}{_expected(said)}{worth if _expected(said) else ''}."


def _expected(said: Mapping[str, Any]) -> str:
    step = said.get("step_seconds")
    rate = next((f", {words.number(said[f'{kind}_per_second'])} {kind}/s" for kind in ("tokens", "samples") if said.get(f"{kind}_per_second")), "")
    return f"; a step is predicted to take {seconds(step)}{rate}" if step else ""


def _ran(subject: Subject, found: Comparison, measured: Mapping[str, Any], money: Money) -> str:
    total = max([int(measured["steps"]) + int(measured["skipped_steps"]), *(row.step for row in subject.steps)])
    spent = for_so_long(money.told, float(measured["wall_seconds"]))
    lead = f"ran {total:,} {'step' if total == 1 else 'steps'} in {duration(measured['wall_seconds'])}{f' for {spent}' if spent else ''}"
    step, memory = found.line("step"), [line for line in found.lines if line.unit == "bytes" and line.inside is not None]
    if not found.comparable or step is None or step.measured is None:
        return f"{lead}; nothing was predicted to compare it with."
    held = ""
    if memory:
        out = [line for line in memory if not line.inside]
        held = "; memory is as predicted" if not out else f"; {name_of(out[0])} is outside its range ({signed(out[0].error or 0.0)})"
    busy = "; the machine was busy" if found.busy and not step.inside else ""
    return f"{lead}: a step takes {seconds(step.measured)}, {_against(step)}{held}{busy}."


def _against(step: Line) -> str:
    if not step.predicted or not step.measured:
        return "for which nothing was predicted"
    times = step.measured / step.predicted
    if step.inside:
        return f"as predicted ({seconds(step.predicted)})"
    how = f"{times:.1f} times as long as" if times >= 2 else f"{words.percent(abs(times - 1))} {'longer' if times > 1 else 'shorter'} than"
    return f"{how} the {seconds(step.predicted)} that were predicted"


def duration(value: float) -> str:
    """`26 s`, `12 min`, `5.2 hours`, `3.1 days`."""
    if value < 120:
        return seconds(value)
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} hours" if value < 172800 else f"{value / 86400:,.1f} days"


# --- the figures that matter -----------------------------------------------------------------------------------------


def facts(subject: Subject, said: Mapping[str, Any], detail: Detail | None, money: Money) -> Iterator[Fact]:
    ran = subject.comparison is not None and subject.measured is not None
    yield from _measured(subject) if ran else _predicted(subject.plan, said)
    if detail is not None and detail.cost.bubble and subject.plan.mesh.pp > 1:
        yield Fact(label="Bubble", value=words.percent(detail.cost.bubble), known="assumed", beside="of the step, waiting, as predicted")
    yield from _cost_facts(subject, said, money)
    counted = subject.comparison is not None and subject.comparison.line("energy") is not None
    if detail is not None and detail.energy is not None and not counted:
        value, _, unit = words.joules(detail.energy.joules_per_step).partition(" ")
        beside = f"{'predicted, ' if ran else ''}{words.number(detail.energy.watts_per_device)} W a device"
        yield Fact(label="Energy of a step", value=value, unit=unit, known=detail.energy.provenance, beside=beside)


def _cost_facts(subject: Subject, said: Mapping[str, Any], money: Money) -> Iterator[Fact]:
    """Total time and cost, and the cost of steps: of measured seconds beside them, else of predicted ones."""
    told = money.told
    if subject.measured is not None and subject.comparison is not None:
        wall = float(subject.measured["wall_seconds"])
        value, _, unit = duration(wall).partition(" ")
        spent = for_so_long(told, wall)
        yield Fact(label="Whole run", value=value, unit=unit, known="measured", beside=f"{spent} in all" if spent else "")
    elif said.get("step_seconds"):
        wall = float(said["step_seconds"]) * STEPS
        value, _, unit = duration(wall).partition(" ")
        spent = for_so_long(told, wall)
        yield Fact(label=f"{STEPS:,} steps", value=value, unit=unit, known=_time_known(said), beside=f"{spent} in all" if spent else "")
    if told is None:
        return
    each = f"{words.money(told.per_billion, told.currency)} a billion {told.unit}" if told.per_billion else ""
    if money.measured is not None and money.predicted is not None:
        each = f"{each}; {words.per_steps(money.predicted.per_step, money.predicted.currency)} predicted".lstrip("; ")
    value, _, unit = words.per_steps(told.per_step, told.currency).partition(" ")
    yield Fact(label="Cost", value=value, unit=unit, known="assumed", beside=each)


def _time_known(said: Mapping[str, Any]) -> str:
    how = said.get("provenance")
    return str(how.get("time", "")) if isinstance(how, Mapping) else ""


def _measured(subject: Subject) -> Iterator[Fact]:
    assert subject.comparison is not None and subject.measured is not None
    for line in subject.comparison.lines:
        if line.measured is None:
            continue
        value, _, unit = amount(line.measured, line.unit).partition(" ")
        name = {"throughput": "Throughput", "step": "Step"}.get(line.name, name_of(line)[:1].upper() + name_of(line)[1:])
        beside = "not predicted"
        if line.predicted is not None:
            beside = f"predicted {amount(line.predicted, line.unit)}" + (f", {signed(line.error)}" if line.error is not None else "")
        unit = unit or (line.unit if line.unit.endswith("/s") else "")
        yield Fact(label=name, value=value, unit=unit, known="measured", beside=beside, good=line.inside)
    loss = subject.comparison.loss
    if loss.get("first") is not None and loss.get("last") is not None:
        held = f"held out {loss['held_out']:.4f}" if loss.get("held_out") is not None else ""
        yield Fact(label="Loss", value=f"{loss['last']:.4f}", known="measured", beside=f"from {loss['first']:.4f}" + (f", {held}" if held else ""))
    if subject.measured.get("mfu"):
        yield Fact(label="MFU", value=words.percent(float(subject.measured["mfu"])), known="measured", beside="FLOPs of the model over the peak")


def _predicted(plan: Plan, said: Mapping[str, Any]) -> Iterator[Fact]:
    how = said.get("provenance")
    known = how if isinstance(how, Mapping) else {}
    if said.get("step_seconds"):
        step = float(said["step_seconds"])
        value, _, unit = seconds(step).partition(" ")
        low, high = said.get("low_seconds"), said.get("high_seconds")
        beside = f"expected {seconds(low)} – {seconds(high)}" if low and high else ""
        yield Fact(label="Step", value=value, unit=unit, known=str(known.get("time", "")), beside=beside)
    for kind in ("tokens", "samples"):
        if said.get(f"{kind}_per_second"):
            each = float(said[f"{kind}_per_second"]) / plan.mesh.world
            beside = f"{words.number(each)} a device" if plan.mesh.world > 1 else f"{said.get(f'{kind}_per_step', plan.global_batch):,} a step"
            yield Fact(label="Throughput", value=words.number(float(said[f"{kind}_per_second"])), unit=f"{kind}/s",
                       known=str(known.get("time", "")), beside=beside)  # fmt: skip
    if said.get("memory_bytes"):
        value, _, unit = size(said["memory_bytes"]).partition(" ")
        room = f" of {size(said['capacity_bytes'])}" if said.get("capacity_bytes") else ""
        verdict = str(said.get("verdict", ""))
        yield Fact(label="Memory", value=value, unit=unit, known=str(known.get("memory", "")),
                   beside=": ".join(filter(None, (room.strip(), verdict))),
                   good={"fits": True, "no": False}.get(verdict))  # fmt: skip
