"""What would make a step faster, or make it fit, all of it predicted by `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foretell.api.step import fit, trace_ahead
from foretell.decode import value_of
from foretell.hardware import Cluster, parse
from foretell.quantities import NO, Prediction
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.store import cache as store

if TYPE_CHECKING:
    from foretell.search.advice.faster import Advice

SECONDS = 300.0
"""After which no further change is begun."""


def advise(
    model: str, *, hardware: str | Cluster, seconds: float = SECONDS, progress: Callable[[str], None] = lambda doing: None, **options: Any
) -> tuple[Prediction, Advice | None]:
    """The answer of `fit` with ways to make it fit, and, where it fits, what would make it faster. Options are those of `fit`.

    What was advised is kept: the same question is answered at once.
    """
    answer = fit(model, **{**options, "hardware": hardware, "trace_out": None}, progress=progress)
    if answer.verdict == NO:
        return answer, None
    return answer, faster(model, answer, hardware=hardware, seconds=seconds, progress=progress, **options)


def faster(
    model: str, answer: Prediction, *, hardware: str | Cluster, seconds: float, joins: bool = True,
    progress: Callable[[str], None] = lambda doing: None, **options: Any,
) -> Advice:  # fmt: skip
    """What would make the step of an answer of `fit` faster; without `joins` only single changes, and batches of twice the size."""
    from foretell.search.advice import faster as search

    plain = {**options, "model": model, "hardware": hardware, "trace_out": None, "advice_seconds": 0.0}
    cluster = hardware if isinstance(hardware, Cluster) else parse(hardware)
    whole, own = ({"faster": answer.to_json(), "asked": {name: str(value) for name, value in plain.items()}, "joins": each} for each in (True, joins))
    keeps = bool(options.get("cache", True)) and ".py" not in model  # a file may change
    for known in (whole, own) if keeps else ():
        kept: Advice | None = store.read("faster", store.key_of(known), lambda entry: value_of(search.Advice, entry["advice"]))
        if kept is not None:
            return kept
    found = search.faster(
        answer, question_of(model, answer, cluster, options), lambda changes: fit(**{**plain, **changes}), seconds=seconds, joins=joins,
        prepare=lambda many, left: trace_ahead([{**plain, **changes} for changes in many], left) if keeps else None, progress=progress,
    )  # fmt: skip
    if keeps and found.whole:
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
