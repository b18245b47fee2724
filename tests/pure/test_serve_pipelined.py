"""The scheduler of a pipeline: several steps under way, a sequence in one of them at most, and everyone gets on."""

from __future__ import annotations

import random
from collections import deque

import pytest

from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.pipelined import PipelineScheduler
from foretell.simulate.serving.scheduler import Scheduler, Sequence, Step, StepLimits


def finished(scheduler: Scheduler, step: Step) -> None:
    scheduler.done(step)
    for row in step:
        if not row.sequence.ended and row.sequence.generated >= row.sequence.most:
            scheduler.end(row.sequence)


@pytest.mark.parametrize("seed", range(40))
def test_everyone_is_finished_and_no_page_has_two_owners(seed: int) -> None:
    draw = random.Random(seed)
    depth, size = draw.choice((1, 2, 3, 4)), draw.choice((1, 4, 8))
    pages = Pages(draw.randrange(12, 40), size)
    limits = StepLimits(running=draw.randrange(1, 9), tokens=draw.randrange(9, 40))
    scheduler = PipelineScheduler(pages, limits, depth)
    longest = scheduler.longest
    alike = draw.random() < 0.5
    key = (lambda place: ("same", place)) if alike else None
    asked = [Sequence(number, draw.randrange(1, longest // 2), draw.randrange(1, longest // 2), key) for number in range(30)]
    for one in asked:
        scheduler.add(one)
    under_way: deque[Step] = deque()
    tokens = most = 0
    for turn in range(100_000):
        while len(under_way) < depth and (step := scheduler.step()):
            held = [row.sequence for earlier in under_way for row in earlier]
            assert not {row.sequence for row in step} & set(held), "a sequence is in one step at most"
            assert len({row.sequence for row in step}) == len(step) and sum(row.count for row in step) <= limits.tokens
            assert all(len(row.sequence.pages) * size >= row.start + row.count for row in step), "what is computed has pages"
            under_way.append(step)
        most = max(most, len(under_way))
        if turn == 7:
            scheduler.end(asked[draw.randrange(30)])  # cancelled, whatever it is at
        owners: dict[int, int] = {}
        for one in scheduler.running:
            for page in one.pages[len(one.pages) - (len(one.pages) - one.named if alike else len(one.pages)) :]:
                owners[page] = owners.get(page, 0) + 1
        assert all(count == 1 for count in owners.values())
        if not under_way:
            break
        tokens += sum(row.count for row in under_way[0])
        finished(scheduler, under_way.popleft())
    assert all(one.ended for one in asked) and pages.held == 0 and not scheduler.busy and not scheduler.running
    assert sum(one.generated == one.most for one in asked) >= 29 and most <= depth


def test_steps_under_way_share_those_that_generate() -> None:
    scheduler = PipelineScheduler(Pages(100, 4), StepLimits(running=8, tokens=64), 2)
    for number in range(8):
        scheduler.add(Sequence(number, 4, 50))
    scheduler.done(scheduler.step())
    first, second = scheduler.step(), scheduler.step()
    assert len(first) == len(second) == 4 and not scheduler.step()
    scheduler.done(first)
    assert {row.sequence for row in scheduler.step()} == {row.sequence for row in first}


def test_of_depth_one_it_is_the_scheduler_of_one_process() -> None:
    draw, made = random.Random(3), []
    for kind in (Scheduler, lambda pages, limits: PipelineScheduler(pages, limits, 1)):
        scheduler = kind(Pages(30, 4), StepLimits(running=5, tokens=24))
        draw.seed(5)
        for number in range(20):
            scheduler.add(Sequence(number, draw.randrange(1, 50), draw.randrange(1, 40)))
        steps = []
        while step := scheduler.step():
            steps.append([(row.sequence.number, row.start, row.count) for row in step])
            finished(scheduler, step)
        made.append((steps, scheduler.preemptions))
    assert made[0] == made[1] and made[0][1]
