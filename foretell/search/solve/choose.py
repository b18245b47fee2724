"""The best plan for a model on given hardware, and why not others. Nothing is run.

Devices whose speed is known are searched by quick costs (`find`), where nothing fits also with states elsewhere (`moved`); a CPU, a
device of which nothing is known, and a model whose step is not made of straight lines op by op (`climb`). All of them are
spaces of one search (`engine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.plan.types import MASTER
from foretell.search.apart import apart, or_apart
from foretell.search.offload.plans import or_moved, spilled
from foretell.search.solve.adapted import adapted, or_adapted
from foretell.search.solve.choice import Choice as Choice
from foretell.search.solve.choice import told as told
from foretell.search.solve.choice import why_slower as why_slower
from foretell.search.solve.climb import Climb
from foretell.search.solve.described import DescribedSearch
from foretell.search.solve.find import SearchResult, Unsuited, found_for
from foretell.search.solve.found import Candidate as Candidate
from foretell.search.solve.question import Progress, Question, ask
from foretell.search.space.constraints import SearchConstraints as SearchConstraints
from foretell.search.space.constraints import check
from foretell.search.traces.needed import Traces
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source
from foretell.trace.load.model import check as check_source
from foretell.trace.sandbox.process import TIME_LIMIT


def choose(
    source: Source, cluster: Cluster, hardware: str, wishes: SearchConstraints | None = None, *, options: Options | None = None,
    hints: Mapping[str, float] | None = None, cache: bool = True, progress: Progress = lambda _: None,
    exact: bool | None = True, what_if: bool = False, patience: float = float("inf"), by_law: bool = False,
    traces: Traces | None = None, time_limit: float = TIME_LIMIT, moves: bool = True,
) -> Choice:  # fmt: skip
    """The best plan for a model on hardware; `hardware` is how the user wrote it.

    `exact`: whether the best is costed op by op in any case (True), where that is quick (None), or not (False).
    `by_law`: where no batch is asked for, the Step Law's for `wishes.tokens` is taken. `traces`: those at hand.
    `time_limit`: seconds that tracing one step may take. `moves`: whether, where nothing fits, states may be elsewhere.
    """
    check_source(source)
    question = ask(
        source, cluster, hardware, _on_whole_rows(wishes), options=options, hints=hints, cache=cache, progress=progress, traces=traces,
        by_law=by_law, time_limit=time_limit,
    )  # fmt: skip
    if question.wishes.described is not None:
        return question.into(DescribedSearch).answer(patience)
    if question.wishes.adapters is not None:
        return adapted(question, patience)
    if question.wishes.sync is not None:
        return apart(question, patience)
    if (question.wishes.loss_chunks or 1) > 1 or question.wishes.kernels:
        return question.into(Climb).answer(patience)
    if question.wishes.precision == MASTER:
        if by_law:
            raise UserError(f"--step-law is not taken with --precision {MASTER}", "give --global-batch")
        return spilled(question, patience)
    found = _whole_model(question, exact, what_if, patience, moves and question.wishes.coded == "fp32")
    if found.best is None and question.wishes.may_code:
        found = _or_coded(found, question, exact, patience)
    if found.best is not None and question.wishes.may_part:
        return or_apart(found, question, patience)
    return found if found.best is not None or not question.wishes.may_adapt else or_adapted(found, question, patience)


def _on_whole_rows(wishes: SearchConstraints | None) -> SearchConstraints | None:
    """Moments in codes have one scale for a part of a row: tp and ep would cut it."""
    if wishes is None or wishes.coded == "fp32":
        return wishes
    return replace(wishes, fixed={**dict.fromkeys(("tp", "ep"), 1), **wishes.fixed})


def _or_coded(nothing: Choice, question: Question, exact: bool | None, patience: float) -> Choice:
    """Where no plan keeps its moments as they are: with moments in 8 bits. What was found before is kept where none fits either."""
    wishes = replace(question.wishes, state_format="int8", may_code=False)
    try:
        check(wishes)
    except UserError as error:
        return replace(nothing, notes=(*nothing.notes, f"moments in 8 bits were not tried: {error.problem}"))
    found = _whole_model(replace(question, wishes=_on_whole_rows(wishes) or wishes), exact, False, patience, False)
    if found.best is None:
        return replace(nothing, costed=nothing.costed + found.costed, notes=(*nothing.notes, "no plan with moments in 8 bits fits either"))
    how = "no plan fits with moments as they are: AdamW's moments are held in 8 bits, which changes the maths within bounds"
    return replace(found, costed=nothing.costed + found.costed, notes=(*found.notes, how))


def _whole_model(question: Question, exact: bool | None, what_if: bool, patience: float, moves: bool) -> Choice:
    """The best plan that trains the model itself."""
    remarks: tuple[str, ...] = ()
    if not question.on_cpu:
        try:
            found = as_choice(found_for(question, exact=exact, what_if=what_if, patience=patience))
            found = found if found.best is not None else or_in_chunks(found, question, patience)
            return found if found.best is not None or not moves else _moved(found, question, patience)
        except Unsuited as error:
            remarks = (f"plans were tried one by one: {error}",)
    found = question.into(Climb).answer(patience)
    return replace(found, notes=(*found.notes, *remarks))


def or_in_chunks(nothing: Choice, question: Question, patience: float) -> Choice:
    """Where nothing fits on one device: plans with the loss in chunks, which compute the same. What was found before is kept where none does."""
    if question.cluster.count > 1 or question.wishes.loss_chunks is not None:
        return nothing
    climb = question.into(Climb)
    found = climb.answer(patience)
    if found.best is None or found.best.plan.loss_chunks == 1:
        return nothing
    return replace(found, costed=nothing.costed + found.costed)


def _moved(nothing: Choice, question: Question, patience: float) -> Choice:
    """With states elsewhere. Where that cannot be searched, since nothing is known of the host, adapters are left if they may be used."""
    try:
        return or_moved(nothing, question, patience)
    except UserError:
        if not question.wishes.may_adapt:
            raise
        return nothing


def as_choice(found: SearchResult) -> Choice:
    """What a search found, as callers of `choose` know it."""
    nearest = [replace(found.nearest, why=found.needs)] if found.nearest is not None else []
    return Choice(
        best=found.best, runners_up=found.runners_up, dropped=(*nearest, *found.dropped), infeasible=found.infeasible,
        costed=found.costed, notes=found.notes, found=found, law=found.law, reasons=found.reasons,
        relaxations=found.relaxations, tried=found.tried,
    )  # fmt: skip
