"""Seconds of steps fitted to measured ones: a law that is known comes out again, noise and stalls besides."""

from __future__ import annotations

import random

import pytest

from foretell.errors import UserError
from foretell.lower.serving import StepShape
from foretell.price.serving.measured_steps import NAMES, MeasuredSteps, features, fitted

TRUE = (2e-3, 1e-5, 1e-4, 1e-7, 0.0, 5e-5)


def steps(count: int, noise: float, stalls: float) -> tuple[list[StepShape], list[float]]:
    draw = random.Random(1)
    shapes, took = [], []
    while len(shapes) < count:
        generating = draw.choice((0, 1, 2, 4, 8, 16, 32))
        chunks = tuple((draw.randrange(0, 100), draw.randrange(2, 200)) for _ in range(draw.randrange(0, 3)))
        if not generating and not chunks:
            continue
        shape = StepShape(generating, generating * draw.randrange(10, 300), chunks, generating + draw.randrange(0, len(chunks) + 1))
        exact = sum(factor * value for factor, value in zip(TRUE, features(shape), strict=True))
        shapes.append(shape)
        took.append(exact * draw.uniform(1 - noise, 1 + noise) * (20 if draw.random() < stalls else 1))
    return shapes, took


@pytest.mark.parametrize(("noise", "stalls", "within"), [(0.0, 0.0, 0.001), (0.05, 0.0, 0.02), (0.05, 0.02, 0.06)])
def test_a_known_law_is_found_again(noise: float, stalls: float, within: float) -> None:
    """Within the mean of what is put on it: two steps in a hundred that take twenty times as long move it by less than their share."""
    law = fitted(*steps(600, noise, stalls))
    for shape in (StepShape(1, 100, (), 1), StepShape(32, 3200, (), 32), StepShape(8, 800, ((0, 128),), 9), StepShape(0, 0, ((0, 64), (0, 64)), 2)):
        exact = sum(factor * value for factor, value in zip(TRUE, features(shape), strict=True))
        assert law.seconds(shape) == pytest.approx(exact, rel=within)
    assert law.off <= noise + 0.01


def test_nothing_makes_a_step_quicker_and_it_goes_through_json() -> None:
    law = fitted(*steps(100, 0.3, 0.1))
    assert min(law.factors) >= 0 and len(law.factors) == len(NAMES)
    assert MeasuredSteps.from_json(law.to_json()) == law
    with pytest.raises(UserError, match="foretell tune serve"):
        MeasuredSteps.from_json({"factors": {"step": "x"}})


def test_too_few_steps_are_said() -> None:
    with pytest.raises(UserError, match="3 steps are too few"):
        fitted(*steps(3, 0.0, 0.0))
