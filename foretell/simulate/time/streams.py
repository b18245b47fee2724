"""One timeline for compute, collectives, copies and the host: when each task starts, and what the step waits for.

    host         │ issue 0 │ issue 1 │ issue 2 │ …        one thread, in program order, ahead of the device
    compute      │         │ task 0 ────────│ task 2 ──│
    collectives  │                  │ task 1 ────│       a resource runs its tasks one by one, in issue order

A task starts when the host has issued it, when its resource has finished what was issued before, and when every
task it comes after has finished. The host runs ahead until a queue of `queue` tasks on one resource is full, or
until a task that synchronises has finished. A task on the resource "host" runs on the issuing thread itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretell.quantities import COLLECTIVES, COMPUTE, HOST, Task
from foretell.simulate.time.laps import Laps

LAUNCH_QUEUE = 1024
"""Kernels that CUDA takes ahead of the device before a launch waits; a figure seen in public, assumed."""

"""How much longer compute takes beside another resource: all of it, or by the kind of task."""

_NOTHING, _HOST = -1, -2


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When each task of one step ran. Seconds count from the start of the step."""

    tasks: Sequence[Task]
    start: Sequence[float]
    finish: Sequence[float]
    seconds: float
    """From the end of the step before (or the first issue) to the end of the last task."""
    busy: Mapping[str, float]
    """Resource → seconds it worked; "host" is what the host spent issuing and on tasks of its own."""
    exposed: Mapping[str, float]
    """Resource other than compute and host → seconds it worked while compute did not."""
    host_stall_seconds: float
    """Compute was free and its inputs were ready, but the host had not issued the next task."""
    critical: Mapping[str, float]
    """Seconds by resource along the chain of tasks, each waiting for the one before, that ends with the step.
    In a first step they add up to `seconds`."""

    @property
    def binds(self) -> str:
        """The resource that most of the longest chain runs through."""
        return max(self.critical, key=lambda name: self.critical[name], default=COMPUTE)

    @property
    def exposed_communication(self) -> float:
        """Seconds in which collectives ran and compute did not."""
        return self.exposed.get(COLLECTIVES, 0.0)

    @property
    def bubble(self) -> float:
        """Share of the step in which compute did nothing."""
        return 1 - self.busy.get(COMPUTE, 0.0) / self.seconds if self.seconds else 0.0


def simulate(
    tasks: Sequence[Task],
    *,
    queue: int = LAUNCH_QUEUE,
    steps: int = 1,
    drag: Mapping[str, float] | None = None,
    laps: Laps | None = None,
) -> Timeline:
    """Run the tasks `steps` times in a row and describe the last time; with `laps`, that of all rounds they stand for.

    With more than one step the host is as far ahead as it is in a long run. `drag` names the resources beside which compute is
    slower, since collectives take cores and memory bandwidth, and the part of `Task.slower` that counts there; it is applied to
    the overlap of the undisturbed schedule, then once more to the schedule that gives.
    """
    run = _TaskRun(tasks, queue)
    durations = [task.seconds for task in tasks]
    result = run.steps(durations, steps)
    for stretched in (False, True) if drag else ():
        durations = run.dragged(result, drag or {}, stretched)
        result = run.steps(durations, steps)
    if laps is None:
        return run.timeline(result, durations)
    whole, seconds = laps.unfold(tasks), laps.alike(result.start, result.finish, result.issued)
    if seconds is None:
        return simulate(whole, queue=queue, steps=steps, drag=drag)
    return _TaskRun(whole, queue, checked=True).timeline(result.unfold(laps, seconds), laps.repeat(durations))


class Makespan:
    """The same tasks with other seconds each time: when the last of them ends."""

    def __init__(self, tasks: Sequence[Task], *, queue: int = LAUNCH_QUEUE) -> None:
        self._run = _TaskRun(tasks, queue)

    def seconds(self, durations: Sequence[float]) -> float:
        return self._run.steps(durations, 1).end


class _Result(NamedTuple):
    start: list[float]
    finish: list[float]
    cause: list[int]
    """What a start waited for: position of a task, `_HOST`, or `_NOTHING`."""
    issue_cause: list[int]
    """What the issue of a task waited for: a task's finish (its position), its start (position + count), or nothing
    but the issue before (`_NOTHING`)."""
    issued: list[float]
    stalls: list[float]
    """By task: compute was free and its inputs were ready, but it was not issued."""
    begin: float
    end: float

    def unfold(self, laps: Laps, seconds: float) -> _Result:
        """The same of all rounds."""
        count, more = len(self.start), laps.extra * laps.length
        issues = laps.positions([cause - count if cause >= count else cause for cause in self.issue_cause])
        whole = len(issues)
        started = laps.repeat([cause >= count for cause in self.issue_cause])
        assert whole == count + more, "every round has as many tasks"
        return _Result(
            laps.repeat(self.start, seconds), laps.repeat(self.finish, seconds), laps.positions(self.cause),
            [cause + whole if late else cause for cause, late in zip(issues, started, strict=True)],
            laps.repeat(self.issued, seconds), laps.repeat(self.stalls), self.begin, self.end + laps.extra * seconds,
        )  # fmt: skip


class _TaskRun:
    """The list of tasks in a form a plain loop walks quickly."""

    def __init__(self, tasks: Sequence[Task], queue: int, *, checked: bool = False) -> None:
        if queue < 1:
            raise ValueError("the queue holds at least one task")
        self.tasks = tasks
        self.queue = queue
        names: dict[str, int] = {COMPUTE: 0, HOST: 1}
        for name in {task.resource for task in tasks}:
            names.setdefault(name, len(names))
        self.where = [names[task.resource] for task in tasks]
        self.names = list(names)
        if not checked:
            self._check()

    def _check(self) -> None:
        for position, (name, _, seconds, after, host_seconds, *_) in enumerate(self.tasks):
            if after and not (min(after) >= 0 and max(after) < position):
                raise ValueError(f"task {position} ({name}) comes after one that is not issued before it")
            if seconds < 0 or host_seconds < 0:
                raise ValueError(f"task {position} ({name}) takes less than no time")

    def steps(self, durations: Sequence[float], steps: int) -> _Result:
        host, end = 0.0, 0.0
        free = [0.0] * len(self.names)
        starts: list[list[float]] = [[] for _ in self.names]
        result = _Result([], [], [], [], [], [], 0.0, 0.0)
        for _ in range(max(steps, 1)):
            result = self._once(durations, host, free, starts, end)
            host, end = result.issued[-1] if result.issued else host, max(end, result.end)
            starts = [line[-self.queue :] for line in starts]
        return result

    def _once(
        self, durations: Sequence[float], host: float, free: list[float], starts: list[list[float]], begin: float
    ) -> _Result:
        """One pass in program order; `free` and `starts` carry on from the pass before."""
        where, queue, count = self.where, self.queue, len(self.tasks)
        start, finish, issued = [0.0] * count, [0.0] * count, [0.0] * count
        cause, issue_cause = [_NOTHING] * count, [_NOTHING] * count
        last = [_NOTHING] * len(free)
        lines: list[list[int]] = [[] for _ in free]
        stalls = [0.0] * count
        end, synced = begin, _NOTHING
        for position, (_, _, _, after, host_seconds, _, _, _, synchronises, _) in enumerate(self.tasks):
            resource = where[position]
            begins = starts[resource]
            issue_cause[position], synced = synced, _NOTHING
            if len(begins) >= queue and begins[-queue] > host:
                host = begins[-queue]
                if len(lines[resource]) >= queue:
                    issue_cause[position] = lines[resource][-queue] + count
            host += host_seconds
            ready, why = free[resource], last[resource]
            for before in after:
                if finish[before] > ready:
                    ready, why = finish[before], before
            if host > ready:
                if resource == 0 and host > begin:
                    stalls[position] = host - max(ready, begin)
                ready, why = host, _HOST
            done = ready + durations[position]
            start[position], finish[position], cause[position] = ready, done, why
            free[resource], last[resource] = done, position
            begins.append(ready)
            lines[resource].append(position)
            if resource == 1 or (synchronises and done > host):
                host, synced = done, position
            issued[position] = host
            if done > end:
                end = done
        return _Result(start, finish, cause, issue_cause, issued, stalls, begin, end)

    def dragged(self, result: _Result, drag: Mapping[str, float], stretched: bool) -> list[float]:
        """Durations with compute stretched by its overlap with the resources that drag.

        Where the schedule has the stretch in it already, a second of overlap did less than a second's work; so it matters not whether
        ops are told one by one or many as one."""
        durations = [task.seconds for task in self.tasks]
        most = [1.0] * len(durations)
        mine = [position for position, resource in enumerate(self.where) if resource == 0]
        for name, part in drag.items():
            if name not in self.names or not part:
                continue
            number = self.names.index(name)
            theirs = [
                (result.start[p], result.finish[p]) for p, resource in enumerate(self.where) if resource == number
            ]
            first = 0
            for position in mine:
                begin, end = result.start[position], result.finish[position]
                while first < len(theirs) and theirs[first][1] <= begin:
                    first += 1
                shared, next_one = 0.0, first
                while next_one < len(theirs) and theirs[next_one][0] < end:
                    shared += min(end, theirs[next_one][1]) - max(begin, theirs[next_one][0])
                    next_one += 1
                if shared:
                    slower = part * self.tasks[position].slower
                    most[position] += slower
                    durations[position] += shared * (slower / (1 + slower) if stretched else slower)
        return [min(found, task.seconds * limit) for found, task, limit in zip(durations, self.tasks, most, strict=True)]

    def timeline(self, result: _Result, durations: Sequence[float]) -> Timeline:
        busy = dict.fromkeys(self.names, 0.0)
        for resource, seconds in zip(self.where, durations, strict=True):
            busy[self.names[resource]] += seconds
        busy[HOST] += sum(task.host_seconds for task in self.tasks)
        origin = result.begin
        return Timeline(
            tasks=self.tasks,
            start=[moment - origin for moment in result.start] if origin else result.start,
            finish=[moment - origin for moment in result.finish] if origin else result.finish,
            seconds=result.end - origin,
            busy=busy,
            exposed=self._exposed(result),
            host_stall_seconds=sum(result.stalls),
            critical=self._critical(result, durations),
        )

    def _exposed(self, result: _Result) -> dict[str, float]:
        """By resource, the part of its busy time that no compute covers; both run in order, so one sweep does."""
        start, finish = result.start, result.finish
        cover = [position for position, resource in enumerate(self.where) if resource == 0]
        found = {}
        for number, name in enumerate(self.names):
            if name in (COMPUTE, HOST):
                continue
            total, first = 0.0, 0
            for mine in [position for position, resource in enumerate(self.where) if resource == number]:
                begin, end = start[mine], finish[mine]
                total += end - begin
                while first < len(cover) and finish[cover[first]] <= begin:
                    first += 1
                following = first
                while following < len(cover) and start[cover[following]] < end:
                    total -= min(end, finish[cover[following]]) - max(begin, start[cover[following]])
                    following += 1
            found[name] = max(total, 0.0)
        return found

    def _critical(self, result: _Result, durations: Sequence[float]) -> dict[str, float]:
        """Walk back from the end along what each start waited for."""
        chain: dict[str, float] = {}
        if not self.tasks:
            return chain
        count = len(self.tasks)
        position = result.finish.index(max(result.finish))
        issuing = False
        while position >= 0:
            if not issuing:
                name = self.names[self.where[position]]
                chain[name] = chain.get(name, 0.0) + durations[position]
                if result.cause[position] == _HOST:
                    issuing = True
                else:
                    position = result.cause[position]
                continue
            chain[HOST] = chain.get(HOST, 0.0) + self.tasks[position].host_seconds
            waited = result.issue_cause[position]
            if waited == _NOTHING:
                position -= 1
            elif waited < count:
                position, issuing = waited, False
            elif result.cause[waited - count] == _HOST:
                position = waited - count
            else:
                position, issuing = result.cause[waited - count], False
        return chain
