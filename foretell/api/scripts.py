"""What `fit` says of a training script, followed as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.api import backends
from foretell.api.step import predict, run_request
from foretell.hardware import Cluster, parse
from foretell.quantities import Prediction
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.process import TIME_LIMIT


def fit_script(
    words: Sequence[str],
    *,
    hardware: str | Cluster,
    hints: Mapping[str, float] | None = None,
    expandable_segments: bool = False,
    tokens: float | None = None,
    samples: float | None = None,
    epochs: float | None = None,
    dataset_size: float | None = None,
    region: str | None = None,
    price: float | None = None,
    trace_out: str | None = None,
    keep_writes: bool = False,
    cache: bool = True,
    time_limit: float = TIME_LIMIT,
    progress: Callable[[str], None] = lambda doing: None,
) -> Prediction:
    """What `fit` says of a training script: `["python", "train.py", "--batch-size", "64"]`, followed as it is to its first step."""
    asked = locals()
    from foretell.simulate.ranks import largest
    from foretell.trace.sandbox import user_code
    from foretell.trace.script.several import follow_ranks
    from foretell.trace.script.words import over
    from foretell.trace.script.words import parse as parse_words

    cluster = hardware if isinstance(hardware, Cluster) else parse(hardware, apple=True)
    name = cluster.device.name
    script = over(parse_words(words), cluster.nodes, cluster.devices_per_node, name)
    on = hardware if isinstance(hardware, str) else name
    wishes = run_request(asked)
    user_code.before([str(Path(script.file).resolve()) if script.file else f"module {script.module}"])
    replies = follow_ranks(
        script, backends.capability(cluster), dict(hints or {}), keep_writes, devices=cluster.count, name=name, cache=cache, time_limit=time_limit,
        progress=progress,
    )  # fmt: skip
    about: dict[str, Any] = {"source": script.text, "description": script.text, "seq": None, "image": None, "overrides": {}}
    answers: list[Prediction] = []
    for trace, reply in replies:
        if answers and trace == replies[0][0]:
            continue  # the same step
        recipe = Recipe.from_json(trace.meta["recipe"])  # type: ignore[arg-type]
        sizes = {**about, "micro_batch": reply["micro_batch"]}
        notes = tuple(reply["notes"])
        answers.append(predict(trace, recipe, cluster, sizes, on=on, notes=notes, expandable_segments=expandable_segments, wishes=wishes))
    return largest(answers, [reply["rank"] for _, reply in replies])
