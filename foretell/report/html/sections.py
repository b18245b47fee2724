"""A report's page from what is known: the figures that matter first, charts, the plan in words, how to repeat it."""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from foretell.errors import UserError
from foretell.plan import blocks as stack
from foretell.plan import file as plans
from foretell.plan import paths
from foretell.plan.mesh import OWN_RANKS
from foretell.plan.recipe import known_blocks
from foretell.plan.types import Plan
from foretell.report import words
from foretell.report.comparison import compare, repeats
from foretell.report.goodput import told_of as goodput_told
from foretell.report.html import figures
from foretell.report.html import ranks as html_ranks
from foretell.report.html import summary as html_summary
from foretell.report.html.data import Subject
from foretell.report.html.detail import Detail
from foretell.report.html.figures import seconds, signed, size, sizes
from foretell.report.html.front import Front, FrontPoint
from foretell.report.html.page import Cell, Chart, Figure, Page, Section, Table
from foretell.report.terminal.plan import MODE_WORDS, SCHEDULE_WORDS, TALK_WORDS
from foretell.trace.load.model import is_script
from foretell.units import human_count

SHOWN = 24
"""Plans that are drawn; the tables have them too."""
UNLIKE = 0.02
"""Share by which a prediction made anew may differ from the plan's before the page says so."""


def page(
    subject: Subject, detail: Detail | None = None, *, why_not: str = "", files: Sequence[tuple[str, str]] = (), made: str = ""
) -> Page:
    """The whole report; `why_not` says why there is no detail, `files` lie beside it."""
    plan = subject.plan
    said = dict(plan.predicted)
    if "step_seconds" not in said and "memory_bytes" not in said and detail is not None:
        said = detail.cost.predicted()
    if detail is not None and detail.cost.time is not None and "phases" not in said:
        said |= {"phases": dict(detail.cost.time.phases), "spans": detail.cost.spans()}
    subject = _with_phases(subject, said)
    how = said.get("provenance")
    known = str(how.get("time", "")) if isinstance(how, Mapping) else ""
    money = html_summary.money_of(subject, said, detail)
    found = (
        figures.compared(subject), figures.loss(subject), figures.time(subject, said, known),
        figures.memory(subject, said, detail), figures.pipeline(subject, detail), figures.blocks(detail), html_ranks.ranks(subject),
        _front(subject.front), _others(subject.front), _in_words(plan, said), _repeat(subject, files),
        _notes(subject, detail, money),
    )  # fmt: skip
    return Page(
        title=str(plan.model.get("model", "a model")), conclusion=html_summary.conclusion(subject, said, money), subtitle=_told(plan),
        about=tuple(_about(subject)), facts=tuple(html_summary.facts(subject, said, detail, money)), commands=tuple(_commands(subject)),
        sections=tuple(one for one in found if one is not None), made=made, notes=tuple(_remarks(subject, said, detail, why_not)),
    )  # fmt: skip


def _with_phases(subject: Subject, said: Mapping[str, Any]) -> Subject:
    """A plan written without its phases is compared with those that were costed for the page."""
    plan, measured = subject.plan, subject.measured
    new = {name: said[name] for name in ("phases", "spans") if said.get(name) and name not in plan.predicted}
    if measured is None or not new or not plan.predicted:
        return subject
    return replace(subject, comparison=compare(plan.with_(predicted={**plan.predicted, **new}), measured))


def _commands(subject: Subject) -> Iterator[tuple[str, str]]:
    """What comes next, to copy."""
    path, plan = shlex.quote(str(subject.path)), shlex.quote(str(subject.plan_path))
    if subject.run is None:
        runs = "plan eject" if is_script(str(subject.plan.model.get("model", ""))) else "run"
        yield ("Write it as a script" if runs == "plan eject" else "Run it"), f"foretell {runs} {plan}"
        yield "Show the plan", f"foretell plan show {plan}"
    elif subject.finished:
        yield "Compare again", f"foretell compare {path}"
        yield from (("Run again", repeats(command)) for command in [_started(subject)] if command)
    else:
        yield "Resume", f"foretell run {path} --resume"


def _started(subject: Subject) -> str:
    return subject.command or (subject.comparison.command if subject.comparison is not None else "")


def _told(plan: Plan) -> str:
    from foretell.search.solve.choose import told

    return told(plan)


def _about(subject: Subject) -> Iterator[str]:
    plan, found = subject.plan, subject.comparison
    if found is None:
        yield f"on {plan.hardware}"
    else:
        yield f"on {found.hardware.get('device', plan.hardware)}"
        yield from (f"{name} {found.versions[name]}" for name in ("torch", "foretell") if name in found.versions)
        yield found.started.replace("T", " ").replace("Z", " UTC")
    yield f"{plan.mesh.world:,} ranks" if plan.mesh.world > 1 else "one rank"
    yield "predicted alone" if subject.run is None else "predicted and measured" if subject.finished else "a run that has not ended"


def _remarks(subject: Subject, said: Mapping[str, Any], detail: Detail | None, why_not: str) -> Iterator[str]:
    if subject.comparison is not None and not subject.comparison.comparable:
        yield from subject.comparison.notes[:1]
    if subject.comparison is not None and subject.comparison.busy:
        busy = subject.comparison.busy
        yield f"{busy[:1].upper()}{busy[1:]}. Its seconds are not those of a machine of its own."
    if subject.run is not None and not subject.finished:
        yield "This run has no measurement yet: it is still going, or ended before its first summary."
    if subject.run is not None and (goodput := goodput_told(subject.run)):
        yield goodput
    if why_not:
        yield f"Memory over the step, blocks and pipeline are left out: {why_not}"
    if detail is not None and detail.cost.time is not None and isinstance(said.get("step_seconds"), int | float):
        now, then = detail.cost.time.step_seconds, float(said["step_seconds"])
        if then and abs(now / then - 1) > UNLIKE:
            yield (
                f"The plan says {seconds(then)} a step; costed for this report it is {seconds(now)}, on which the charts of blocks "
                "and pipeline rest."
            )


# --- the front -------------------------------------------------------------------------------------------------------


def _letters(front: Front) -> list[tuple[str, FrontPoint]]:
    """The points that are told of, each with a short name; the chosen one first, then the fastest."""
    order = sorted(front.points, key=lambda point: (not point.chosen, not point.on_front, point.seconds is None, point.seconds or 0.0))
    names = string.ascii_uppercase if len(order) <= 26 else [str(number + 1) for number in range(len(order))]
    return list(zip(names, order, strict=False))


_AXES: tuple[tuple[str, str, str, str], ...] = (
    ("memory_bytes", "bytes", "memory", "Time and memory"), ("cost_per_step", "money", "cost", "Time and cost"),
    ("joules_per_step", "joules", "energy", "Time and energy"),
)  # fmt: skip


def _shown(value: float | None, unit: str, currency: str) -> str:
    if value is None:
        return "–"
    return size(value) if unit == "bytes" else words.money(value, currency) if unit == "money" else words.joules(value)


MILLION = 1e6


def _each(front: Front) -> tuple[str, Front]:
    """What the figures are for: a step, or a million tokens where steps differ in what they get through."""
    if len({point.per_step for point in front.points}) < 2:
        return "a step", front

    def each(point: FrontPoint) -> FrontPoint:
        def scaled(value: float | None) -> float | None:
            return value * MILLION / point.per_step if value is not None and point.per_step else None

        return replace(
            point, seconds=scaled(point.seconds), cost_per_step=scaled(point.cost_per_step), joules_per_step=scaled(point.joules_per_step)
        )

    unit = next((point.unit for point in front.points if point.unit), "tokens")
    return f"a million {unit}", replace(front, points=tuple(each(point) for point in front.points))


def _front(given: Front | None) -> Section | None:
    if given is None or not any(point.seconds is not None for point in given.points):
        return None
    what_for, front = _each(given)
    named = _letters(front)[:SHOWN]
    drawn = []
    for field, unit, what, title in _AXES:
        pairs = [(name, point) for name, point in named if point.seconds is not None and getattr(point, field) is not None]
        if not pairs:
            continue
        points = [
            {"x": point.seconds, "y": getattr(point, field), "label": name, "name": f"{name}: {point.words}", "why": point.why,
             "chosen": point.chosen, "front": point.on_front}
            for name, point in pairs
        ]  # fmt: skip
        rows = tuple(
            (Cell(text=name, mark="chosen" if point.chosen else ""), seconds(point.seconds), _shown(getattr(point, field), unit, front.currency))
            for name, point in pairs
        )
        told = "; ".join(f"{row[0].text}: {row[1]}, {row[2]}" for row in rows)
        data = {"unit": unit, "what": what, "points": points, "for": what_for}
        drawn.append(Figure(
            title=title, chart=Chart(name=f"front-{what}", kind="scatter", told=told, data=data),
            table=Table(head=("plan", "time", what), rows=rows, numbers=frozenset({1, 2}), what="Plans"),
        ))  # fmt: skip
    costed = f"{front.costed:,} plans were costed. " if front.costed else ""
    lead = (
        f"{costed}On the front are those that no other betters in time, memory, cost and energy at once; lower and further "
        f"left is better. Time, cost and energy are those of {what_for}; which plan each letter is, the table below says."
    )
    return Section(name="front", title="Alternatives considered", lead=lead, figures=tuple(drawn), columns=len(drawn) > 1)


def _others(given: Front | None) -> Section | None:
    if given is None or not (given.points or given.dropped):
        return None
    what_for, front = _each(given)
    shown = _letters(front)[:SHOWN]
    columns = [(what, field, unit) for field, unit, what, _ in _AXES if any(getattr(point, field) is not None for _, point in shown)]
    rows: list[tuple[str | Cell, ...]] = []
    for name, point in shown:
        why = "chosen" if point.chosen else point.why or _beside_chosen(point, front.chosen)
        known = (_shown(getattr(point, field), unit, front.currency) for _, field, unit in columns)
        rows.append((Cell(text=name, mark="chosen" if point.chosen else ""), point.words, seconds(point.seconds), *known, why))
    head = ("", "plan", "time", *(what for what, _, _ in columns), "why not")
    numbers = frozenset(range(2, 3 + len(columns)))
    drawn = [Figure(table=Table(head=head, rows=tuple(rows), numbers=numbers, what="Plans"))] if rows else []
    if front.dropped:
        lost = tuple((one.words, one.why) for one in front.dropped)
        drawn.append(Figure(title="Not possible", table=Table(head=("plan", "why not"), rows=lost, what="Plans that are not possible")))
    lead = f"Time, cost and energy of {what_for}." if rows else ""
    return Section(name="others", title="Why alternatives were rejected", lead=lead, figures=tuple(drawn))


def _beside_chosen(point: FrontPoint, chosen: FrontPoint | None) -> str:
    """What sets a plan apart from the chosen one, where no reason was written down."""
    if chosen is None or not point.seconds or not chosen.seconds:
        return "–"
    found = [f"{words.percent(abs(point.seconds / chosen.seconds - 1))} {'slower' if point.seconds > chosen.seconds else 'faster'}"]
    for name, what in (("memory_bytes", "memory"), ("cost_per_step", "cost"), ("joules_per_step", "energy")):
        mine, theirs = getattr(point, name), getattr(chosen, name)
        found += [f"{signed(mine / theirs - 1)} {what}"] if mine and theirs and abs(mine / theirs - 1) > UNLIKE else []
    return ", ".join([*found, "no reason was written down"] if point.seconds < chosen.seconds else found)


# --- the plan in words -----------------------------------------------------------------------------------------------


def _in_words(plan: Plan, said: Mapping[str, Any]) -> Section:
    return Section(
        name="plan", title="The plan in words", lead="", terms=tuple(_terms(plan)),
        figures=tuple(figure for figure in (_stages(plan, said), _messages(said)) if figure is not None),
    )


def _terms(plan: Plan) -> Iterator[tuple[str, str]]:
    model, mesh = plan.model, plan.mesh
    named = [str(model.get("model", "a model"))]
    named += [f"{human_count(model['parameters'])} parameters"] if isinstance(model.get("parameters"), int) else []
    named += [f"sequences of {model['seq']:,} tokens"] if isinstance(model.get("seq"), int) else []
    named += [f"{name} {value}" for name, value in dict(model.get("overrides") or {}).items()]
    yield "Model", ", ".join(named)
    yield "Hardware", plan.hardware
    axes = [axis for axis in OWN_RANKS if getattr(mesh, axis) > 1]
    if axes:
        yield "Ranks", f"{mesh.world:,} = {' × '.join(f'{axis} {getattr(mesh, axis)}' for axis in axes)}"
        for axis in axes:
            yield f"Along {axis}", f"{getattr(mesh, axis)} ranks pass on {TALK_WORDS[axis]}"
    else:
        yield "Ranks", "one: nothing is shared, nothing is sent"
    pieces = [f"micro-batch {plan.micro_batch}"]
    pieces += [f"{plan.accumulate} micro-batches a step"] if plan.accumulate > 1 else []
    pieces += [f"{mesh.data} data-parallel ranks"] if mesh.data > 1 else []
    yield "Batch", f"{plan.global_batch:,} samples a step: {' × '.join(pieces)}"
    clip = "gradients not clipped" if plan.clip is None else f"gradients clipped at norm {plan.clip:g}"
    yield "Arithmetic", f"{plan.precision}, {plan.optimizer}, {clip}"
    yield "Blocks", "; ".join(_residencies(plan)) or "the model has no repeated blocks"
    if plan.pipeline is not None and mesh.pp > 1:
        yield "Schedule", f"{plan.pipeline.schedule}: {SCHEDULE_WORDS.get(plan.pipeline.schedule, 'a schedule that is not known')}"
    ways = {"none": "not compiled", "blocks": "block by block", "model": "the whole model",
            "graphs": "the whole model, launches recorded as CUDA graphs"}  # fmt: skip
    yield "Compiling", ways.get(plan.compile, plan.compile)
    if mesh.dp_shard > 1:
        until = "given back after a block's forward" if plan.reshard is True else "held until backward" if plan.reshard is False else (
            f"held by {plan.reshard} ranks together until backward")  # fmt: skip
        yield "Gathered parameters", until
    if plan.kernels:
        yield "Kernels", ", ".join(f"{op} by {kernel}" for op, kernel in plan.kernels.items())


def _residencies(plan: Plan) -> Iterator[str]:
    """Which blocks are treated how."""
    known = known_blocks(plan)
    try:
        modes = {name: one.mode for name, one in stack.expand(plan.blocks, known).items()} if known else {}
    except UserError:
        modes = {}
    if not modes:
        yield from (f"{pattern}: {MODE_WORDS.get(one.mode, one.mode)}" for pattern, one in plan.blocks.items())
        return
    for mode in dict.fromkeys(modes.values()):
        names = [name for name, one in modes.items() if one == mode]
        which = f"all {len(names)}" if len(names) == len(modes) else f"{len(names)} ({', '.join(paths.fold_names(names))})"
        yield f"{which} {MODE_WORDS.get(mode, mode)}"


def _stages(plan: Plan, said: Mapping[str, Any]) -> Figure | None:
    known = known_blocks(plan)
    if plan.pipeline is None or plan.mesh.pp == 1 or not known:
        return None
    try:
        cut, modes = stack.stages_of(plan, known), {name: one.mode for name, one in stack.expand(plan.blocks, known).items()}
    except UserError:
        return None
    used = said.get("memory_bytes_by_rank")
    told = sizes(used) if isinstance(used, list | tuple) else []
    rows = []
    for stage, names in enumerate(cut):
        rank = stack.rank_of_stage(plan, stage)
        kept = ", ".join(f"{len(list(run))} {figures.MODES.get(mode, mode)}" for mode, run in groupby(modes[name] for name in names))
        held = told[rank] if rank < len(told) else "–"
        rows.append((str(stage), str(rank), ", ".join(paths.fold_names(names)) or "none", kept or "–", held))
    head = ("stage", "rank", "blocks", "activations", "memory of the rank")
    return Figure(title="Stages", table=Table(head=head, rows=tuple(rows), numbers=frozenset({4}), what="Stages"))


def _messages(said: Mapping[str, Any]) -> Figure | None:
    known = said.get("collectives")
    sent = [one for one in known if isinstance(one, Mapping)] if isinstance(known, list | tuple) else []
    rows = []
    for one in sorted(sent, key=lambda each: -int(each.get("nbytes", 0)) * int(each.get("times", 0)))[:10]:
        times, nbytes = int(one.get("times", 0)), int(one.get("nbytes", 0))
        who = (str(one.get("name", "")), str(one.get("axis", "")), f"{int(one.get('ranks', 0)):,}")
        rows.append((*who, f"{times:,}", size(nbytes), size(times * nbytes)))
    head = ("message", "along", "ranks", "times a step", "bytes each", "total")
    title = "What one rank sends in a step" + (", the largest first" if len(sent) > len(rows) else "")
    return Figure(title=title, table=Table(head=head, rows=tuple(rows), numbers=frozenset({2, 3, 4, 5}))) if rows else None


# --- again -----------------------------------------------------------------------------------------------------------


def _repeat(subject: Subject, files: Sequence[tuple[str, str]]) -> Section:
    code: list[tuple[str, str]] = []
    plan_path = shlex.quote(str(subject.plan_path))
    if _started(subject):
        code.append(("The run, as it was started", _started(subject)))
    code.append(("A plan like this one", _plan_command(subject.plan)))
    runs = "plan eject" if is_script(str(subject.plan.model.get("model", ""))) else "run"
    again = [f"foretell plan show {plan_path}", f"foretell {runs} {plan_path}"]
    again += [f"foretell compare {shlex.quote(str(subject.run))}"] if subject.run is not None else []
    code.append(("With the plan file", "\n".join([*again, f"foretell report {shlex.quote(str(subject.path))}"])))
    code.append(("The plan file itself", plans.text_of(subject.plan).rstrip()))
    if subject.settings:
        code.append(("Settings of the run", json.dumps(subject.settings, indent=2)))
    found = subject.comparison
    terms = [("Machine", _machine(found.hardware))] if found is not None else []
    terms += [("Versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))] if found is not None else []
    return Section(name="repeat", title="How to repeat it", lead="", terms=tuple(terms), code=tuple(code), links=tuple(files))


def _machine(hardware: Mapping[str, Any]) -> str:
    count = int(hardware.get("count", 1))
    threads = f", {hardware['threads']} threads each" if hardware.get("threads") else ""
    return f"{hardware.get('device', '')}, {count} {'rank' if count == 1 else 'ranks'}{threads}"


def _plan_command(plan: Plan) -> str:
    model = plan.model
    if is_script(str(model.get("model", ""))):
        command = str(model["model"]).partition(":")[2]
        return f"{shlex.join(['foretell', 'plan', '--on', plan.hardware, '--global-batch', str(plan.global_batch), '--'])} {command}"
    said = ["foretell", "plan", str(model.get("model", "MODEL")), "--on", plan.hardware, "--global-batch", str(plan.global_batch)]
    for name in ("seq", "image", "loss"):
        said += [f"--{name}", str(model[name])] if model.get(name) is not None else []
    for name, value in dict(model.get("overrides") or {}).items():
        said += ["--set", f"{name}={value}"]
    said += ["--precision", plan.precision, "--optimizer", plan.optimizer]
    return shlex.join(said)


def _notes(subject: Subject, detail: Detail | None, money: html_summary.Money) -> Section | None:
    found = [*subject.plan.notes]
    found += list(subject.comparison.notes) if subject.comparison is not None and subject.comparison.comparable else []
    found += [*detail.cost.notes, *detail.notes] if detail is not None else []
    found += [f"price: {words.money(money.told.per_hour, money.told.currency)} an hour in all; {money.told.source}"] if money.told is not None else []
    if detail is not None:
        how = detail.cost.worst.memory.provenance
        found += [f"{name.removesuffix('_bytes')} bytes are {how[name]}" for name in how if name != "capacity_bytes"]
    told = tuple(dict.fromkeys(note for note in found if note))
    return Section(name="known", title="Data sources", lead="", items=told) if told else None


