"""Rounds of a step that begin alike are made once: the tasks are those of going through every round."""

from __future__ import annotations

import itertools

import pytest

from foretell.lower.steps import whole_step
from foretell.price.host import steady
from foretell.price.speeds import speeds_of
from foretell.simulate.plan import KEEP, sharded
from foretell.simulate.time import step
from tests.further import further
from tests.pure.golden import CASES, OPTIONS, traces

NAMES = ("accumulated", "fsdp, accumulated", "hsdp, accumulated", "tp in fsdp", "CPU, accumulated")


@pytest.mark.parametrize("name", further(NAMES, ("fsdp, accumulated", "tp in fsdp"), "other rounds, made as these are"))
def test_the_tasks_of_alike_rounds_are_those_of_every_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    plan = case.plan.with_(accumulate=7, blocks={})
    known = traces(None if case.cluster.device.backend == "cpu" else case.cluster.device.compute_capability)
    local = sharded(whole_step(known.of(plan, [KEEP])[KEEP], plan.accumulate), plan)
    speeds = speeds_of(plan, case.cluster, OPTIONS)
    assert speeds is not None
    begun: list[int] = []
    found = list(step.tasks_of(local, steady(local), speeds, begun=begun))
    numbers = itertools.count()
    monkeypatch.setattr(step._Maker, "stands", lambda _: next(numbers))  # no round is taken to begin as another did
    monkeypatch.setattr(step._Maker, "again", None)
    places: list[int] = []
    assert found == list(step.tasks_of(local, steady(local), speeds, begun=places)) and begun == places and len(begun) > 3
