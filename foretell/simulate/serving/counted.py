"""The clock of `run` by counts: the same scheduler's decisions without touching every sequence in every step.

A sequence that generates does the same in each step: one token more, a page more every so many tokens, an end that is known when it
begins. So these are events, kept by the step at which they come (steps in which prompts go alone are not counted), and a step costs as
much as what happens in it. Pages are counted, not named, so that prompts share none here. Decisions and seconds are those of
`scheduler.Scheduler` taken step by step, bit for bit (a test holds that): the same steps, the same additions in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foretell.lower.serving import StepShape
from foretell.simulate.serving.load import Load, Request
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import Served, SimulatedAnswer
from foretell.simulate.serving.scheduler import StepLimits

Seconds = Callable[[StepShape], float]


@dataclass(eq=False, slots=True)
class _CountedSequence:
    """A request under way."""

    answer: SimulatedAnswer
    prompt: int
    most: int
    length: int
    computed: int = 0
    """While it generates: at the step it began to, `since`."""
    pages: int = 0
    since: int = -1
    """The step from which on it computes one token each; -1: its prompt is under way, or it waits."""
    began: int = 0
    """Its place among those that started, in their order."""
    round: int = 0
    """Times that it began to generate; events of an earlier one are void."""
    last: float | None = None
    """When its newest token came; while it generates, the end of the step before."""


class CountedClock:
    """One run."""

    def __init__(self, load: Load, pages: Pages, limits: StepLimits, seconds: Seconds, duration: float, most_waiting: int) -> None:
        self.load, self.size, self.most_running, self.tokens = load, pages.size, limits.running, limits.tokens
        self.count = self.free = pages.count
        self.seconds, self.duration, self.most_waiting = seconds, duration, most_waiting
        self.coming = load.requests(duration)
        self.next: Request | None = next(self.coming, None)
        self.now = self.seen = 0.0
        """`seen`: what has come by then is known when the next step is decided."""
        self.ahead, self.invariant = limits.ahead, limits.invariant
        self.prompts_first, self.reserves = limits.prompts_first, limits.reserves
        self.reserved = 0
        """Pages that running sequences take until they are finished."""
        self.later: list[_CountedSequence] = []
        """Who asked again while the next step was decided already."""
        self.step = 0
        """In which sequences generate."""
        self.paused = False
        """Prompts go alone in this step."""
        self.stepped = 0.0
        """When the last one in which they generated ended."""
        self.started = 0
        self.waiting: deque[_CountedSequence] = deque()
        self.running: list[_CountedSequence] = []
        self.prompts: list[_CountedSequence] = []
        """Of those running, whose prompts are under way, in the order they started."""
        self.generating = self.attended = 0
        self.fresh: list[_CountedSequence] = []
        """That generate from this step on and have no token of the step before."""
        self.begun: list[_CountedSequence] = []
        """That generate from this step on, and got a token when their prompts ended."""
        self.grows: dict[int, list[tuple[_CountedSequence, int]]] = {}
        self.ends: dict[int, list[tuple[_CountedSequence, int]]] = {}
        self.served = Served()

    def run(self) -> Served:
        served, users = self.served, self.load.users
        for _ in range(users):
            self._ask()
        while True:
            if not users:
                while self.next is not None and self.next.at <= self.seen:
                    self._ask()
            rows = self._scheduled()
            later, self.later = self.later, []
            self.waiting.extend(later)
            if not rows and not self.generating:
                if later or self.seen < self.now:
                    self.seen = self.now
                    continue
                if users or self.next is None:
                    break
                self.now = self.seen = self.next.at
                continue
            held = self.count - self.free
            if held > served.pages_most:
                served.pages_most = held
            if len(self.running) > served.running_most:
                served.running_most = len(self.running)
            waiting = len(self.waiting)
            if waiting > served.waiting_most:
                served.waiting_most = waiting
            served.timeline.append((self.now, held, len(self.running), waiting))
            if waiting > self.most_waiting:
                served.gave_up = True
                break
            self._compute(rows)
        served.seconds = self.now
        return served

    def _ask(self) -> None:
        """The next request comes: now, where users wait for answers."""
        one = self.next
        if one is None or (self.load.users and self.now > self.duration):
            return
        self.next = next(self.coming, None)
        if one.prompt + one.output > self.count * self.size:
            self.served.refused += 1
            return
        answer = SimulatedAnswer(self.now if self.load.users else one.at, one.prompt, one.output)
        (self.later if self.ahead and self.load.users else self.waiting).append(_CountedSequence(answer, one.prompt, one.output, one.prompt))

    # ------------------------------------------------------------------ what a step computes

    def _scheduled(self) -> list[tuple[_CountedSequence, int]]:
        """Pieces of prompts in the next step; those that generate are counted."""
        whole = self._alone() if self.prompts_first and self.waiting else []
        self.paused = bool(whole)
        if whole:
            return whole
        grow = self.grows.pop(self.step, None)
        if grow is not None:
            alive = [one for one, number in grow if one.round == number and one.since >= 0]
            if len(alive) > self.free:
                self._crowded(alive)
            else:
                for one in alive:
                    self._grow(one)
        left = self.tokens if self.invariant else self.tokens - self.generating
        rows: list[tuple[_CountedSequence, int]] = []
        for one in self.prompts:
            if left:
                count = min(self._end_of_piece(one) - one.computed, left)
                rows.append((one, count))
                left -= count
        while self.waiting and left and len(self.running) < self.most_running and self._starts(self.waiting[0]):
            one = self.waiting.popleft()
            count = min(self._end_of_piece(one), left)
            rows.append((one, count))
            left -= count
        if self.invariant:
            rows.sort(key=lambda row: row[0].computed < row[0].prompt)
        return rows

    def _end_of_piece(self, one: _CountedSequence) -> int:
        return one.prompt if self.invariant and one.computed < one.prompt else one.length

    def _alone(self) -> list[tuple[_CountedSequence, int]]:
        """Whole prompts in the order they came, as many as fit a step; the first goes however long it is."""
        rows: list[tuple[_CountedSequence, int]] = []
        left = self.tokens
        while self.waiting and len(self.running) < self.most_running and (not rows or self.waiting[0].length <= left):
            if not self._starts(self.waiting[0]):
                break
            one = self.waiting.popleft()
            rows.append((one, one.length))
            left -= one.length
        return rows

    def _starts(self, one: _CountedSequence) -> bool:
        """Give a sequence the pages for all its tokens; False where there are too few."""
        needed, whole = -(-one.length // self.size), -(-(one.prompt + one.most) // self.size)
        if needed > self.free or (self.reserves and self.reserved + whole > self.count):
            return False
        self.free -= needed
        self.reserved += whole
        one.pages = needed
        self.started += 1
        one.began = self.started
        self.running.append(one)
        self.prompts.append(one)
        return True

    def _release(self, one: _CountedSequence) -> None:
        self.free += one.pages
        self.reserved -= -(-(one.prompt + one.most) // self.size)

    def _grow(self, one: _CountedSequence) -> None:
        self.free -= 1
        one.pages += 1
        self.grows.setdefault(self.step + self.size, []).append((one, one.round))

    def _crowded(self, grow: list[_CountedSequence]) -> None:
        """Pages for some, in the order they started, at the cost of the youngest."""
        wanting = sorted(grow, key=lambda one: one.began)
        for one in wanting:
            while one.since >= 0:
                if self.free:
                    self._grow(one)
                    break
                self._preempt(self.running[-1])

    def _preempt(self, one: _CountedSequence) -> None:
        self.running.pop()
        self._release(one)
        if one.since >= 0:
            if one.since < self.step:
                one.last = self.stepped
            self._leaves(one)
        else:
            self.prompts.remove(one)
        one.pages = one.computed = 0
        one.answer.preempted += 1
        self.served.preemptions += 1
        self.waiting.appendleft(one)

    # ------------------------------------------------------------------ and what comes of it

    def _compute(self, rows: list[tuple[_CountedSequence, int]]) -> None:
        served, generating = self.served, 0 if self.paused else self.generating
        ones, attended, samples, chunks = generating, self.attended if generating else 0, generating, []
        for one, count in rows:
            if one.computed >= one.prompt if self.invariant else count == 1:
                ones += count
                attended += count * one.computed + count * (count + 1) // 2
            else:
                chunks.append((one.computed, count))
            samples += one.computed + count == one.length
        each = self.seconds(StepShape(ones, attended, tuple(chunks), samples))
        begun = self.now
        self.now = now = begun + each
        self.seen = begun if self.ahead else now
        served.busy += each
        served.steps += 1
        late = self._generated(generating, begun) if generating else 0
        finished = [] if self.paused else self._ended(generating)
        if rows:
            late += self._prompted(rows, begun, finished)
        if late:
            served.gaps.append((each, late))
        for one in finished:
            self.running.remove(one)
            self._release(one)
            one.answer.last = now
            served.answers.append(one.answer)
            if self.load.users:
                self._ask()

    def _generated(self, generating: int, begun: float) -> int:
        """All that generate have one token more: how many of these had one in the step before."""
        late, stayed = 0, generating - len(self.fresh) - len(self.begun)
        for one in (*self.begun, *self.fresh):
            late += self._sampled(one, begun)
        if self.stepped == begun:
            late += stayed
        elif stayed:
            self.served.gaps += [(self.now - self.stepped, 1)] * stayed
        self.begun, self.fresh, self.stepped = [], [], self.now
        return late

    def _ended(self, generating: int) -> list[_CountedSequence]:
        """Who has its last token with this step."""
        ended = self.ends.pop(self.step, None)
        self.attended += generating
        self.step += 1
        if ended is None:
            return []
        finished = sorted((one for one, number in ended if one.round == number and one.since >= 0), key=lambda one: one.began)
        for one in finished:
            self._leaves(one)
        return finished

    def _prompted(self, rows: list[tuple[_CountedSequence, int]], begun: float, finished: list[_CountedSequence]) -> int:
        """Prompts are so much further; some gave a token: how many of these had one in the step before."""
        late, through = 0, set()
        for one, count in rows:
            one.computed += count
            sampled = one.computed == one.length
            if sampled:
                one.length += 1
                late += self._sampled(one, begun)
            if sampled and one.length - one.prompt >= one.most:
                finished.append(one)
            elif one.length - one.computed == 1 and (one.computed >= one.prompt or not self.invariant):
                self._begins(one, fresh=not sampled)
            else:
                continue
            through.add(one)
        if through:
            self.prompts = [one for one in self.prompts if one not in through]
        return late

    def _sampled(self, one: _CountedSequence, begun: float) -> bool:
        """A token of a sequence that has none of the step before it: its first, or the first since it lost its pages."""
        before, one.last = one.last, self.now
        if before is None:
            one.answer.first = self.now
        elif before == begun:
            return True
        else:
            self.served.gaps.append((self.now - before, 1))
        return False

    def _begins(self, one: _CountedSequence, *, fresh: bool) -> None:
        """From the next step on it computes one token in each."""
        one.since = self.step
        one.round += 1
        self.generating += 1
        self.attended += one.computed + 1
        (self.fresh if fresh else self.begun).append(one)
        self.grows.setdefault(self.step + one.pages * self.size - one.computed, []).append((one, one.round))
        self.ends.setdefault(self.step + one.most - (one.length - one.prompt) - 1, []).append((one, one.round))

    def _leaves(self, one: _CountedSequence) -> None:
        """It generates no more, from this step on."""
        self.generating -= 1
        self.attended -= one.computed + self.step - one.since + 1
        one.length += self.step - one.since
        one.since = -1
        one.round += 1
        for some in (self.fresh, self.begun):
            if one in some:
                some.remove(one)
