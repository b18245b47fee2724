"""Learning rates: against formulas worked out by hand and against PyTorch's own schedulers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from foretell.errors import UserError
from foretell.runtime.train.schedule import Schedule, usual_warmup


def rates(schedule: Schedule) -> list[float]:
    return [schedule.at(step) for step in range(schedule.steps)]


def test_the_warm_up_rises_in_a_straight_line_to_the_peak() -> None:
    for kind in ("constant", "cosine", "wsd"):
        assert rates(Schedule(kind=kind, peak=8.0, steps=100, warmup=4))[:4] == [2.0, 4.0, 6.0, 8.0]


def test_constant_stays() -> None:
    assert set(rates(Schedule(kind="constant", peak=0.5, steps=20))) == {0.5}


def test_cosine_is_pytorchs_annealing_to_a_tenth() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=3e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=49, eta_min=3e-5)
    ours = Schedule(kind="cosine", peak=3e-4, steps=50)
    for step in range(50):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()
    assert ours.at(49) == pytest.approx(3e-5) and ours.at(1000) == pytest.approx(3e-5)


def test_cosine_after_a_warm_up_is_at_its_middle_halfway() -> None:
    schedule = Schedule(kind="cosine", peak=1.0, steps=111, warmup=10)
    assert schedule.at(10) == 1.0 and schedule.at(60) == pytest.approx(0.55) and schedule.at(110) == pytest.approx(0.1)


def test_wsd_is_level_then_falls_in_a_straight_line_to_nothing() -> None:
    found = rates(Schedule(kind="wsd", peak=2.0, steps=100, warmup=10))
    assert set(found[10:81]) == {2.0}
    fall = [a - b for a, b in pairwise(found[80:])]
    assert max(fall) == pytest.approx(min(fall)) and found[-1] == 0.0


def test_no_step_is_negative_or_above_the_peak_however_short_the_run() -> None:
    for kind in ("constant", "cosine", "wsd"):
        for steps in range(1, 12):
            for warmup in range(steps + 1):
                found = rates(Schedule(kind=kind, peak=1.0, steps=steps, warmup=warmup))
                assert all(0 <= rate <= 1 and math.isfinite(rate) for rate in found), (kind, steps, warmup)
                assert max(found) == 1.0, (kind, steps, warmup)


def test_the_usual_warm_up_is_a_twentieth_and_never_more_than_2000() -> None:
    assert [usual_warmup(steps) for steps in (1, 100, 1000, 1_000_000)] == [0, 5, 50, 2000]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "cosin"}, "did you mean cosine"),
        ({"peak": 0.0}, "above zero"),
        ({"peak": math.nan}, "above zero"),
        ({"steps": 0}, "at least one step"),
        ({"warmup": 11}, "does not go into a run of 10"),
    ],
)
def test_what_makes_no_sense_is_said(wrong: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Schedule(**{"peak": 1.0, "steps": 10, **wrong})
