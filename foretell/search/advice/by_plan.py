"""A step that does not fit, as a plan that keeps optimizer states, and weights if need be, in host memory: does that fit?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretell.hardware.lookup import find_profile
from foretell.plan.types import COMPILES
from foretell.quantities import Prediction, Remedy
from foretell.search.advice.ways import FitRequest
from foretell.search.offload.plans import ANY_HOST, thriftiest
from foretell.search.solve.costing import Costing, Unsuited
from foretell.search.solve.question import Question
from foretell.search.space.caps import host_of
from foretell.search.space.constraints import SearchConstraints
from foretell.search.traces.needed import Traces
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.units import GIB

PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "bf16-autocast": "bf16-mixed", "fsdp-bf16": "bf16-mixed"}
"""As `fit` names them → as plans do."""


def by_plan(
    answer: Prediction, asked: FitRequest, source: Source | None, *, hints: Mapping[str, float], cache: bool
) -> Remedy | None:
    """The command that plans it, with what was predicted of the plan that needs least; None where plans cannot say it."""
    recipe = asked.recipe
    if source is None or asked.on is None or not asked.training or hints or "+" in str(source.overrides.get("phase", "")):
        return None
    if not isinstance(source.loss, str | None) or recipe.compile not in COMPILES:
        return None
    if recipe.lora is not None or recipe.freeze or recipe.precision not in PRECISIONS or not recipe.optimizer.startswith("adam"):
        return None
    question = _question(asked, source, cache)
    try:
        question.into(Costing).sheet(question.cluster)  # without one, plans are tried one by one, and none moves anything
    except Unsuited:
        return None
    found = thriftiest(replace(question, wishes=replace(question.wishes, host=ANY_HOST)))
    if found is None:
        return None
    known = host_of(asked.cluster, question.wishes)
    host = -(-found.host_bytes // GIB)
    enough = known is not None and known >= host * GIB
    if known is not None and not enough:
        return None
    memory = found.cost.worst.memory
    return Remedy(
        change="keep optimizer states in host memory" + (" and weights too" if found.plan.weights else ""), flag="",
        command=shlex.join(["foretell", *_words(asked, source, recipe), *([] if enough else ["--host", f"{host}GiB"])]),
        saves_bytes=answer.memory.device_bytes - memory.device_bytes, fits=found.fits, verdict=found.cost.verdict,
        device_bytes=memory.device_bytes, margin_bytes=memory.margin_bytes, devices=asked.cluster.count,
        costs=f"copies over the link every step; {host} GiB of host memory",
    )  # fmt: skip


def _question(asked: FitRequest, source: Source, cache: bool) -> Question:
    recipe, cluster = asked.recipe, asked.cluster
    wishes = SearchConstraints(
        global_batch=asked.micro_batch * recipe.accumulate * cluster.count, precision=PRECISIONS[recipe.precision],
        optimizer=recipe.optimizer, clip=recipe.clip, compile=(recipe.compile,),
    )  # fmt: skip
    traces = Traces(capability=cluster.device.compute_capability or (9, 0), cache=cache)
    return Question(
        replace(source, micro_batch=1), cluster, str(asked.on), wishes, Options(profile_of=find_profile), traces, lambda _: None
    )


def _words(asked: FitRequest, source: Source, recipe: Recipe) -> list[str]:
    """`plan` for the step that `fit` was asked for."""
    given: dict[str, Any] = {
        "--on": asked.on, "--global-batch": asked.micro_batch * recipe.accumulate * asked.cluster.count, "--seq": source.seq,
        "--image": source.image, "--optimizer": recipe.optimizer if recipe.optimizer != "adamw-fused" else None,
        "--precision": PRECISIONS[recipe.precision], "--clip": f"{recipe.clip or 0:g}", "--compile": recipe.compile, "--loss": source.loss,
    }  # fmt: skip
    words = ["plan", source.model, *(word for option, value in given.items() if value is not None for word in (option, str(value)))]
    return [*words, *(word for key, value in source.overrides.items() for word in ("--set", f"{key}={_typed(value)}"))]


def _typed(value: Any) -> str:
    """As `--set` reads it back: JSON, but for text that nothing else can be."""
    plain = isinstance(value, str) and value not in ("", "True", "False", "None")
    try:
        json.loads(value) if plain else None
    except ValueError:
        return str(value)
    return json.dumps(value)
