"""Requests through a scheduler by a clock that is predicted: when each gets its first token, and all others.

    load ─► requests ─► scheduler ─► step ─► seconds of it ─► tokens ─► answers        no model, no device

Steps that only generate are taken together as long as nothing else happens; of such a stretch seconds are those between its first
and its last step, which are linear in the tokens that are attended to.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from foretell.errors import UserError
from foretell.lower.serving import StepShape
from foretell.simulate.serving.load import Load, Request
from foretell.simulate.serving.scheduler import Scheduler, Sequence, Step

INSIDE = 0.95
"""Share of requests that must keep the limits where a server is said to keep them."""
SEARCHES = 12
"""Rates that are tried for the highest."""
MOST_REQUESTS = 5000
"""Of a rate that is tried: quick ones would have many in the same time."""


def shape_of(step: Step) -> StepShape:
    generating = attended = samples = 0
    chunks = []
    for row in step:
        samples += row.samples
        if row.count == 1:
            generating += 1
            attended += row.start + 1
        else:
            chunks.append((row.start, row.count))
    return StepShape(generating, attended, tuple(chunks), samples)


Seconds = Callable[[StepShape], float]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What every answer should keep (an SLO); None: anything."""

    ttft: float | None = None
    """Seconds to the first token."""
    tpot: float | None = None
    """Seconds a token after it."""

    def kept(self, answer: SimulatedAnswer) -> bool:
        return (self.ttft is None or answer.ttft <= self.ttft) and (self.tpot is None or answer.tpot <= self.tpot)


@dataclass(slots=True)
class SimulatedAnswer:
    """One request: when it came, when its tokens did."""

    came: float
    prompt: int
    output: int
    first: float = 0.0
    last: float = 0.0
    preempted: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.came

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0


@dataclass
class Served:
    """All of a run."""

    answers: list[SimulatedAnswer] = field(default_factory=list)
    """That were finished, in that order."""
    refused: int = 0
    """Longer than all pages."""
    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Between two tokens of one sequence: seconds, and how many of these."""
    pages_most: int = 0
    waiting_most: int = 0
    running_most: int = 0
    preemptions: int = 0
    gave_up: bool = False
    """Requests came faster than they were answered; the rest was not simulated."""

    @property
    def output_rate(self) -> float:
        """Tokens generated a second."""
        return sum(one.output for one in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def total_rate(self) -> float:
        return sum(one.output + one.prompt for one in self.answers) / self.seconds if self.seconds else 0.0

    def ttft(self, share: float) -> float:
        return quantile([one.ttft for one in self.answers], share)

    def tpot(self, share: float) -> float:
        return quantile([one.tpot for one in self.answers if one.output > 1], share)

    def gap(self, share: float) -> float:
        """Seconds between two tokens, as every token counts."""
        return weighted(self.gaps, share)

    def inside(self, limit: Limit) -> float:
        """Share of requests that keep a limit; those that were refused do not."""
        all_of_them = len(self.answers) + self.refused
        return sum(map(limit.kept, self.answers)) / all_of_them if all_of_them else 1.0


def quantile(values: Iterable[float], share: float) -> float:
    """Linear between neighbours."""
    row = sorted(values)
    if not row:
        return 0.0
    place = share * (len(row) - 1)
    low = int(place)
    high = min(low + 1, len(row) - 1)
    return row[low] + (row[high] - row[low]) * (place - low)


def weighted(values: Iterable[tuple[float, int]], share: float) -> float:
    """The value below which a share of all counts lies."""
    row = sorted(values)
    total, sums = 0, []
    for _, count in row:
        total += count
        sums.append(total)
    return row[min(bisect.bisect_left(sums, share * total), len(row) - 1)][0] if row else 0.0


class _ServingClock:
    """One run."""

    def __init__(self, load: Load, scheduler: Scheduler, seconds: Seconds, duration: float, most_waiting: int) -> None:
        self.load, self.scheduler, self.seconds = load, scheduler, seconds
        self.most_waiting, self.duration = most_waiting, duration
        self.coming = load.requests(duration)
        self.next: Request | None = next(self.coming, None)
        self.now = 0.0
        self.count = 0
        self.answers: dict[Sequence, SimulatedAnswer] = {}
        self.last: dict[Sequence, float] = {}
        self.served = Served()

    def run(self) -> Served:
        served, scheduler = self.served, self.scheduler
        for _ in range(self.load.users):
            self._ask()
        while True:
            while not self.load.users and self.next is not None and self.next.at <= self.now:
                self._ask()
            step = scheduler.step()
            if not step:
                if self.load.users or self.next is None:
                    break
                self.now = self.next.at
                continue
            served.pages_most = max(served.pages_most, scheduler.pages.held)
            served.running_most = max(served.running_most, len(scheduler.running))
            served.waiting_most = max(served.waiting_most, len(scheduler.waiting))
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
        self.count += 1
        try:
            self.scheduler.add(sequence)
        except UserError:
            self.served.refused += 1
            return
        self.answers[sequence] = SimulatedAnswer(self.now if self.load.users else one.at, one.prompt, one.output)

    def _compute(self, step: Step) -> None:
        served = self.served
        shape = shape_of(step)
        steps = self.scheduler.alike(step)
        each = self.seconds(shape)
        if steps > 1 and not self.load.users and self.next is not None:
            steps = max(1, min(steps, -(-int((self.next.at - self.now) * 1e9) // max(1, int(each * 1e9)))))
        if steps > 1:
            last = self.seconds(shape._replace(attended=shape.attended + (steps - 1) * shape.generating))
            each = (each + last) / 2
            step = self.scheduler.skip(step, steps)
        begun, self.now = self.now, self.now + each * steps
        served.busy += each * steps
        served.steps += steps
        self.scheduler.done(step)
        late = 0
        for row in step:
            sequence = row.sequence
            if sequence.computed + 1 != sequence.length:  # its prompt goes on
                continue
            before = self.last.get(sequence)
            if before is None:
                self.answers[sequence].first = self.now
            elif before == begun:
                late += 1
            else:
                served.gaps.append((self.now - before - each * (steps - 1), 1))
                late += steps > 1
            self.last[sequence] = self.now
            if sequence.generated >= sequence.most:
                self._end(sequence)
        if late:
            served.gaps.append((each, late * steps))

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        answer = self.answers.pop(sequence)
        answer.last, answer.preempted = self.now, sequence.preempted
        self.last.pop(sequence)
        self.served.answers.append(answer)
        if self.load.users:
            self._ask()


def simulated(load: Load, scheduler: Scheduler, seconds: Seconds, duration: float, most_waiting: int = 100_000) -> Served:
    """Requests that come within `duration`, until all are answered; or until more than `most_waiting` wait."""
    return _ServingClock(load, scheduler, seconds, duration, most_waiting).run()


def capacity(load: Load, made: Callable[[], Scheduler], seconds: Seconds, limit: Limit, duration: float) -> tuple[float, Served] | None:
    """The highest rate of such requests of which `INSIDE` keep the limits, and how it goes then; None where not even single ones do."""

    def tried(rate: float) -> Served | None:
        scheduler = made()
        some = min(duration, MOST_REQUESTS / rate)
        found = simulated(load.at_rate(rate), scheduler, seconds, some, most_waiting=4 * scheduler.limits.running + 64)
        return found if not found.gave_up and found.answers and found.inside(limit) >= INSIDE else None

    low = 20.0 / duration
    best = tried(low)
    if best is None:
        return None
    high = low
    while (found := tried(high * 4)) is not None and high < 1e6:
        low, high, best = high * 4, high * 4, found
    high *= 4
    for _ in range(SEARCHES):
        middle = (low * high) ** 0.5
        found = tried(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
        if high / low < 1.01:
            break
    return low, best
