"""`foretell fit A --on GPU --beside B`: two jobs, or more, on one GPU at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.simulate.beside import Together

HELP = "Another job on the same GPU, such as resnet50,micro_batch=64; may be repeated."
_NUMBERS = ("micro_batch", "seq", "image", "accumulate", "lora")
_TEXTS = ("optimizer", "precision", "recompute")


def job_of(text: str) -> dict[str, Any]:
    """`MODEL,KEY=VALUE,...` as options of `fit`."""
    model, *words = (word.strip() for word in text.split(","))
    found: dict[str, Any] = {"model": model}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not model or not equals or key not in (*_NUMBERS, *_TEXTS) or (key in _NUMBERS and not value.isdecimal()):
            known = ", ".join((*_NUMBERS, *_TEXTS))
            raise UserError(f"--beside {text!r} is not MODEL,KEY=VALUE", f"write it like resnet50,micro_batch=64; keys are {known}")
        found[key] = int(value) if key in _NUMBERS else value
    return found


def predicted(model: str, on: str, options: Mapping[str, Any], others: Sequence[str]) -> tuple[Together, list[str]]:
    """The job that was asked for and those beside it, and what to call them."""
    from foretell import api
    from foretell.search.beside import OF_RECIPE, OF_SOURCE

    own = {name: options[name] for name in (*OF_SOURCE, *OF_RECIPE) if options.get(name)}
    jobs = [{"model": model, **own}, *map(job_of, others)]
    return api.beside(jobs, hardware=on, cache=bool(options["cache"])), [str(job["model"]) for job in jobs]


def show(found: Together, names: Sequence[str]) -> None:
    """A line for all, and one for each."""
    from foretell.report import words
    from foretell.units import gib

    verdict = {"fits": "FIT", "tight": "HARDLY FIT", "no": "DO NOT FIT"}[found.verdict]
    left = f"{gib(found.margin_bytes)} spare" if found.margin_bytes >= 0 else f"{gib(-found.margin_bytes)} short"
    lines = ["", f"TOGETHER {verdict}  {gib(found.device_bytes)} of {gib(found.capacity_bytes)}, {left}; a context for each"]
    for place, name in enumerate(names):
        seconds = ""
        if found.step_seconds and found.alone_seconds and found.alone_busy and found.slowdown:
            alone, both = words.seconds(found.alone_seconds[place]), words.seconds(found.step_seconds[place])
            seconds = f"  step {both}, alone {alone} ({found.slowdown[place]:.2f} times), GPU busy {words.percent(found.alone_busy[place])} alone"
        lines.append(f"  {name:<12}{gib(found.each_bytes[place]):>10}{seconds}")
    if found.gain is not None and found.busy is not None:
        worth = "more" if found.gain > 1 else "less"
        lines.append(f"  GPU busy {words.percent(found.busy)}; together {found.gain:.2f} times the work of one after the other: {worth}")
        lines.append("  processes take turns of a time slice (no MPS); slices and switches are assumed")
    common.emit("\n".join(lines))
