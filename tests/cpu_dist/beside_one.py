"""A plan beside one process: the cases of context and expert parallel, and how they are held together."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from foretell.plan.types import Mesh, Plan
from foretell.runtime.check import verify
from foretell.runtime.process.pool import PoolWorld
from foretell.trace.load.model import Source

Ranks = Callable[[int], PoolWorld]
STEPS = 3
"""Gradients are compared at the first one; a wrong update, or a state that is lost, shows in the losses from the second on."""


@dataclass(frozen=True)
class Case:
    model: str
    mesh: Mesh
    more: dict[str, Any] = field(default_factory=dict)
    slow: str = ""
    """Why `make test` leaves it out, if it does."""

    @property
    def plan(self) -> Plan:
        usual = {"model": {}, "hardware": "auto", "micro_batch": 2, "precision": "fp32", "clip": 0.1}
        return Plan(**{**usual, **self.more}, mesh=self.mesh)


def params(cases: Mapping[str, Case]) -> list[Any]:
    """The names of the cases, those that are slow marked."""
    return [pytest.param(name, marks=pytest.mark.slow(reason=case.slow) if case.slow else ()) for name, case in cases.items()]


def check(case: Case, models: Mapping[str, Source], ranks: Ranks) -> None:
    """The ranks of a plan learn, and compute what one process computes."""
    if case.model == "hf" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    source, plan = models[case.model], case.plan
    known = ranks(1).run(verify.reference_rank, source, plan, STEPS)[0]
    found = verify.merge(ranks(plan.mesh.world).run(verify.run_rank, source, plan, STEPS))
    bounds = verify.Bounds() if plan.precision == "fp32" else ranks(1).run(verify.bounds_rank, source, plan, known, STEPS)[0]
    difference = verify.compare(known, found, bounds)
    assert known.losses[-1] < known.losses[0] and difference.good, difference
