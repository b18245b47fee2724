"""A plan for people: what it says in words, and a drawing of its mesh, stages and blocks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from foretell.errors import UserError
from foretell.plan import blocks as stack
from foretell.plan import file, paths
from foretell.plan.facts import Complaint, Facts
from foretell.plan.legal import launch
from foretell.plan.mesh import OWN_RANKS, groups, sharing, sharing_experts
from foretell.plan.recipe import known_blocks
from foretell.plan.text import shell_word
from foretell.plan.types import Mesh, Plan
from foretell.report import words
from foretell.report.terminal import bar
from foretell.trace.load.model import is_script
from foretell.trace.recipe import adapters_told, changes_training, sync_told
from foretell.units import gib, human_bytes, human_count

GUTTER = 11
MIN_WIDTH = 40
LOOKS = {"keep": ("█", "#", "green"), "recompute": ("▒", "r", "yellow"), "selective": ("▓", "s", "cyan"),
         "host": ("░", "h", "blue"), "disk": ("╌", "d", "magenta"), "recompute-host": ("▚", "R", "blue")}  # fmt: skip
"""Mode of a block → the character that shows it, the same in ASCII, its colour."""
_ASCII = bar.ASCII | str.maketrans({look[0]: look[1] for look in LOOKS.values()})
MODE_WORDS = {
    "keep": "kept until backward", "recompute": "computed again in backward",
    "selective": "products and attention kept, the rest computed again",
    "host": "moved to host memory until backward", "disk": "moved to disk until backward",
    "recompute-host": "computed again in backward from inputs in host memory",
}  # fmt: skip
_BRACKETS = {"dp_replicate": ("", ""), "dp_shard": ("(", ")"), "cp": ("{", "}"), "tp": ("[", "]")}
_SHARED = {"dp_shard": "parameters and states (dp_shard)", "cp": "a sequence (cp)", "tp": "every product (tp)"}
TALK_WORDS = {
    "tp": "activations, in every block, forward and backward",
    "cp": "keys and values, in every block",
    "ep": "rows to their experts and back, in every layer that has them",
    "dp_shard": "parameters of a block before it runs, its gradients in backward",
    "dp_replicate": "gradients, once a step",
    "pp": "activations of every micro-batch to the next stage, gradients back",
}
SCHEDULE_WORDS = {
    "gpipe": "all micro-batches forward, then all backward",
    "1f1b": "one forward, one backward in turn",
    "interleaved-1f1b": "one forward, one backward in turn; stages go around the ranks in a loop",
    "zero-bubble": "gradients of weights fill the waiting",
    "zero-bubble-v": "gradients of weights fill the waiting; stages go down the ranks and back up",
}
_ROWS, _RANKS, _RUNS = 8, 4, 12
_WITH_CP = "dp_shard × cp"
_GLUE = "\u00a0"
"""Keeps two words on one line."""


def render(
    plan: Plan, complaints: Sequence[Complaint] = (), facts: Facts | None = None, width: int = 80, *,
    path: str = "PLAN", ascii_only: bool = False,
) -> Text:  # fmt: skip
    """The whole page; `facts` say which ranks share a node, `path` is what the plan was read from."""
    width = max(width, MIN_WIDTH)
    facts = facts or Facts()
    sections = [
        _head(plan, width), _refusals(complaints, width), _mesh(plan.mesh, width), _talk(plan, facts, width),
        _stages(plan, width), _predicted(plan, width), _notes(plan.notes, width), _next(plan, complaints, facts, path),
    ]  # fmt: skip
    lines = [line for section in sections if section for line in (*section, Text())][:-1]
    for line in lines:
        line.rstrip()
        if ascii_only:
            line.plain = line.plain.translate(_ASCII)
    return Text("\n").join(lines)


def content(plan: Plan, complaints: Sequence[Complaint] = ()) -> dict[str, Any]:
    """The same for programs."""
    known = known_blocks(plan)
    mesh = {axis: getattr(plan.mesh, axis) for axis in OWN_RANKS}
    return {
        "plan": file.to_json(plan),
        "runs": not complaints,
        "complaints": [{"field": one.field, "problem": one.problem, "remedy": one.remedy} for one in complaints],
        "world": plan.mesh.world,
        "global_batch": plan.global_batch,
        "tokens_per_step": _tokens(plan),
        "groups": {axis: groups(plan.mesh, axis) for axis, degree in mesh.items() if degree > 1}
        | ({"ep": sharing_experts(plan.mesh)} if plan.mesh.ep > 1 else {}),
        "stages": _stage_rows(plan, known) if known is not None else None,
    }


def _stage_rows(plan: Plan, known: Sequence[str]) -> list[dict[str, Any]] | None:
    try:
        stages, residency = stack.stages_of(plan, known), stack.expand(plan.blocks, known)
    except UserError:  # told among the complaints
        return None
    return [
        {
            "stage": stage,
            "rank": stack.rank_of_stage(plan, stage),
            "blocks": {name: residency[name].mode for name in names},
        }
        for stage, names in enumerate(stages)
    ]


# --- words -----------------------------------------------------------------------------------------------------------


def _head(plan: Plan, width: int) -> list[Text]:
    mesh = plan.mesh
    axes = [f"{axis}{_GLUE}{getattr(mesh, axis)}" for axis in OWN_RANKS if getattr(mesh, axis) > 1]
    ranks = f"{_counted(mesh.world, 'rank')} = {' × '.join(axes)}" if axes else "one rank"
    ranks += f", experts shared by {mesh.ep} (ep)" if mesh.ep > 1 else ""
    name = _clean(str(plan.model.get("model", "a model")).removeprefix("script:"))
    title = _folded(f"{name} on {_clean(plan.hardware)}: {ranks}", width)
    more = [line for text in (_batch(plan), _ways(plan)) for line in _folded(text, width - 2)]
    return [Text(line.replace(_GLUE, " "), "bold") for line in title] + [Text(f"  {line}", "dim") for line in more]


def _batch(plan: Plan) -> str:
    """`micro-batch 4 × 1,024 tokens, 8 accumulated, 2 data ranks: 64 samples or 65,536 tokens a step`."""
    seq, image, parameters = (plan.model.get(name) for name in ("seq", "image", "parameters"))
    size = f" × {seq:,} tokens" if seq else f" × {image}×{image} pixels" if image else ""
    pieces = [f"micro-batch {plan.micro_batch}{size}"]
    if plan.accumulate > 1:
        pieces.append(f"{plan.accumulate} accumulated")
    if plan.mesh.data > 1:
        pieces.append(_counted(plan.mesh.data, "data rank"))
    many = _tokens(plan)
    tokens = f" or {many:,} tokens" if many else ""
    samples = _counted(plan.global_batch, "sample")
    count = f"{human_count(parameters)} parameters; " if parameters else ""
    return f"{count}{', '.join(pieces)}: {samples}{tokens} a step"


def _tokens(plan: Plan) -> int | None:
    """Tokens of one step: as the plan's length says, else as was predicted."""
    seq, predicted = plan.model.get("seq"), plan.predicted.get("tokens_per_step")
    return plan.global_batch * seq if isinstance(seq, int) else predicted if isinstance(predicted, int) else None


def _ways(plan: Plan) -> str:
    compiled = {"none": "not compiled", "blocks": "compiled block by block", "model": "compiled whole",
                "graphs": "compiled whole, launches recorded as CUDA graphs"}
    clip = "gradients not clipped" if plan.clip is None else f"gradients clipped at norm {plan.clip:g}"
    pieces = [plan.precision, plan.optimizer, clip, compiled.get(plan.compile, f"compile {plan.compile}")]
    if plan.adapters is not None:
        pieces.append(_clean(adapters_told(plan.adapters, plan.base)))
    if plan.loss_chunks > 1:
        pieces.append(f"output layer and loss in {plan.loss_chunks} chunks of the tokens")
    if plan.sync is not None:
        pieces.append(f"replicas joined {sync_told(plan.sync)}: {changes_training(plan.sync)}")
    if plan.states:
        by_cpu = f", {plan.cpu_share:.0%} of them updated by the CPU" if plan.cpu_share else ""
        for tier, where in (("host", f"in host memory{by_cpu}"), ("disk", "on disk")):
            away = ", ".join(pattern for pattern, one in plan.states.items() if one == tier)
            pieces += [f"optimizer states of {away} {where}"] if away else []
    if plan.weights:
        away = ", ".join(pattern for pattern, tier in plan.weights.items() if tier == "host")
        pieces.append(f"weights of {away} in host memory, on the device while they are used")
    if plan.state_format != "fp32":
        pieces.append(f"states in format {plan.state_format}")
    if plan.mesh.dp_shard > 1 and plan.reshard is not True:
        held = "held until backward" if plan.reshard is False else f"shared by {plan.reshard} ranks until backward"
        pieces.append(f"gathered parameters {held}")
    if plan.mesh.tp > 1 and plan.split is not None:
        rules = f"{len(plan.split.rules)} rules given" if plan.split.rules else "split as the dataflow says"
        off = [f"{name} not split" for name in ("sequence", "loss") if not getattr(plan.split, name)]
        pieces += [rules, *off]
    return ", ".join([*pieces, *(f"{op} by {kernel}" for op, kernel in plan.kernels.items())])


def _refusals(complaints: Sequence[Complaint], width: int) -> list[Text]:
    lines = []
    for complaint in complaints:
        first, *more = textwrap.wrap(
            _clean(f"{complaint.field}: {complaint.problem}; try: {complaint.remedy}"), width - GUTTER
        )
        lines += [Text.assemble((f"{'REFUSED':<{GUTTER}}", "bold red"), first), *(_labelled("", line) for line in more)]
    return lines


def _talk(plan: Plan, facts: Facts, width: int) -> list[Text]:
    """Who sends what to whom: one group of each axis, and how far it reaches."""
    rows = []
    for axis, members in _groups(plan.mesh).items():
        which = f"{_WITH_CP if axis == 'dp_shard' and plan.mesh.cp > 1 else axis} {_few(members[0])}"
        which += f" and {len(members) - 1} more" if len(members) > 1 else ""
        sent = _sent(plan, axis)
        said = TALK_WORDS[axis] if plan.sync is None or axis != "dp_replicate" else f"how far each has come, every {plan.sync.every} steps"
        pieces = [said, f"{human_bytes(sent)} of messages a step" if sent else "", _reach(members, facts)]
        rows.append((which, "; ".join(piece for piece in pieces if piece)))
    if not rows:
        return []
    lead = max(len(which) for which, _ in rows) + 2
    lines: list[Text] = []
    for which, what in rows:
        label = "talk" if not lines else ""
        if width - GUTTER - lead < 30:
            told = [*_folded(which, width - GUTTER), *_folded(what, width - GUTTER, "  ")]
        else:
            first, *more = _folded(what, width - GUTTER - lead)
            told = [f"{which:<{lead}}{first}", *(" " * lead + line for line in more)]
        lines += [_labelled(label if not index else "", line) for index, line in enumerate(told)]
    return lines


def _groups(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Axis → groups of ranks that talk along it, the innermost first; parameters are shared along dp_shard and cp."""
    found = {"ep": sharing_experts(mesh)} if mesh.ep > 1 else {}
    for axis in reversed(OWN_RANKS):
        if axis == "dp_shard" and mesh.cp > 1:
            found[axis] = sharing(mesh)
        elif getattr(mesh, axis) > 1:
            found[axis] = groups(mesh, axis)
    return found


def _sent(plan: Plan, axis: str) -> int:
    """Bytes that one rank is predicted to send along an axis in a step."""
    known = plan.predicted.get("collectives")
    messages = [one for one in known if isinstance(one, Mapping)] if isinstance(known, list | tuple) else []
    return sum(int(one.get("nbytes", 0)) * int(one.get("times", 0)) for one in messages if one.get("axis") == axis)


def _reach(members: Sequence[Sequence[int]], facts: Facts) -> str:
    size, devices = facts.devices_per_node, facts.devices
    if not size or not devices or devices <= size:
        return ""
    inside = all(len({rank // size for rank in group}) == 1 for group in members)
    return "inside a node" if inside else "between nodes"


def _predicted(plan: Plan, width: int) -> list[Text]:
    known = plan.predicted
    amount = {
        name: value for name, value in known.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    source = known.get("provenance")
    how = source if isinstance(source, Mapping) else {}
    told = []
    if "step_seconds" in amount:
        step = amount["step_seconds"]
        text = words.step_span(step, amount.get("low_seconds", step), amount.get("high_seconds", step))
        rate = next((f", {words.number(amount[name])} {name.partition('_')[0]} a second"
                     for name in ("tokens_per_second", "samples_per_second") if name in amount), "")  # fmt: skip
        told.append(f"{text} a step{rate}; {_known(how, 'time')}")
    if "memory_bytes" in amount:
        room = f" of {gib(amount['capacity_bytes'])}" if "capacity_bytes" in amount else ""
        verdict = f"{_clean(str(known['verdict']))}: " if known.get("verdict") else ""
        worst = "on the worst rank" if plan.mesh.world > 1 else "on the device"
        told.append(f"{verdict}{gib(amount['memory_bytes'])}{room} {worst}; {_known(how, 'memory')}")
    if isinstance(known.get("sync"), Mapping):
        told.append(words.rounds(known["sync"]))
    told = told or ["nothing: this plan was not costed"]
    return _wrapped("predicted", told, width)


def _known(how: Mapping[str, Any], what: str) -> str:
    return _clean(str(how[what])) if how.get(what) else "how that is known is not said"


def _notes(notes: Sequence[str], width: int) -> list[Text]:
    return _wrapped("notes", [f"- {_clean(note)}" for note in notes], width)


def _next(plan: Plan, complaints: Sequence[Complaint], facts: Facts, path: str) -> list[Text]:
    if complaints:
        return []
    if is_script(str(plan.model.get("model", ""))):
        return [_labelled("next", f"foretell plan eject {shell_word(path)}", "bold cyan")]
    return [_labelled("next", launch(plan, facts.devices_per_node, f"run {shell_word(path)}"), "bold cyan")]


# --- drawings --------------------------------------------------------------------------------------------------------


def _mesh(mesh: Mesh, width: int) -> list[Text]:
    """A line for each rank of the pipeline axis; brackets around ranks that share something."""
    if mesh.world == 1:
        return []
    axes = [axis for axis in _BRACKETS if getattr(mesh, axis) > 1]
    room = width - GUTTER
    each = mesh.world // mesh.pp
    rows = [Text(_cut(_nested(mesh, axes, row * each), room)) for row in range(mesh.pp)]
    labels = [f"  pp {row}" if mesh.pp > 1 else "" for row in range(mesh.pp)]
    lines = [
        Text.assemble((f"{label:<{GUTTER}}", "bright_black"), row) for label, row in zip(labels, rows, strict=True)
    ]
    if len(lines) > _ROWS:
        lines[_ROWS - 2 : -1] = [Text(f"  … {len(lines) - _ROWS + 1} more")]
    shared = [f"in {_GLUE.join(_BRACKETS[axis])} {_SHARED[axis]}" for axis in axes if axis in _SHARED]
    copies = "each rank is a place in the pipeline" if mesh.pp > 1 else "each rank has a copy of the model"
    legend = f"ranks share {', '.join(shared)}" if shared else copies
    return [*_wrapped("mesh", [legend], width), *lines]


def _nested(mesh: Mesh, axes: Sequence[str], first: int) -> str:
    """Ranks from `first` on, in the brackets of their axes, outermost first."""
    if not axes:
        return str(first)
    axis, inner = axes[0], axes[1:]
    opening, closing = _BRACKETS[axis]
    degree = getattr(mesh, axis)
    if not inner:
        return f"{opening}{_few(range(first, first + degree))}{closing}"
    stride = 1
    for other in inner:
        stride *= getattr(mesh, other)
    parts = [_nested(mesh, inner, first + index * stride) for index in range(degree)]
    return f"{opening}{('  ' if not opening else ' ').join(parts)}{closing}"


def _few(ranks: Sequence[int]) -> str:
    """`0 1 2 3`, `0-7` where they follow each other, `0 8 … 56` where they do not."""
    if len(ranks) <= _RANKS:
        return " ".join(map(str, ranks))
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return f"{ranks[0]} {ranks[1]} … {ranks[-1]}"


def _cut(text: str, room: int) -> str:
    """The beginning and the end of a line that is too long, broken at spaces; the end alone where no more fits."""
    if len(text) <= room:
        return text
    parts = text.split(" ")
    end, shown = parts[-1], ""
    for part in parts[:-1]:
        if len(shown) + len(part) + len(end) + 3 > room:
            break
        shown += f"{part} "
    whole = f"{shown.rstrip()} … {end}".lstrip()
    return whole if len(whole) <= room else f"…{text[len(text) - max(1, room - 1) :]}"


def _stages(plan: Plan, width: int) -> list[Text]:
    """Which stage has which blocks, and how each block is kept."""
    known = known_blocks(plan)
    rows = _stage_rows(plan, known) if known else None
    label = "stages" if plan.pipeline is not None and plan.pipeline.cuts else "blocks"
    lines = _wrapped(label, _schedule(plan), width) if label == "stages" else []
    if rows is None:
        return lines + _wrapped("" if lines else label, _unknown_blocks(plan), width)
    shown = {mode for row in rows for mode in row["blocks"].values()}
    piped = label == "stages"
    digits = [max(len(str(row[name])) for row in rows) for name in ("rank", "stage")]
    leads = [
        f"  pp {row['rank']:<{digits[0]}} stage {row['stage']:<{digits[1]}}  " if piped else f"{label:<{GUTTER}}"
        for row in rows
    ]
    cells = [_cells(list(row["blocks"].values()), width - len(leads[0])) for row in rows]
    wide = max(text.cell_len for text in cells)
    for index, (row, lead, text) in enumerate(zip(rows, leads, cells, strict=True)):
        ends = (["start"] * (piped and index == 0), ["end"] * (piped and index == len(rows) - 1))
        names = _cut(", ".join([*ends[0], *paths.fold_names(row["blocks"]), *ends[1]]), width - len(lead) - wide - 2)
        lines.append(Text.assemble((lead, "bright_black"), text, " " * (wide - text.cell_len + 2), names))
    told = [f"{LOOKS[mode][0]} {MODE_WORDS[mode]}" for mode in LOOKS if mode in shown]
    told += ["start and end: what runs before and after the blocks"] * piped
    return lines + _wrapped("", ["; ".join(told)], width)


def _cells(modes: Sequence[str], room: int) -> Text:
    """One character a block; where these are too many, how many of each follow each other."""
    text = Text()
    for index, (mode, run) in enumerate(groupby(modes)):
        cell, count = LOOKS[mode], len(list(run))
        if len(modes) <= room // 2:
            text.append(cell[0] * count, cell[2])
        elif index < _RUNS:
            text.append(f"{' ' if index else ''}{count}{cell[0]}", cell[2])
    return text.append(" …") if len(modes) > room // 2 and len(list(groupby(modes))) > _RUNS else text


def _schedule(plan: Plan) -> list[str]:
    assert plan.pipeline is not None
    name, ranks, micro = plan.pipeline.schedule, plan.mesh.pp, plan.accumulate
    told = [f"{name}: {SCHEDULE_WORDS.get(name, 'a schedule that is not known')}; {_counted(micro, 'micro-batch')}"]
    known = plan.predicted.get("bubble")
    if isinstance(known, float | int) and not isinstance(known, bool):
        told.append(f"a rank waits {words.percent(known)} of the step for other stages, as predicted")
    elif name in ("gpipe", "1f1b", "interleaved-1f1b"):
        each = plan.pipeline.stages // ranks or 1
        share = (ranks - 1) / (each * micro + ranks - 1)
        told.append(f"a rank waits {words.percent(share)} of the step for other stages, if all take equally long")
    if name in ("gpipe", "1f1b") and ranks > 1:
        held = micro if name == "gpipe" else min(micro, ranks)
        last = held if name == "gpipe" else 1
        told.append(f"pp 0 holds up to {_counted(held, 'micro-batch')} at a time, the last stage {last}")
    return told


def _unknown_blocks(plan: Plan) -> list[str]:
    """What the plan says of blocks where these are not known, or where it is wrong about them."""
    told = [f"{pattern}: {MODE_WORDS.get(residency.mode, residency.mode)}" for pattern, residency in plan.blocks.items()]
    if plan.pipeline is not None and plan.pipeline.cuts:
        told.insert(0, f"a stage begins at {', '.join(plan.pipeline.cuts)}")
    if plan.model.get("blocks") is None:
        told.append("which blocks the model has, the plan does not say")
    return told or ["the model has no repeated blocks"]


# --- lines -----------------------------------------------------------------------------------------------------------


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{GUTTER}}", "bright_black" if label else ""), (text, style))


def _wrapped(label: str, sentences: Sequence[str], width: int) -> list[Text]:
    lines = [line for sentence in sentences for line in _folded(sentence, width - GUTTER)]
    return [_labelled(label if not index else "", line.replace(_GLUE, " ")) for index, line in enumerate(lines)]


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, initial_indent=indent, subsequent_indent=indent)


def _counted(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _clean(text: str) -> str:
    """One line without control characters, whatever a name or note holds."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
