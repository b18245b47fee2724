"""What a change to a repository does to peak memory, step time and parameters: `fit` of two revisions, each of its own files."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.api import backends
from foretell.api.revisions import HERE, Checkout, Repository, checked_out, repository, revision
from foretell.api.scripts import fit_script
from foretell.api.step import fit
from foretell.errors import ForetellError, MissingModel, UserError
from foretell.hardware import parse
from foretell.report.diff.bounds import GrowthBound
from foretell.report.diff.judge import ModelDiff, RevisionAnswer, RevisionDiff, compared
from foretell.trace.load.model import Source
from foretell.trace.load.userfile import path_and_name
from foretell.trace.sandbox.process import TIME_LIMIT


@dataclass(frozen=True, kw_only=True)
class DiffQuestion:
    """One model or one script, on one kind of hardware."""

    hardware: str
    model: str = ""
    """`file.py:function`, from the current folder."""
    script: tuple[str, ...] = ()
    """Instead: `("python", "train.py", "--batch-size", "64")`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `fit`, or of `fit_script`."""
    told: str = ""
    """The options as typed."""
    bounds: Mapping[str, GrowthBound] | None = None
    """Where other than those of all."""

    @property
    def name(self) -> str:
        return shlex.join(self.script) if self.script else self.model


def diff(
    questions: Sequence[DiffQuestion], *, base: str, head: str = HERE, bounds: Mapping[str, GrowthBound],
    progress: Callable[[str], None] = lambda doing: None,
) -> RevisionDiff:  # fmt: skip
    """Predict what is asked of two revisions of the repository that the current folder is in; `.` is the working tree as it is.

    Revisions are written to temporary folders, and the current folder is theirs while they are predicted.
    """
    inside = repository()
    asked = [_in_repository(one, inside) for one in questions]
    pair = [revision(inside, name) for name in (base, head)]
    progress("checking out")
    with checked_out(inside, pair) as (before, now):
        models = tuple(_one(one, before, now, one.bounds or bounds, progress) for one in asked)
        return RevisionDiff(base=pair[0], head=pair[1], models=models, bounds=dict(bounds), notes=(*before.notes, *now.notes))


def _in_repository(question: DiffQuestion, inside: Repository) -> DiffQuestion:
    """The question with its paths from the current folder; what lies elsewhere has no revisions."""
    if question.script:
        return question
    path, name = path_and_name(question.model)
    if not path.endswith(".py"):
        raise UserError(f"'{question.model}' is not a file of the repository", "name a model of yours as file.py:function")
    here = (inside.root / inside.prefix).resolve()
    whole = (here / path).resolve()
    if not whole.is_relative_to(inside.root):
        raise UserError(f"{path} is not in the repository {inside.root}", "name a file in it")
    path = os.path.relpath(whole, here) if Path(path).is_absolute() else path
    return replace(question, model=f"{path}:{name}" if name else path)


def _one(question: DiffQuestion, before: Checkout, now: Checkout, bounds: Mapping[str, GrowthBound], progress: Callable[[str], None]) -> ModelDiff:
    def tell(checkout: Checkout) -> Callable[[str], None]:
        return lambda doing: progress(f"{question.name} at {checkout.revision.shown}{f', {doing}' if doing else ''}")

    old, new = (_answer(question, one, tell(one)) for one in (before, now))
    if old.missing and new.missing:
        raise MissingModel(f"{new.problem}, in both revisions", new.remedy)
    if old.prediction and new.prediction and old.prediction.parameters != new.prediction.parameters:
        old, new = (replace(answer, parameters=_parameters(question, one)) for answer, one in ((old, before), (new, now)))
    names = (before.revision.shown, now.revision.shown)
    return compared(question.name, question.hardware, question.told, old, new, bounds, names)


def _answer(question: DiffQuestion, checkout: Checkout, progress: Callable[[str], None]) -> RevisionAnswer:
    """What `fit` says in this revision, traced now: a copy is gone afterwards, and a model may read files that no stored answer knows of."""
    progress("")
    how = {**question.options, "progress": progress, "cache": False}
    try:
        with checkout.entered():
            if question.script:
                return RevisionAnswer(prediction=fit_script(question.script, hardware=question.hardware, **how))
            return RevisionAnswer(prediction=fit(question.model, hardware=question.hardware, **{**how, "advice_seconds": 0.0}))
    except UserError as error:
        return RevisionAnswer(missing=isinstance(error, MissingModel), problem=error.problem, remedy=error.remedy, detail=error.detail)


def _parameters(question: DiffQuestion, checkout: Checkout) -> Mapping[str, int] | None:
    """Elements of each parameter; None where the model cannot be built once more."""
    from foretell.search.traces.child import parameters_of

    given = question.options
    of_source = {name: given[name] for name in ("overrides", "micro_batch", "seq", "image", "loss") if given.get(name) is not None}
    try:
        with checkout.entered():
            if question.script:
                return _parameters_of_script(question)
            return parameters_of(Source(model=question.model, **of_source), time_limit=given.get("time_limit", TIME_LIMIT))
    except ForetellError:
        return None


def _parameters_of_script(question: DiffQuestion) -> dict[str, int]:
    """Those of its first rank, followed once more."""
    from foretell.trace.script.several import follow_ranks
    from foretell.trace.script.words import over
    from foretell.trace.script.words import parse as parse_words

    cluster, given = parse(question.hardware, apple=True), question.options
    script = over(parse_words(question.script), cluster.nodes, cluster.devices_per_node, cluster.device.name)
    replies = follow_ranks(
        script, backends.capability(cluster), dict(given.get("hints") or {}), False, devices=cluster.count, name=cluster.device.name,
        cache=False, time_limit=given.get("time_limit", TIME_LIMIT),
    )  # fmt: skip
    return {name: math.prod(shape) for name, (shape, _) in replies[0][1]["shapes"].items()}
