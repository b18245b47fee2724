"""The answer on a terminal: the verdict first, at most 30 lines from 80 columns on, readable without colour from 40; nothing is cut off."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from foretell.plan.precision import shown
from foretell.quantities import FITS, NO, TIGHT, Holder, Prediction, Remedy
from foretell.report import command
from foretell.report import words as told
from foretell.report.terminal import bar, seconds
from foretell.trace.recipe import ADAPTED, Adapters, Sync, adapters_told, changes_training, sync_told
from foretell.units import GIB, gib, human_bytes, human_count

MAX_LINES = 30
MIN_WIDTH = 40
ADVICE_LINES = 10
"""Of those, for what would help."""

_GUTTER = seconds.GUTTER
"""Columns for the name of a section, left of its lines."""
_VERDICTS = {FITS: ("FITS", "bold green"), TIGHT: ("TIGHT", "bold yellow"), NO: ("DOES NOT FIT", "bold red")}
_UNKNOWN = ("CANNOT TELL", "bold magenta")
_ROOM = (
    (5, 5, True, seconds.BAR), (5, 5, True, seconds.FULL), (4, 5, True, seconds.FULL), (4, 4, True, seconds.FULL),
    (3, 4, True, seconds.FULL), (3, 3, True, seconds.FULL), (2, 3, True, seconds.FULL), (3, 3, False, seconds.FULL),
    (2, 2, False, seconds.FULL), (1, 1, False, seconds.FULL), (1, 1, False, seconds.PLAIN), (1, 1, False, seconds.BRIEF),
)  # fmt: skip
"""Holders, lines of assumptions, blank lines between sections and what is told of time, from generous to sparse."""
_ALL = (1000, 1000, True, seconds.BAR)


def render(prediction: Prediction, width: int = 80, *, typed: Sequence[str] = (), ascii_only: bool = False, verbose: bool = False) -> Text:
    """The whole screen; `typed` are the words after `foretell` that asked for it, from which the next command is made."""
    width = max(width, MIN_WIDTH)
    below = _below(prediction, width, typed, ADVICE_LINES)
    return _drawn(_filled(prediction, width, MAX_LINES, below, verbose=verbose), ascii_only)


def answer(prediction: Prediction, width: int = 80, *, ascii_only: bool = False, verbose: bool = False) -> Text:
    """The screen without advice, which is not there yet: room is left for it."""
    return _drawn(_filled(prediction, max(width, MIN_WIDTH), MAX_LINES - ADVICE_LINES, verbose=verbose), ascii_only)


def advice(prediction: Prediction, width: int = 80, *, typed: Sequence[str] = (), ascii_only: bool = False) -> Text:
    """What comes below it."""
    return _drawn(_joined(_below(prediction, max(width, MIN_WIDTH), typed, ADVICE_LINES), False, max(width, MIN_WIDTH)), ascii_only)


def _filled(prediction: Prediction, width: int, room: int, below: Sequence[list[Text]] = (), *, verbose: bool = False) -> list[Text]:
    """The answer and what comes below it, as generous as so many lines allow; all of it where `verbose`."""
    lines: list[Text] = []
    for holders, assumptions, blanks, detail in (_ALL,) if verbose else _ROOM:
        sections = [
            _head(prediction, width),
            _bar(prediction, width),
            _numbers(prediction, width),
            seconds.lines(prediction, width, detail),
            _holders(prediction.memory.holders[:holders], width),
            _assumptions(prediction.assumptions, width, assumptions),
            *below,
        ]
        lines = _joined([section for section in sections if section], blanks, width)
        if len(lines) <= room:
            break
    return lines


def _below(prediction: Prediction, width: int, typed: Sequence[str], room: int) -> list[list[Text]]:
    """What would help, as many ways as so many lines allow, and what to type next."""
    after, shown = _next(prediction, width, typed), prediction.remedies[: command.SHOWN]
    while len(shown) > 1 and len(_remedies(shown, width)) + len(after) > room:
        shown = shown[:-1]
    return [_remedies(shown, width), after]


def _drawn(lines: list[Text], ascii_only: bool) -> Text:
    for line in lines:
        line.rstrip()
        if ascii_only:
            line.plain = line.plain.translate(bar.ASCII)
    return Text("\n").join(lines)


def _joined(sections: list[list[Text]], blanks: bool, width: int) -> list[Text]:
    lines: list[Text] = []
    for section in sections:
        if lines and blanks:
            lines.append(Text())
        lines += [part for line in section for part in _folded(line, width)]
    return lines


def _folded(line: Text, width: int) -> list[Text]:
    """A line that is too wide for a narrow screen, in as many as it takes."""
    if line.cell_len <= width:
        return [line]
    return [Text(part) for part in textwrap.wrap(line.plain, width, subsequent_indent=" " * _GUTTER)]


# --- sections --------------------------------------------------------------------------------------------------------


def _head(prediction: Prediction, width: int) -> list[Text]:
    """The verdict, then what was asked."""
    label, style = _VERDICTS.get(prediction.verdict, _UNKNOWN)
    name = _clean(command.model_name(prediction))
    place = f" on {_clean(command.hardware_spec(prediction, ' '))}:"
    subject = _end(name, width - len(label) - 2 - len(place)) + place
    sentence = _amounts(prediction)
    head = Text.assemble((label, style), "  ", (subject, "bold"))
    if head.cell_len + 1 + len(sentence) <= width:
        lines = [head + Text(f" {sentence}")]
    else:
        lines = [head, *(Text(f"  {line}") for line in textwrap.wrap(sentence, width - 2))]
    lines += [Text(f"  {line}", "dim") for line in textwrap.wrap(asked(prediction), width - 2, break_on_hyphens=False)[:3]]
    return lines + [Text(f"  {line}", "yellow") for line in textwrap.wrap(_rounds(prediction), width - 2)]


def _rounds(prediction: Prediction) -> str:
    """Of replicas that step alone: what that changes, and what joining them takes; empty for others."""
    recipe = prediction.model.get("recipe")
    sync = recipe.get("sync") if isinstance(recipe, Mapping) else None
    if not isinstance(sync, Mapping):
        return ""
    return f"{changes_training(Sync.from_json(sync))}; {told.rounds(prediction.rounds)}"


def _amounts(prediction: Prediction) -> str:
    """`61.3 of 79.1 GiB per device, 17.8 GiB spare`."""
    memory = prediction.memory
    high = _band(memory.bands, "device")[1]
    each = " per device" if command.device_count(prediction) > 1 else ""
    margin = memory.margin_bytes
    used = _span(memory.device_bytes, memory.capacity_bytes, " of ")
    text = f"{used}{each}, {_size(abs(margin))} {'spare' if margin >= 0 else 'short'}"
    wanted = max((phase.device_bytes for phase in memory.phases), default=0)
    if prediction.verdict == TIGHT and wanted > memory.device_bytes:
        return f"{used}{each} by freeing cached memory, {_size(wanted)} otherwise"
    if prediction.verdict == TIGHT:
        reach = f"may need up to {_size(high)}" if high is not None else "within the uncertainty of this prediction"
        return f"{text}; {reach}"
    if prediction.verdict == NO and margin >= 0 and high is not None:
        return f"{text}, but may need {_size(high)}"
    return text


def asked(prediction: Prediction) -> str:
    """`8.03B parameters; micro-batch 1 × 8192 tokens; adamw-fused, bf16-mixed, recompute none`."""
    recipe, trained = prediction.model.get("recipe"), prediction.model.get("trainable")
    pieces = [f"{human_count(prediction.parameters)} parameters"]
    if isinstance(recipe, Mapping) and recipe.get("lora") and isinstance(trained, int):
        pieces = [f"{human_count(prediction.parameters - trained)} parameters and {human_count(trained)} in adapters"]
    description = _clean(str(prediction.model.get("description", "")))
    pieces.append(description.removeprefix(_clean(command.model_name(prediction))).lstrip(", "))
    if isinstance(recipe, Mapping):
        pieces.append(_recipe(recipe))
    return "; ".join(piece for piece in pieces if piece)


def _recipe(recipe: Mapping[str, Any]) -> str:
    words = [str(recipe["optimizer"])] if recipe.get("optimizer") else []
    words += [shown(str(recipe["precision"]))] if recipe.get("precision") else []
    if recipe.get("mode") == "infer":
        words = ["inference", *words[1:]]
    elif recipe.get("recompute"):
        words.append(f"recompute {recipe['recompute']}")
    if recipe.get("loss_chunks", 1) != 1:
        words.append(f"loss in {recipe['loss_chunks']} chunks")
    if recipe.get("kernels"):
        words.append(f"{', '.join(map(str, recipe['kernels']))} by foretell's kernels")
    if isinstance(recipe.get("sync"), Mapping):
        words.append(f"{recipe.get('replicas', 1)} replicas joined {_clean(sync_told(Sync.from_json(recipe['sync'])))}")
    how = recipe.get("compile")
    if how and how != "none":
        words.append({"blocks": "torch.compile of each block", "graphs": "torch.compile with CUDA graphs"}.get(how, "torch.compile"))
    if recipe.get("accumulate", 1) != 1:
        words.append(f"{recipe['accumulate']} micro-batches a step")
    if recipe.get("lora"):
        own, base = recipe.get("adapters"), dict(recipe.get("base") or ([(ADAPTED, "nf4")] if recipe.get("nf4") and recipe.get("adapters") else ()))
        plain = f"LoRA rank {recipe['lora']}" + (" on a 4-bit base" if recipe.get("nf4") else "")
        words.append(_clean(adapters_told(Adapters.from_json(own or {"rank": recipe["lora"]}), base)) if own or base else plain)
    if recipe.get("freeze"):
        words.append(f"frozen: {' '.join(map(str, recipe['freeze']))}")
    return ", ".join(words)


def _bar(prediction: Prediction, width: int) -> list[Text]:
    """The bar, a mark where the memory ends if it is exceeded, and the legend."""
    memory = prediction.memory
    found = bar.parts(memory)
    counts = bar.cells([part.bytes for part in found], width)
    lines = [Text().join(Text(part.mark * count, part.style) for part, count in zip(found, counts, strict=True))]
    if memory.device_bytes > memory.capacity_bytes:
        lines.append(_limit(memory.capacity_bytes, memory.device_bytes, width))
    return lines + _legend(prediction, found, width)


def _limit(capacity: int, used: int, width: int) -> Text:
    column = min(width - 1, capacity * width // used)
    told = f"memory limit: {_size(capacity)}"
    if column + 2 + len(told) <= width:
        return Text(f"{' ' * column}▲ {told}", "red")
    return Text(f"{told} ▲".rjust(column + 1) if column + 1 >= len(told) + 2 else f"{' ' * column}▲", "red")


def _legend(prediction: Prediction, found: list[bar.BarPart], width: int) -> list[Text]:
    name, scale = bar.unit(prediction.memory)
    entries = [(part, f"{part.name} {bar.number(part.bytes, scale)}{f' {name}' if part is found[-1] else ''}") for part in found]
    lines, line = [], Text()
    for part, words in entries:
        if line.cell_len and line.cell_len + 4 + len(words) > width:
            lines.append(line)
            line = Text()
        line.append("  " if line.cell_len else "").append(part.mark, part.style).append(f" {words}")
    return [*lines, line]


def _numbers(prediction: Prediction, width: int) -> list[Text]:
    """Allocated, reserved and device: the peak, the range it is expected in, how it is known."""
    memory = prediction.memory
    rows = []
    for name in ("allocated", "reserved", "device"):
        low, high = _band(memory.bands, name)
        band = _span(low, high) if low is not None and high is not None else ""
        known = memory.provenance.get(f"{name}_bytes", memory.provenance.get(name, ""))
        rows.append((name, _size(getattr(memory, f"{name}_bytes")), band, _clean(known.partition(":")[0])))
    peak = max(memory.phases, key=lambda phase: phase.device_bytes, default=None)
    size_width = max(len(row[1]) for row in rows)
    band_width = max(len(row[2]) for row in rows)
    lines = [
        _labelled(name, f"{size:>{size_width}}  {band:<{band_width}}  {known}") for name, size, band, known in rows
    ]
    told = f"; highest in {peak.name}" if peak is not None else ""
    if lines[-1].cell_len + len(told) <= width:
        lines[-1].append(told)
    return lines


def _holders(holders: Sequence[Holder], width: int) -> list[Text]:
    if not holders:
        return []
    sizes = [_size(holder.bytes) for holder in holders]
    wide = max(map(len, sizes))
    kind = max(len(holder.category) for holder in holders)
    lines = []
    for number, (holder, size) in enumerate(zip(holders, sizes, strict=True)):
        start = f"{size:>{wide}}  {holder.category:<{kind}}  "
        lines.append(_labelled("largest" if not number else "", start + _end(_clean(holder.name), width - _GUTTER - len(start))))
    return lines


def _remedies(remedies: Sequence[Remedy], width: int) -> list[Text]:
    """What was predicted with each, what it saves, how it is typed and, where there is room, what it is."""
    if not remedies:
        return []
    verdicts = [_verdict(item) for item in remedies]
    saves = [f"{'−' if item.saves_bytes >= 0 else '+'}{_size(abs(item.saves_bytes))}" for item in remedies]
    flags = [_clean(item.flag) or "foretell plan" for item in remedies]
    wide = [max(map(len, column)) for column in (verdicts, saves)]
    short = min(max(map(len, flags)), (width - _GUTTER) // 3)
    lines = []
    for number, (item, verdict, saved, flag) in enumerate(zip(remedies, verdicts, saves, flags, strict=True)):
        line = _labelled("reduce" if not number else "", "")
        line.append(f"{verdict:<{wide[0]}}  ", "green" if item.verdict == FITS else "yellow").append(f"{saved:>{wide[1]}}  ")
        change, costs = _clean(item.change), f" ({_clean(item.costs)})" if item.costs else ""
        room = width - line.cell_len - short - 2
        words = next((words for words in (change + costs, change) if len(words) <= room), "")  # whole or not at all
        lines.append(line.append(f"{flag:<{short}}  ", "bold").append(words, "dim"))
    return lines


def _verdict(remedy: Remedy) -> str:
    """`fits`, `tight` or `3.10 GiB short`."""
    return remedy.verdict if remedy.fits else f"{_size(max(1, -remedy.margin_bytes))} short"


def _assumptions(assumptions: Sequence[str], width: int, room: int) -> list[Text]:
    """As many whole sentences as fit into `room` lines; the last line says how many are left."""
    sentences = [textwrap.wrap(_clean(text), width - _GUTTER - 2) for text in assumptions if _clean(text)]
    shown: list[str] = []
    left = len(sentences)
    for wrapped in sentences:
        if len(shown) + len(wrapped) + (left > 1) > room:
            break
        shown += _bullet(wrapped)
        left -= 1
    if left:
        shown.append(f"{left} {'more ' if shown else ''}with --verbose")
    return [_labelled("assumed" if not index else "", line) for index, line in enumerate(shown)]


def _bullet(wrapped: list[str]) -> list[str]:
    return [("  " if index else "- ") + line for index, line in enumerate(wrapped)]


def _next(prediction: Prediction, width: int, typed: Sequence[str]) -> list[Text]:
    """The next command, broken between words so that it can still be copied; none for a script, whose options are its own."""
    if "--" in typed:
        return []
    words = [shlex.quote(word) for word in command.suggest(prediction, typed)]
    lines, line = [], ""
    for word in words:
        if line and _GUTTER + len(line) + len(word) + 3 > width:
            lines.append(f"{line} \\")
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    lines.append(line)
    remedy = command.best(prediction)
    label = "try" if remedy is not None else "next"
    shown = [_labelled(label if not index else "", text, "bold cyan") for index, text in enumerate(lines)]
    told = [_promise(remedy, prediction)] if remedy is not None else []
    wrapped = [line for text in (*told, _clean(prediction.advice)) for line in textwrap.wrap(text, width - _GUTTER)]
    return shown + [_labelled("", line, "dim") for line in wrapped]


def _promise(remedy: Remedy, prediction: Prediction) -> str:
    """`predicted: fits, 20.7 of 23.4 GiB; changes the numerics`."""
    capacity = remedy.device_bytes + remedy.margin_bytes
    more = remedy.devices > command.device_count(prediction)
    words = [f"predicted: {remedy.verdict}, {_span(remedy.device_bytes, capacity, ' of ')}{' each' if remedy.devices > 1 else ''}"]
    words += [f"on {remedy.devices} devices"] if more else []
    words += ["not the same maths"] if not remedy.same_maths else []
    return "; ".join(words)


# --- words -----------------------------------------------------------------------------------------------------------


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{_GUTTER}}", "bright_black" if label else ""), (text, style))


def _size(count: float) -> str:
    """GiB, or a smaller unit where GiB would read as nothing."""
    return gib(count) if abs(count) >= GIB / 10 or not count else human_bytes(count)


def _span(low: int, high: int, between: str = " – ") -> str:
    """Two amounts, with the unit named once where it is the same."""
    first, second = _size(low).split(), _size(high).split()
    return between.join((first[0] if first[1] == second[1] else " ".join(first), " ".join(second)))


def _band(bands: Mapping[str, Sequence[int]], name: str) -> tuple[int | None, int | None]:
    found = bands.get(f"{name}_bytes", bands.get(name))
    return (max(0, int(found[0])), int(found[1])) if found is not None else (None, None)


def _end(name: str, room: int) -> str:
    """A path without its first parts, where it is too long: its end says more."""
    while len(name) > room and (parts := re.split(r"[/.]", name.removeprefix("*."), maxsplit=1))[1:]:
        name = f"*.{parts[1]}" if "/" not in name else parts[1]
    return name if len(name) <= room else name[-max(8, room) :]


def _clean(text: str) -> str:
    """One line without control characters, whatever a name or message holds."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
