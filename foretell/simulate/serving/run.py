"""Requests through a scheduler by a clock that is predicted: when each gets its first token, and all others.

    load ─► requests ─► scheduler ─► step ─► seconds of it ─► tokens ─► answers        no model, no device

Where prompts share no pages the same is done by counts (`counted`), which is many times quicker and the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from foretell.errors import UserError
from foretell.lower.serving import StepShape
from foretell.simulate.serving.counted import CountedClock
from foretell.simulate.serving.load import Load, Request
from foretell.simulate.serving.records import INSIDE, Limit, Served, SimulatedAnswer
from foretell.simulate.serving.scheduler import Scheduler, Sequence, Step

SEARCHES = 12
"""Rates that are tried for the highest."""
MOST_REQUESTS = 5000
"""Of a rate that is tried: quick ones would have many in the same time."""


def shape_of(step: Step, *, invariant: bool = False) -> StepShape:
    """`invariant`: by whose tokens they are, not by how many."""
    generating = attended = samples = 0
    chunks = []
    for row in step:
        samples += row.samples
        if row.generated if invariant else row.count == 1:
            generating += row.count
            attended += row.count * row.start + row.count * (row.count + 1) // 2
        else:
            chunks.append((row.start, row.count))
    return StepShape(generating, attended, tuple(chunks), samples)


Seconds = Callable[[StepShape], float]


class _ServingClock:
    """One run."""

    def __init__(self, load: Load, scheduler: Scheduler, seconds: Seconds, duration: float, most_waiting: int) -> None:
        self.load, self.scheduler, self.seconds = load, scheduler, seconds
        self.most_waiting, self.duration = most_waiting, duration
        self.coming = load.requests(duration)
        self.next: Request | None = next(self.coming, None)
        self.now = self.seen = 0.0
        """`seen`: what has come by then is known when the next step is decided."""
        self.ahead = scheduler.limits.ahead
        self.later: list[Sequence] = []
        """Who asked again while the next step was decided already."""
        self.count = 0
        self.answers: dict[Sequence, SimulatedAnswer] = {}
        self.last: dict[Sequence, float] = {}
        self.served = Served()

    def run(self) -> Served:
        served, scheduler = self.served, self.scheduler
        for _ in range(self.load.users):
            self._ask()
        while True:
            while not self.load.users and self.next is not None and self.next.at <= self.seen:
                self._ask()
            step = scheduler.step()
            later, self.later = self.later, []
            scheduler.waiting.extend(later)
            if not step:
                if later or self.seen < self.now:
                    self.seen = self.now
                    continue
                if self.load.users or self.next is None:
                    break
                self.now = self.seen = self.next.at
                continue
            served.pages_most = max(served.pages_most, scheduler.pages.held)
            served.running_most = max(served.running_most, len(scheduler.running))
            served.waiting_most = max(served.waiting_most, len(scheduler.waiting))
            served.timeline.append((self.now, scheduler.pages.held, len(scheduler.running), len(scheduler.waiting)))
            if len(scheduler.waiting) > self.most_waiting:
                served.gave_up = True
                break
            self._compute(step)
        served.seconds, served.preemptions = self.now, scheduler.preemptions
        return served

    def _ask(self) -> None:
        """The next request comes: now, where users wait for answers."""
        one = self.next
        if one is None or (self.load.users and self.now > self.duration):
            return
        self.next = next(self.coming, None)
        sequence = Sequence(self.count, one.prompt, one.output)
        if self.load.prefix:
            sequence.key = _keys(self.load.prefix // self.scheduler.pages.size, self.count)
        self.count += 1
        try:
            self.scheduler.add(sequence)
        except UserError:
            self.served.refused += 1
            return
        if self.ahead and self.load.users:
            self.later.append(self.scheduler.waiting.pop())
        self.answers[sequence] = SimulatedAnswer(self.now if self.load.users else one.at, one.prompt, one.output)

    def _compute(self, step: Step) -> None:
        served = self.served
        each = self.seconds(shape_of(step, invariant=self.scheduler.limits.invariant))
        begun, self.now = self.now, self.now + each
        self.seen = begun if self.ahead else self.now
        served.busy += each
        served.steps += 1
        given = [row.sequence for row in step if row.samples]  # prompts of others go on
        self.scheduler.done(step)
        late = 0
        for sequence in given:
            before = self.last.get(sequence)
            if before is None:
                self.answers[sequence].first = self.now
            elif before == begun:
                late += 1
            else:
                served.gaps.append((self.now - before, 1))
            self.last[sequence] = self.now
            if sequence.generated >= sequence.most:
                self._end(sequence)
        if late:
            served.gaps.append((each, late))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        answer = self.answers.pop(sequence)
        answer.last, answer.preempted = self.now, sequence.preempted
        self.last.pop(sequence)
        self.served.answers.append(answer)
        if self.load.users:
            self._ask()


def _keys(common: int, number: int) -> Callable[[int], Hashable]:
    """Of pages: the first ones are those of all prompts."""
    return lambda place: place if place < common else (number, place)


def simulated(
    load: Load, scheduler: Scheduler, seconds: Seconds, duration: float, most_waiting: int = 100_000, *, share: bool = True
) -> Served:  # fmt: skip
    """Requests that come within `duration`, until all are answered; or until more than `most_waiting` wait. Without `share` prompts that
    begin alike compute it each for itself."""
    limits = scheduler.limits
    if type(scheduler) is Scheduler and not (load.prefix and share):
        return CountedClock(load, scheduler.pages, limits, seconds, duration, most_waiting).run()
    return _ServingClock(load, scheduler, seconds, duration, most_waiting).run()


def capacity(
    load: Load, made: Callable[[], Scheduler], seconds: Seconds, limit: Limit, duration: float, guess: float | None = None
) -> tuple[float, Served] | None:
    """The highest rate of such requests of which `INSIDE` keep the limits, and how it goes then; None where not even single ones do.
    All rates are tried with the same draws: what differs between two is how close together the requests come."""

    def tried(rate: float) -> Served | None:
        scheduler = made()
        some = min(duration, MOST_REQUESTS / rate)
        found = simulated(load.at_rate(rate), scheduler, seconds, some, most_waiting=4 * scheduler.limits.running + 64)
        return found if not found.gave_up and found.answers and found.inside(limit) >= INSIDE else None

    least = 20.0 / duration
    low, high, best = 0.0, 0.0, None
    rate, factor = (max(least, guess), 1.3) if guess else (least, 4.0)
    while not high or not low:
        found = tried(rate)
        if found is not None:
            low, best = rate, found
            if rate > 1e6:
                break
            rate *= factor
        else:
            high = rate
            if rate <= least:
                return None
            rate = max(least, rate / factor) if not low else rate
    for _ in range(SEARCHES):
        if high / low < 1.01:
            break
        middle = (low * high) ** 0.5
        found = tried(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    assert best is not None
    return low, best
