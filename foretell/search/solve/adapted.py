"""Plans that train adapters: tried one by one, over the data axes first, or with the degrees that were asked for; and with a smaller
and smaller base where none fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from foretell.errors import UserError
from foretell.plan.precision import low
from foretell.plan.types import Mesh
from foretell.search.solve.choice import Choice
from foretell.search.solve.climb import Climb
from foretell.search.solve.question import Question
from foretell.search.space.constraints import SearchConstraints
from foretell.trace.recipe import ADAPTED, Adapters

RANK = 16
"""Of the adapters that are tried where none are asked for."""


def adapted(question: Question, patience: float) -> Choice:
    """The best plan with the adapters that were asked for; where none fits, with the base in bf16."""
    question = replace(question, wishes=_as_fixed(question))
    found = question.into(Climb).answer(patience)
    for wishes in _in_bf16(question, question.wishes):
        if found.best is not None:
            break
        found = _noted(replace(question, wishes=wishes).into(Climb).answer(patience), "nothing fits with fp32 weights: precision bf16 was tried")
    return found


def _as_fixed(question: Question) -> SearchConstraints:
    """Where degrees are asked for, the meshes that have them: what they leave of the devices shares data."""
    wishes, count = question.wishes, question.cluster.count
    degrees = {axis: degree for axis, degree in wishes.fixed.items() if axis != "ep"}
    if wishes.meshes or not any(degrees.get(axis, 1) > 1 for axis in ("tp", "pp", "cp")):
        return wishes
    rest, over = divmod(count, prod(degrees.values()))
    if over or rest < 1:
        raise UserError(f"{' and '.join(f'--{axis} {degree}' for axis, degree in degrees.items())} do not divide {count} devices", "other degrees")
    free = [axis for axis in ("dp_shard", "dp_replicate") if axis not in degrees] if rest > 1 else []
    if rest > 1 and not free:
        raise UserError(f"the degrees that are asked for use {count // rest} of {count} devices", "leave --dp-shard or --dp-replicate out")
    meshes = [Mesh(**degrees, **{axis: rest}) for axis in free] or [Mesh(**degrees)]
    return replace(wishes, meshes=tuple(meshes))


def or_adapted(nothing: Choice, question: Question, patience: float) -> Choice:
    """Where no plan trains the model: the first base with which one trains adapters. What was found before is kept where none does."""
    plain = replace(question.wishes, adapters=Adapters(rank=RANK), may_adapt=False)
    tried = 0
    for wishes in (plain, *_in_bf16(question, plain), *_in_four_bits(question, plain)):
        found = replace(question, wishes=wishes).into(Climb).answer(patience)
        tried += found.costed
        if found.best is not None:
            how = f"no plan trains the model itself: LoRA adapters of rank {RANK} are trained, which is another function"
            return _noted(replace(found, costed=nothing.costed + tried), how)
    return _noted(replace(nothing, costed=nothing.costed + tried), "no plan with LoRA adapters fits either, over a base in 4 bits neither")


def _in_bf16(question: Question, wishes: SearchConstraints) -> Iterator[SearchConstraints]:
    if wishes.precision is None and not question.on_cpu and low(question.cluster) == "bfloat16":
        yield replace(wishes, precision="bf16")


def _in_four_bits(question: Question, wishes: SearchConstraints) -> Iterator[SearchConstraints]:
    best = next(_in_bf16(question, wishes), wishes)
    for kind in ("nf4", "nf4-double"):
        yield replace(best, base={ADAPTED: kind})


def _noted(found: Choice, note: str) -> Choice:
    return replace(found, notes=(*found.notes, note))
