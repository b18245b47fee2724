"""What would make a step faster, as lines of a screen."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from foretell.quantities import Prediction
from foretell.report.command import hardware_spec, model_name, with_flag
from foretell.report.terminal.seconds import GUTTER
from foretell.search.advice.faster import Advice, Gain
from foretell.search.advice.gain_range import MEASURE
from foretell.units import gib, human_count

TOP = 3
"""Gains that `fit` shows."""
NOTHING = "nothing that was tried makes it faster"
UNSURE = "nothing that was tried makes it faster for sure"


def lines(answer: Prediction, found: Advice, typed: Sequence[str], width: int) -> list[str]:
    """The step as it is, each change with what was predicted of it, all together, and how to do that."""
    assert answer.time is not None and answer.throughput is not None
    rate = f"{human_count(answer.throughput.per_second)} {answer.throughput.unit}/s"
    step, used = _step(answer.time.step_seconds), gib(answer.memory.device_bytes)
    head = f"{model_name(answer)} on {hardware_spec(answer, ' ')}: {step} a step, {rate}, {used}"
    if not found.gains and found.joint is None:
        shown = [head, f"{NOTHING if not found.unsure else UNSURE} ({found.tried} changes predicted)"]
        return shown + _unsure(found, width)
    shown = [head, "", f"{'faster':>7}  {'step':>9}  {'memory':>10}  maths"]
    for gain in (*found.gains, *([found.joint] if found.joint else [])):
        if gain is found.joint:
            shown += ["", "together"]
        shown += _gain(gain, width)
    shown += _unsure(found, width)
    best = found.joint or found.gains[0]
    command = shlex.join(["foretell", *with_flag(["fit", *typed[1:]], best.flag)])
    shown += ["", "in a plain loop", *(f"  {line}" for line in best.code.splitlines()), "", "check it", f"  {command}"]
    if not found.whole:
        shown += ["", "time was up before all were predicted: run it again, or give more --seconds"]
    return shown


def top(found: Advice, typed: Sequence[str], width: int) -> list[str]:
    """The largest gains in short, below an answer of `fit`, and where all of them are told: of a model, what was typed for it."""
    gutter, lines = " " * GUTTER, []
    for number, gain in enumerate(found.gains[:TOP]):
        start = f"{'faster' if not number else '':<{GUTTER}}{gain.speedup:.2f}x  {_step(gain.step_seconds):>7}  "
        wrapped = textwrap.wrap("; ".join(filter(None, (f"{gain.change} [{gain.maths}]", gain.told_range))), max(20, width - len(start)))
        lines += [start + wrapped[0], *(" " * len(start) + more for more in wrapped[1:])]
    if lines and typed:
        command = shlex.join(["foretell", "plan", "advise", *typed[1:]])
        told = textwrap.wrap(f"how, and all together: {command}", width - GUTTER, subsequent_indent="  ", break_long_words=False)
        lines += [gutter + line for line in told]
    return lines


def _unsure(found: Advice, width: int) -> list[str]:
    """What may gain nothing, since hosts differ by more."""
    shown = [line for gain in found.unsure for line in _gain(gain, width)]
    return ["", MEASURE, *shown] if shown else []


def _gain(gain: Gain, width: int) -> list[str]:
    start = f"{gain.speedup:6.2f}x  {_step(gain.step_seconds):>9}  {_bytes(-gain.saves_bytes):>10}  "
    words = "; ".join(filter(None, (f"{gain.change} [{gain.maths}]", gain.told_range, gain.costs)))
    wrapped = textwrap.wrap(words, max(20, width - len(start))) or [""]
    return [start + wrapped[0], *(" " * len(start) + more for more in wrapped[1:])]


def _bytes(count: int) -> str:
    return f"{'+' if count >= 0 else '−'}{gib(abs(count))}"


def _step(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
