"""The timeline simulator: schedules worked out by hand, and a slow event-by-event simulator on random programs."""

from __future__ import annotations

import random

import pytest

from foretell.quantities import COLLECTIVES, COMPUTE, D2H, H2D, HOST, Task
from foretell.simulate.time.streams import Timeline, simulate


def work(name: str, seconds: float, *after: int, on: str = COMPUTE, host: float = 0.0, wait: bool = False) -> Task:
    return Task(name, on, seconds, after, host, synchronises=wait, slower=1.0)


# ---------------------------------------------------------------- schedules by hand


def test_a_prefetched_gather_hides_under_compute() -> None:
    """Gather 0 is exposed (2), gather 1 runs under block 0, reduce of block 1 sticks out at the end (3)."""
    line = simulate([
        work("gather 0", 2, on=COLLECTIVES),
        work("gather 1", 2, on=COLLECTIVES),
        work("block 0", 5, 0),
        work("block 1", 5, 1),
        work("reduce 1", 3, 3, on=COLLECTIVES),
    ])  # fmt: skip
    assert line.start == [0, 2, 2, 7, 12]
    assert line.finish == [2, 4, 7, 12, 15]
    assert line.seconds == 15
    assert line.busy[COMPUTE] == 10 and line.busy[COLLECTIVES] == 7
    assert line.exposed_communication == 5
    assert line.critical == {COLLECTIVES: 5, COMPUTE: 10}
    assert line.binds == COMPUTE
    assert line.bubble == pytest.approx(1 / 3)


def test_a_gather_longer_than_compute_binds() -> None:
    line = simulate([
        work("gather 0", 4, on=COLLECTIVES),
        work("block 0", 1, 0),
        work("gather 1", 4, on=COLLECTIVES),
        work("block 1", 1, 2),
    ])  # fmt: skip
    assert line.finish == [4, 5, 8, 9]
    assert line.exposed_communication == 7
    assert line.binds == COLLECTIVES


def test_short_tasks_wait_for_the_host() -> None:
    """The host needs 10 for each task that runs 1: the device stalls 10 before the first, 9 before the others."""
    line = simulate([work(str(i), 1, host=10) for i in range(4)])
    assert line.start == [10, 20, 30, 40]
    assert line.seconds == 41
    assert line.host_stall_seconds == 10 + 9 * 3
    assert line.critical == {HOST: 40, COMPUTE: 1}
    assert line.binds == HOST


def test_long_tasks_hide_the_host() -> None:
    line = simulate([work(str(i), 10, host=1) for i in range(4)])
    assert line.start == [1, 11, 21, 31]
    assert line.host_stall_seconds == 1
    assert line.critical == {HOST: 1, COMPUTE: 40}


def test_a_full_queue_holds_the_host_back() -> None:
    """Two tasks may wait: the third is issued when the first starts, so the short ones at the end follow late."""
    tasks = [work("a", 10, host=1), work("b", 10, host=1), work("c", 1, host=1), work("d", 1, host=1)]
    assert simulate(tasks).start == [1, 11, 21, 22]
    queued = simulate([*tasks[:2], work("other", 1, on=H2D, host=1), *tasks[2:]], queue=1)
    # b is issued once a starts (1 + 1), "other" right after it at 3, c once b starts (11 + 1), d once c starts (21 + 1).
    assert queued.start == [1, 11, 3, 21, 22]
    late = simulate([work("a", 10, host=1), work("b", 1, host=1), work("c", 1, host=15)], queue=1)
    assert late.start == [1, 11, 26]
    assert late.host_stall_seconds == 1 + 14


def test_synchronising_stops_the_host_from_running_ahead() -> None:
    line = simulate([work("loss", 5, host=1, wait=True), work("next", 5, host=2)])
    assert line.start == [1, 8]
    assert line.host_stall_seconds == 1 + 2
    assert line.critical == {HOST: 3, COMPUTE: 10}


def test_work_on_the_host_blocks_what_is_issued_after_it() -> None:
    """Gradients come down, the CPU updates, parameters go up."""
    line = simulate([
        work("backward", 3, host=1),
        work("down", 2, 0, on=D2H),
        work("adam", 4, 1, on=HOST),
        work("up", 2, 2, on=H2D, host=1),
    ])  # fmt: skip
    assert line.start == [1, 4, 6, 11]
    assert line.seconds == 13
    assert line.busy[HOST] == 6
    assert line.critical == {HOST: 6, COMPUTE: 3, D2H: 2, H2D: 2}
    assert line.exposed[D2H] == 2


def test_a_long_run_of_steps_hides_the_first_issue() -> None:
    """Alone a step takes 1 + 20; in a row the host is ahead, and the period is the 20 seconds of compute."""
    tasks = [work("a", 10, host=1), work("b", 10, host=1)]
    assert simulate(tasks).seconds == 21
    assert simulate(tasks, steps=3).seconds == 20
    host_bound = [work("a", 1, host=4), work("b", 1, host=4)]
    assert simulate(host_bound, steps=5).seconds == 8


def test_collectives_drag_compute_they_overlap() -> None:
    tasks = [work("gather", 4, on=COLLECTIVES), work("a", 10), work("b", 10)]
    line = simulate(tasks, drag={COLLECTIVES: 0.5})
    assert line.finish[1] == pytest.approx(4 + 10 - 4 / 1.5)  # two thirds of the work as long as the gather runs
    assert line.seconds == pytest.approx(line.finish[1] + 10)
    pieces = simulate([tasks[0], *[work(str(number), 1) for number in range(20)]], drag={COLLECTIVES: 0.5})
    assert pieces.seconds == pytest.approx(line.seconds)
    covered = simulate([work("gather", 100, on=COLLECTIVES), work("a", 10)], drag={COLLECTIVES: 0.5})
    assert covered.finish[1] == pytest.approx(15)


def test_tasks_are_dragged_by_what_each_loses() -> None:
    def tasks(slower: float) -> list[Task]:
        return [work("gather", 4, on=COLLECTIVES), work("a", 10)._replace(slower=slower)]

    assert simulate(tasks(0.5), drag={COLLECTIVES: 1.0}).seconds == simulate(tasks(1.0), drag={COLLECTIVES: 0.5}).seconds
    assert simulate(tasks(0.0), drag={COLLECTIVES: 1.0}).seconds == simulate(tasks(1.0)).seconds


def test_nothing_takes_no_time() -> None:
    line = simulate([])
    assert line.seconds == 0 and line.critical == {} and line.bubble == 0


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ([work("a", 1, 0)], "not issued before"),
        ([work("a", 1), work("b", 1, 2)], "not issued before"),
        ([work("a", -1)], "less than no time"),
    ],
)
def test_impossible_programs_are_refused(tasks: list[Task], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        simulate(tasks)


# ---------------------------------------------------------------- against a slow simulator


def reference(tasks: list[Task], queue: int) -> tuple[list[float], list[float]]:
    """Integer clock ticks: at every tick the host and each resource look at what they may do next."""
    count = len(tasks)
    start, finish = [-1] * count, [-1] * count
    issued = [-1] * count
    resources = sorted({task.resource for task in tasks})
    lines = {name: [i for i in range(count) if tasks[i].resource == name] for name in resources}
    place = {i: k for line in lines.values() for k, i in enumerate(line)}
    following, host_free, now = 0, 0, 0
    while any(end < 0 or end > now for end in finish):
        changed = True
        while changed:
            changed = False
            # the host: free, not waiting for a synchronising or own task, and with room in the queue
            if following < count and host_free <= now:
                before = following - 1
                blocked = before >= 0 and (tasks[before].synchronises or tasks[before].resource == HOST)
                waiting = blocked and not (0 <= finish[before] <= now)
                line, k = lines[tasks[following].resource], place[following]
                full = k >= queue and not (0 <= start[line[k - queue]] <= now)
                if not waiting and not full:
                    issued[following] = now + int(tasks[following].host_seconds)
                    host_free = issued[following]
                    following += 1
                    changed = True
            for name in resources:
                for k, i in enumerate(lines[name]):
                    if start[i] >= 0:
                        continue
                    previous = k == 0 or 0 <= finish[lines[name][k - 1]] <= now
                    ready = all(0 <= finish[j] <= now for j in tasks[i].after)
                    if 0 <= issued[i] <= now and previous and ready:
                        start[i], finish[i] = now, now + int(tasks[i].seconds)
                        changed = True
                    break
        now += 1
    return [float(x) for x in start], [float(x) for x in finish]


def random_program(seed: int) -> tuple[list[Task], int]:
    source = random.Random(seed)
    tasks = []
    for i in range(source.randint(1, 40)):
        resource = source.choice([COMPUTE, COMPUTE, COMPUTE, COLLECTIVES, H2D, HOST])
        after = tuple(sorted(source.sample(range(i), min(i, source.choice([0, 0, 1, 2])))))
        tasks.append(
            Task(
                str(i), resource, source.randint(1, 9), after, source.choice([0, 0, 1, 3, 8]),
                synchronises=source.random() < 0.1,
            )
        )  # fmt: skip
    return tasks, source.choice([1, 2, 3, 1024])


@pytest.mark.parametrize("seed", range(150))
def test_equal_to_the_slow_simulator(seed: int) -> None:
    tasks, queue = random_program(seed)
    line = simulate(tasks, queue=queue)
    start, finish = reference(tasks, queue)
    assert list(line.start) == start
    assert list(line.finish) == finish
    assert line.seconds == max(finish)
    check_sums(line)


def check_sums(line: Timeline) -> None:
    """Exposure counted tick by tick; the longest chain has no hole in it."""
    ticks = range(int(line.seconds))
    at = {
        name: {
            t
            for i, task in enumerate(line.tasks)
            if task.resource == name
            for t in ticks
            if line.start[i] <= t < line.finish[i]
        }
        for name in {task.resource for task in line.tasks}
    }
    for name, seconds in line.exposed.items():
        assert seconds == len(at.get(name, set()) - at.get(COMPUTE, set()))
    assert sum(line.critical.values()) == line.seconds


def test_fifty_thousand_tasks() -> None:
    tasks = []
    for i in range(50_000):
        resource = COLLECTIVES if i % 10 == 0 else COMPUTE
        tasks.append(Task("op", resource, 1e-5, (i - 1,) if i % 7 == 0 and i else (), 5e-6, "gemm"))
    assert 0.45 <= simulate(tasks).seconds < 0.5  # nine of ten on compute, 10 us each
