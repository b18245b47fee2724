"""The best plan of a training that goes on, for other numbers of ranks: the same model, maths and samples of a step."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan.recipe import own_kernels, source_of
from foretell.plan.types import Plan
from foretell.search.solve.choose import choose
from foretell.search.space.constraints import SearchConstraints
from foretell.simulate.plan import Options

PATIENCE_SECONDS = 120.0
"""Ranks may wait for the answer: the best that was found by then is taken. Tracing counts, where no trace was kept."""


def plan_for(plan: Plan, ranks: Sequence[int]) -> Plan:
    """The fastest plan for one of these numbers of ranks; with micro-batches as they were where one fits, since a loss may mind. Traces come from
    the cache. Raises where there is none."""
    cluster, why = parse(plan.hardware), ""
    for micro_batch in (plan.micro_batch, None):
        try:
            found = choose(
                source_of(plan), cluster, plan.hardware, wishes_of(plan, ranks, micro_batch), exact=None, patience=PATIENCE_SECONDS,
                options=Options(profile_of=find_profile),
            )  # fmt: skip
        except UserError as error:
            why = why or error.problem
            continue
        if found.best is not None:
            return found.best.plan
        why = why or "; ".join(one.why for one in found.reasons)
    raise UserError(f"no plan for {' or '.join(map(str, ranks))} ranks: {why or 'none fits'}", "give it more devices")


def wishes_of(plan: Plan, ranks: Sequence[int], micro_batch: int | None) -> SearchConstraints:
    """What a plan of the same training has in common with this one."""
    return SearchConstraints(
        global_batch=plan.global_batch, micro_batch=micro_batch, precision=plan.precision, optimizer=plan.optimizer, clip=plan.clip,
        ranks=tuple(ranks), compile=(plan.compile,), state_format=None if plan.state_format == "fp32" else plan.state_format,
        adapters=plan.adapters, base=plan.base, sync=plan.sync, loss_chunks=plan.loss_chunks if plan.loss_chunks > 1 else None,
        kernels=own_kernels(plan),
    )  # fmt: skip
