"""The environment of kernels: several at a time, whatever they do; and the estimator of turns against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from foretell.tune.clock.measure import TimingOptions
from foretell.tune.generate.gym import KernelGym, leave_one_out
from foretell.tune.search.trial import Trials
from foretell.tune.verify.process import KernelLimits, KernelSetting
from foretell.tune.verify.source import Code
from foretell.tune.verify.types import HarnessOptions
from tests.pure.scripted import TASK, kernel, loop, through, whole, wrong

SETTING = KernelSetting(limits=KernelLimits(seconds=2.0))


@pytest.mark.slow(reason="test_kernel_search.py verifies side by side with a crash among them; test_ways.py replays what a gym said")
def test_whatever_a_kernel_does_the_others_are_scored() -> None:
    """Crash, hang, wrong values and a pass-through beside two good ones, three at a time; in the order in which they were given."""
    crash = kernel("def forward(self, x):\n    import os\n\n    os.abort()")
    hang = kernel("def forward(self, x):\n    while True:\n        pass")
    task = Code(path="task.py", text=TASK, kind="Model")
    with Trials(task, SETTING, HarnessOptions(seed=1, gradients=False), TimingOptions(l2_bytes=1 << 12)) as trials:
        gym = KernelGym(trials, workers=3)
        try:
            found = gym.measured([whole(), crash, wrong("values"), hang, through(), loop(), "class ModelNew:\n    pass\n"])
            assert not gym.passes_through(whole()) and gym.passes_through(through())
        finally:
            gym.end()
    assert [one.result.check for one in found] == ["", "crash", "values", "hang", "passthrough", "", "raises"]
    assert [one.reward > 0 for one in found] == [True, False, False, False, False, True, False]
    assert found[0].reward > found[5].reward and found[0].reward == found[0].result.speedup
    assert found[5].counters["ops"]["vdot"] == 24 and found[5].counters["reference_ops"]["rsqrt"] == 24
    assert {one["name"] for one in found[5].counters["longest"]} >= {"aten::dot", "aten::div"}
    assert found[5].counters["microseconds"] > found[0].counters["microseconds"]


# ---------------------------------------------------------------- the estimator


def probabilities(parameter: float) -> tuple[float, float]:
    """A policy with one parameter and two actions a turn."""
    high = 1 / (1 + math.exp(-parameter))
    return 1 - high, high


def slope(parameter: float, action: int) -> float:
    """Of the log of an action's probability."""
    return (1 if action else 0) - probabilities(parameter)[1]


def rewarded(actions: tuple[int, ...]) -> list[float]:
    """The second turn's depends on the first: what was written is built on."""
    first, second = actions
    return [0.3 * first, 2.0 * first * second - 0.5 * second]


def true_gradient(parameter: float, discount: float) -> float:
    def value(at: float) -> float:
        return sum(
            math.prod(probabilities(at)[one] for one in actions) * sum(discount**turn * reward for turn, reward in enumerate(rewarded(actions)))
            for actions in itertools.product((0, 1), repeat=2)
        )

    return (value(parameter + 1e-5) - value(parameter - 1e-5)) / 2e-5


def gradient(parameter: float, drawn: Sequence[tuple[int, ...]], advantages: Sequence[Sequence[float]]) -> float:
    """As a policy's optimizer adds it up."""
    rows = zip(drawn, advantages, strict=True)
    return sum(slope(parameter, one) * gain for actions, row in rows for one, gain in zip(actions, row, strict=True))


@pytest.mark.parametrize("answers", [2, 3])
@pytest.mark.parametrize("parameter", [-0.7, 0.4])
def test_leaving_one_out_is_unbiased(answers: int, parameter: float) -> None:
    """The mean over all draws of several answers, each weighted by how likely it is, is the gradient itself."""
    each = list(itertools.product((0, 1), repeat=2))
    mean = 0.0
    for drawn in itertools.product(each, repeat=answers):
        likely = math.prod(probabilities(parameter)[one] for actions in drawn for one in actions)
        mean += likely * gradient(parameter, drawn, leave_one_out([rewarded(actions) for actions in drawn])) / answers
    assert mean == pytest.approx(true_gradient(parameter, 1.0), rel=1e-6)


def test_a_mean_that_includes_the_answer_itself_is_biased() -> None:
    """What leaving one out is for: with all in the mean the estimate shrinks."""
    each, parameter, answers = list(itertools.product((0, 1), repeat=2)), 0.4, 2
    mean = 0.0
    for drawn in itertools.product(each, repeat=answers):
        likely = math.prod(probabilities(parameter)[one] for actions in drawn for one in actions)
        shrunk = [[gain * (answers - 1) / answers for gain in row] for row in leave_one_out([rewarded(actions) for actions in drawn])]
        mean += likely * gradient(parameter, drawn, shrunk) / answers
    assert mean == pytest.approx(true_gradient(parameter, 1.0) / 2, rel=1e-6)


def test_answers_of_other_lengths_are_no_group() -> None:
    for bad in ([[1.0]], [[1.0], [1.0, 2.0]], []):
        with pytest.raises(ValueError, match="several answers"):
            leave_one_out(bad)
