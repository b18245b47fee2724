"""Rounds that repeat are simulated a few times: what comes out is what simulating every round gives."""

from __future__ import annotations

import random

import pytest

from foretell.quantities import COLLECTIVES, COMPUTE, HOST, Task
from foretell.simulate.time.laps import Laps
from foretell.simulate.time.streams import LAUNCH_QUEUE, Timeline, simulate
from tests.further import one_in


def _draw(seed: int, *, host: float, length: int, kept: int) -> tuple[list[Task], int]:
    """Tasks of a first round, `kept` alike ones and an end; `host` times as long on the host as on the device."""
    dice = random.Random(seed)
    shape: list[tuple[str, float, tuple[int, ...], float, bool]] = []
    for _ in range(length):
        where = dice.choices((COMPUTE, COLLECTIVES, HOST), (8, 3, 0.2))[0]
        back = tuple(sorted({dice.randint(1, length + 3) for _ in range(dice.choice((0, 0, 1, 2)))}))
        shape.append((where, dice.uniform(0.5, 2), back, host * dice.uniform(0.5, 1.5), dice.random() < 0.01))
    tasks: list[Task] = []

    def add(number: int, share: float = 1.0) -> None:
        where, seconds, back, asking, waits = shape[number]
        after = tuple(len(tasks) - far for far in back if len(tasks) - far >= 0)
        tasks.append(Task(f"t{number}", where, seconds * share, after, asking, synchronises=waits, slower=1.0))

    for number in range(length):
        add(number, 0.7)
    for number in list(range(length)) * kept:
        add(number)
    for number in range(0, length, 2):
        add(number, 1.3)
    return tasks, length


def _told(found: Timeline) -> dict[str, object]:
    return {
        "seconds": found.seconds, "busy": dict(found.busy), "exposed": dict(found.exposed), "stall": found.host_stall_seconds,
        "critical": dict(found.critical),
    }  # fmt: skip


@pytest.mark.parametrize("host", [0.02, 0.6, 1.5])
@pytest.mark.parametrize("seed", one_in(3, range(6), "other numbers"))
def test_as_if_every_round_were_simulated(seed: int, host: float) -> None:
    length, kept, count = 40, 9, 60
    few, begin = _draw(seed, host=host, length=length, kept=kept)
    all_of_them, _ = _draw(seed, host=host, length=length, kept=count)
    laps = Laps(begin, length, kept, count)
    assert laps.unfold(few) == all_of_them
    for drag in (None, {COLLECTIVES: 0.3}):
        folded = simulate(few, queue=64, steps=2, drag=drag, laps=laps)
        whole = simulate(all_of_them, queue=64, steps=2, drag=drag)
        assert list(folded.start) == pytest.approx(list(whole.start), rel=1e-9, abs=1e-7)
        assert list(folded.finish) == pytest.approx(list(whole.finish), rel=1e-9, abs=1e-7)
        for name, value in _told(whole).items():
            assert _told(folded)[name] == pytest.approx(value, rel=1e-7, abs=1e-6), name


def test_most_draws_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is one of folded rounds, not of the same thing twice."""
    seen = []
    alike = Laps.alike

    def noted(self: Laps, *moments: list[float]) -> float | None:
        seen.append(alike(self, *moments))
        return seen[-1]

    monkeypatch.setattr(Laps, "alike", noted)
    for seed in range(6):
        few, begin = _draw(seed, host=0.02, length=40, kept=9)
        simulate(few, queue=64, steps=2, laps=Laps(begin, 40, 9, 60))
    assert sum(seconds is not None for seconds in seen) >= 4


def test_rounds_that_are_not_alike_yet_are_all_simulated() -> None:
    """The host gains a little on the device in every round, until the queue is full after some fifty of them."""
    one = Task("kernel", COMPUTE, 1.0, (), 0.95)
    folded = simulate([one] * 60, laps=Laps(10, 10, 4, 200))
    whole = simulate([one] * (60 + 196 * 10))
    assert len(folded.tasks) == len(whole.tasks) > LAUNCH_QUEUE
    assert folded.start == whole.start
    assert Laps(10, 10, 4, 200).alike([0.95 * n for n in range(60)], [1.0 * n for n in range(60)]) is None


@pytest.mark.parametrize("case", ["fsdp, accumulated", "accumulated", "hsdp, accumulated", "CPU, accumulated"])
def test_a_step_of_many_micro_batches(case: str) -> None:
    """The step that a plan is told to take, against one with every micro-batch laid on the timeline."""
    from dataclasses import replace

    from foretell.price.speeds import speeds_of
    from foretell.simulate.time.step import as_time, drags, plan_time, step_tasks, traits
    from tests.pure import golden

    one = golden.CASES[case]
    one = replace(one, plan=one.plan.with_(accumulate=24))
    (local,) = one.cost().programs
    speeds = speeds_of(one.plan, one.cluster, golden.OPTIONS)
    assert speeds is not None
    tasks = step_tasks(local, speeds)
    whole = simulate(tasks, steps=2, drag=drags(tasks, speeds))
    expected = as_time(whole, tasks, speeds, traits(local))
    found, timeline = plan_time(local, speeds)
    assert timeline.tasks == tasks
    assert list(timeline.start) == pytest.approx(list(whole.start), rel=1e-9, abs=1e-12)
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=1e-9)
    assert found.breakdown == pytest.approx(expected.breakdown, rel=1e-6, abs=1e-9)
    assert timeline.critical == pytest.approx(dict(whole.critical), rel=1e-6, abs=1e-9)
