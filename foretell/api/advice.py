"""What would make a step faster, or make it fit, all of it predicted by `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from foretell.api.call import asking
from foretell.api.step import fit, trace_ahead
from foretell.decode import value_of
from foretell.hardware import Cluster, parse
from foretell.options import AdviseOptions
from foretell.options.describe import named
from foretell.quantities import NO, Prediction
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.store import cache as store

if TYPE_CHECKING:
    from foretell.search.advice.faster import Advice

class Advised(NamedTuple):
    """The answer of `fit`, and what would make it faster; None where it does not fit: the answer then has what would make it fit."""

    answer: Prediction
    advice: Advice | None

    def to_json(self) -> dict[str, Any]:
        return {**self.answer.to_json(), "faster": None if self.advice is None else asdict(self.advice)}

    def __repr__(self) -> str:
        gains = self.advice.gains if self.advice is not None else ()
        told = f"; {gains[0].speedup:.2f}x faster: {gains[0].change}" if gains else ""
        return f"<Advised: {self.answer.headline()}{told}>"

    def _repr_html_(self) -> str:
        gains = self.advice.gains if self.advice is not None else ()
        cells = ((f"{one.speedup:.2f}x", one.told_range, escape(one.change), escape(one.maths)) for one in gains)
        lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
        return f"{self.answer._repr_html_()}<table>{lines}</table>"


@asking(AdviseOptions)
def advise(model: str, options: AdviseOptions) -> Advised:
    """The answer of `fit` with ways to make it fit, and, where it fits, what would make it faster. Options are those of `fit`.

    What was advised is kept: the same question is answered at once.
    """
    plain = {name: value for name, value in named(options).items() if name not in ("hardware", "seconds", "progress", "batch")}
    answer = fit(model, **plain, hardware=options.hardware, progress=options.progress)
    if answer.verdict == NO:
        return Advised(answer, None)
    return Advised(answer, faster(model, answer, hardware=options.hardware, seconds=options.seconds, progress=options.progress, **plain))


def faster(
    model: str, answer: Prediction, *, hardware: str | Cluster, seconds: float, joins: bool = True,
    progress: Callable[[str], None] = lambda doing: None, **options: Any,
) -> Advice:  # fmt: skip
    """What would make the step of an answer of `fit` faster; without `joins` only single changes, and batches of twice the size."""
    from foretell.search.advice import faster as search

    asked = {**options, "hardware": hardware, "trace_out": None, "advice_seconds": 0.0}
    plain = {**asked, "model": model}
    cluster = hardware if isinstance(hardware, Cluster) else parse(hardware)
    whole, own = ({"faster": answer.to_json(), "asked": {name: str(value) for name, value in plain.items()}, "joins": each} for each in (True, joins))
    keeps = bool(options.get("cache", True)) and ".py" not in model  # a file may change
    for known in (whole, own) if keeps else ():
        kept: Advice | None = store.read("faster", store.key_of(known), lambda entry: value_of(search.Advice, entry["advice"]))
        if kept is not None:
            return kept
    found = search.faster(
        answer, question_of(model, answer, cluster, options), lambda changes: fit(model, **{**asked, **changes}), seconds=seconds, joins=joins,
        prepare=lambda many, left: trace_ahead([{**plain, **changes} for changes in many], left) if keeps else None, progress=progress,
    )  # fmt: skip
    if keeps and (found.whole or (found.gains and not joins)):  # `fit` shows what its seconds told, and the same the next time
        store.write("faster", store.key_of(own), {"advice": asdict(found)}, {})
    return found


def faster_script(
    words: Sequence[str], *, hardware: str | Cluster, seconds: float, time_limit: float = TIME_LIMIT, hints: Mapping[str, float] | None = None
) -> Advice:
    """What would make a training script faster: it is followed again with each change."""
    from foretell.search.advice.script_faster import ScriptSpeedSearch
    from foretell.search.traces import followed
    from foretell.trace.script.words import parse as parse_words

    cluster = hardware if isinstance(hardware, Cluster) else parse(hardware)
    on = hardware if isinstance(hardware, str) else cluster.device.name
    step = followed.follow(parse_words(words), cluster, hints=hints, time_limit=time_limit)
    return ScriptSpeedSearch(step, cluster, on, followed.cost(step, cluster, on), seconds).advice()


def question_of(model: str, answer: Prediction, cluster: Cluster, options: Mapping[str, Any]) -> Any:
    from foretell.search.advice.faster_ways import SpeedRequest
    from foretell.trace.load.settings import settings_of

    overrides = dict(options.get("overrides") or {})
    return SpeedRequest(
        recipe=Recipe.from_json(answer.model["recipe"]), cluster=cluster, micro_batch=int(answer.model.get("micro_batch") or 1),
        settings=settings_of(Source(model=model)), overrides=overrides, devices=cluster.count,
    )  # fmt: skip
