"""Who holds a run up, from what its ranks say of themselves and what is seen of them from outside. No torch.

A verdict ends the run, so it must be sure: every rank stands still, none of them computes or reads, at least one waits for
others, and it has been so for a while. Then whoever neither waits nor works is the culprit: stopped by a signal, or asleep in
the user's code. While any rank computes, or something is under way that may take its time (data, a save, an evaluation), the
run goes on, and the screen says for whom the others wait. Where all wait, the numbers of their collectives tell why
(`detect/hangs`): ranks that called different things, or a network that carries nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foretell.errors import UserError
from foretell.runtime.detect.hangs import CYCLE, DESYNC, INSIDE, OUTSIDE, HangReading, RankPosition, read_hang
from foretell.runtime.process import proc
from foretell.runtime.process.progress import (
    ASLEEP,
    BUSY,
    DEVICE,
    FAILED,
    GAP_SECONDS,
    MOVING,
    STEP,
    WAITING,
    RankReport,
)

TIMEOUT_SECONDS = 600.0
"""A collective that takes longer than this ends the run: another rank is gone or stuck."""
HANG_SECONDS = 30.0
RESTART_HANG_SECONDS = 5.0
"""The same where the run is restarted then: a verdict costs seconds and not the run."""
HANG_VARIABLE = "FORETELL_HANG_SECONDS"
SILENCE_SECONDS = 30.0
"""A rank on another machine that gives no sign of life for so long is taken for dead."""
FRESH_SECONDS = 5.0
"""A report that is older says nothing of now."""
NAME_SECONDS = 3.0
"""A rank that stands still while others wait longer than they ever did is named after so long, before anything is ended."""
SAY_SECONDS = 60.0
"""A rank that others wait for is told after so long, where that is no reason to end."""
MOST_SHARE = 0.9
"""Of the time after which collectives fail: without any progress for so long, the run ends, whatever the reason."""

STOPPED, IDLE, LOST, UNKNOWN = "stopped", "idle", "lost", "unknown"
"""Kinds beside those of a report: stopped by a signal; silent and doing nothing; silent and out of sight; not yet heard of."""
_WAIT = (WAITING, DEVICE, IDLE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long is too long."""

    hang_s: float = HANG_SECONDS
    """A rank may be stopped, or asleep in a step, for so long while all others wait; a little longer where steps are long."""
    silence_s: float = SILENCE_SECONDS
    name_s: float = NAME_SECONDS
    say_s: float = SAY_SECONDS
    most_s: float = math.inf
    """Without progress of any rank, whatever the reason."""
    all_stopped_s: float = math.inf
    """Ranks that are all stopped for so long are culprits, though no other waits for them."""

    @classmethod
    def usual(cls, timeout_s: float, *, restarts: bool = False) -> Limits:
        """With what FORETELL_HANG_SECONDS says; 0 there = never. Collectives fail after `timeout_s`."""
        said = os.environ.get(HANG_VARIABLE, "").strip()
        try:
            hang_s = float(said) if said else RESTART_HANG_SECONDS if restarts else HANG_SECONDS
        except ValueError:
            hang_s = -1.0
        if not 0 <= hang_s < math.inf:
            raise UserError(f"{HANG_VARIABLE}={said} is not a number of seconds", "give such as 120, or 0 to never end a run for that")
        return cls(hang_s=hang_s or math.inf, most_s=MOST_SHARE * timeout_s, all_stopped_s=hang_s if restarts and hang_s else math.inf)


@dataclass(frozen=True, kw_only=True)
class EndReason:
    """Why the run ends."""

    problem: str
    remedy: str
    culprits: tuple[int, ...]
    gone: bool = False
    """Taken for dead, and not for asleep."""


@dataclass(frozen=True)
class _Stand:
    """What a rank is at, all things considered."""

    kind: str
    seconds: float
    report: RankReport | None


@dataclass
class _RankSeen:
    """What is known of a rank."""

    report: RankReport | None = None
    heard: float = 0.0
    """When it last said something new."""
    pid: int | None = None
    idle: proc.Idle | None = None
    stopped: float | None = None
    """Since when it is."""


class Judge:
    """One who watches ranks: `see` and `hear` about once a second, then `verdict`."""

    def __init__(self, world: int, limits: Limits) -> None:
        self.world, self.limits = world, limits
        self.ranks = {rank: _RankSeen() for rank in range(world)}
        self._looked = time.monotonic()
        self._told: tuple[int, ...] = ()
        self._named_last = ""

    def see(self, pids: Mapping[int, int]) -> None:
        """Look at the processes of ranks of this machine."""
        now = time.monotonic()
        if now - self._looked > GAP_SECONDS:  # this process itself was stopped, or the machine: nothing is known
            for seen in self.ranks.values():
                seen.heard, seen.stopped = now, None
                if seen.idle is not None:
                    seen.idle.forget()
        self._looked = now
        for rank, pid in pids.items():
            seen = self.ranks[rank]
            if seen.idle is None or seen.pid != pid:
                seen.pid, seen.idle = pid, proc.Idle(pid)
            if seen.report is None or now - seen.heard > FRESH_SECONDS / 2:  # it does not speak for itself
                seen.idle.look(now)
            else:
                seen.idle.forget()
            if proc.state(pid) != proc.STOPPED:
                seen.stopped = None
            elif seen.stopped is None:
                seen.stopped = now

    def hear(self, rank: int, report: RankReport | None) -> None:
        """What a rank said of itself last; the same again is nothing new."""
        seen = self.ranks[rank]
        if report is not None and (seen.report is None or report.beat != seen.report.beat):
            seen.report, seen.heard = report, time.monotonic()

    def forget(self, rank: int) -> None:
        """It has ended, and is nobody's concern any more."""
        self.ranks.pop(rank, None)

    def verdict(self, *, hears: bool = True) -> EndReason | None:
        """Who holds the run up, where that is certain. Who hears of nobody cannot say who is silent."""
        now = time.monotonic()
        if now - self._looked > GAP_SECONDS:
            return None  # stopped since it looked
        stands = {rank: self._stand(seen, now) for rank, seen in self.ranks.items()}
        lost = [rank for rank, stand in stands.items() if stand.kind == LOST and stand.seconds > self.limits.silence_s]
        if lost and hears:
            return _gone(lost, self.limits.silence_s)
        return self._hung(stands) or self._stuck(stands) or self._late(stands)

    def line(self) -> str:
        """For the screen, once: for whom the others wait, where that is no reason to end. Empty where there is nothing."""
        stands = {rank: self._stand(seen, time.monotonic()) for rank, seen in self.ranks.items()}
        return self._named(stands) or self._waited_for(stands)

    def _named(self, stands: Mapping[int, _Stand]) -> str:
        """A hang, as soon as it can be told from a long step: whoever is waited for stands still."""
        found = _reading(stands)
        still = found is not None and found.late and all(
            stand.kind not in (MOVING, BUSY, UNKNOWN) and stand.seconds >= self.limits.name_s and _in_step(stand)
            for rank, stand in stands.items() if rank in found.culprits or not found.culprits
        )  # fmt: skip
        if found is None or not still:
            self._named_last = "" if found is None or not found.late else self._named_last
            return ""
        key = f"{found.kind} {found.culprits}"
        if key == self._named_last:
            return ""
        self._named_last = key
        at = [f"rank {rank} is {_KIND_WORDS.get(stands[rank].kind, stands[rank].kind)}{_at(stands[rank])}" for rank in found.culprits[:4]]
        return "; ".join([found.words(), *at])

    def _waited_for(self, stands: Mapping[int, _Stand]) -> str:
        after = self.limits.say_s
        late = tuple(rank for rank, stand in stands.items() if _holds_up(stand, after))
        others = [stand for rank, stand in stands.items() if rank not in late]
        if not late or not others or not all(stand.kind in (WAITING, DEVICE) and stand.seconds >= after for stand in others):
            self._told = () if not late else self._told
            return ""
        if self._told == late:
            return ""
        self._told = late
        report = stands[late[0]].report
        assert report is not None
        return f"the other ranks wait for {_ranks(late)}: {report.same_seconds:.0f} s in {report.phase}, now at {report.where}"

    # ------------------------------------------------------------ one rank

    def _stand(self, seen: _RankSeen, now: float) -> _Stand:
        report = seen.report
        if seen.stopped is not None:
            return _Stand(STOPPED, now - seen.stopped, report)
        if report is not None and now - seen.heard <= FRESH_SECONDS:
            return _Stand(report.kind, report.seconds, report)
        if seen.idle is not None:
            idle = seen.idle.seconds()
            return _Stand(IDLE, idle if report is None else min(idle, now - seen.heard), report) if idle else _Stand(BUSY, 0.0, report)
        return _Stand(UNKNOWN, 0.0, None) if report is None else _Stand(LOST, now - seen.heard, report)

    # ------------------------------------------------------------ all of them

    def _hung(self, stands: Mapping[int, _Stand]) -> EndReason | None:
        """Nobody works, somebody waits, and somebody is stopped or asleep."""
        stopped = [rank for rank, stand in stands.items() if stand.kind == STOPPED]
        waited = min(self.limits.hang_s, self.limits.name_s)  # that it is stopped is seen, and not concluded from their waiting
        if self._others_wait(stopped, stands, self.limits.hang_s, (*_WAIT, ASLEEP, LOST), waited):
            return _explained(_stopped(stopped, self.ranks, alone=False), stands)
        if stopped and all(stand.kind == STOPPED and stand.seconds >= self.limits.all_stopped_s for stand in stands.values()):
            return _stopped(stopped, self.ranks, alone=True)
        asleep = [rank for rank, stand in stands.items() if stand.kind in (ASLEEP, IDLE) and _in_step(stand)]
        if self._others_wait(asleep, stands, self._patience(stands), _WAIT):
            return _explained(_asleep(asleep, stands), stands)
        return None

    def _stuck(self, stands: Mapping[int, _Stand]) -> EndReason | None:
        """Everybody waits in collectives, longer than these ever took: ranks that cannot meet are told at once, what may yet
        arrive is given the time that a sleeper is given."""
        if not all(stand.kind in _WAIT for stand in stands.values()):
            return None
        found = _reading(stands)
        if found is None or not found.late or math.isinf(self.limits.hang_s):
            return None
        limit = self.limits.name_s if found.kind in (DESYNC, CYCLE) else self._patience(stands)
        if any(stand.seconds < limit for stand in stands.values()):
            return None
        return EndReason(problem=found.words(), remedy=_REMEDIES[found.kind], culprits=())

    def _others_wait(
        self, culprits: Sequence[int], stands: Mapping[int, _Stand], limit: float, kinds: Sequence[str], waited: float | None = None
    ) -> bool:
        """For so long; the others for `waited`, where that is less."""
        others = [stand for rank, stand in stands.items() if rank not in culprits]
        held = bool(culprits) and all(stands[rank].seconds >= limit for rank in culprits)
        return held and bool(others) and all(stand.kind in kinds and stand.seconds >= (limit if waited is None else waited) for stand in others)

    def _patience(self, stands: Mapping[int, _Stand]) -> float:
        """Longer before the first step is done, where steps are long, and where a rank has slept before and woken."""
        reports = [stand.report for stand in stands.values() if stand.report is not None]
        base = self.limits.hang_s
        if any(report.steps == 0 for report in reports):
            return 1.5 * base
        longest = max((report.step_seconds for report in reports), default=0.0)
        recovered = max((report.recovered_seconds for report in reports), default=0.0)
        return base + min(10 * longest, 0.5 * base) + 3 * recovered

    def _late(self, stands: Mapping[int, _Stand]) -> EndReason | None:
        """Collectives are about to fail: better to say who is missing."""
        most = self.limits.most_s
        if any(stand.report is None for stand in stands.values()):
            return None
        if any(stand.kind == MOVING or stand.seconds < most for stand in stands.values()):
            return None
        culprits = [rank for rank, stand in stands.items() if stand.kind not in (WAITING, DEVICE)]
        if len(culprits) == len(stands):
            return None  # nobody waits for anybody
        return _missing(culprits, {rank: stand.report for rank, stand in stands.items() if stand.report is not None}, most)


_KIND_WORDS = {STOPPED: "stopped by a signal", IDLE: "silent and idle", LOST: "silent", ASLEEP: "asleep", DEVICE: "waiting for its device"}
_REMEDIES = {
    DESYNC: "see that every rank calls the same collectives in the same order, with the same shapes",
    CYCLE: "see that every rank uses its groups in the same order",
    INSIDE: f"check the network between these ranks; where a collective may take that long, allow more with {HANG_VARIABLE}=SECONDS",
    OUTSIDE: "look at what that rank waits for",
}


def _reading(stands: Mapping[int, _Stand]) -> HangReading | None:
    """What the numbers of collectives say; None where a rank does not tell its own. A rank that is stopped or silent told it earlier:
    it may have left what it stood in, and not more."""
    positions: dict[int, RankPosition] = {}
    for rank, stand in stands.items():
        position = stand.report.position if stand.report is not None else None
        if position is None:
            return None
        positions[rank] = position if stand.kind in (WAITING, DEVICE) else replace(position, key="")
    return read_hang(positions)


def _explained(verdict: EndReason, stands: Mapping[int, _Stand]) -> EndReason:
    """With the collective that the others wait in."""
    found = _reading(stands)
    if found is None or found.kind != OUTSIDE or not set(found.culprits) & set(verdict.culprits):
        return verdict
    return replace(verdict, problem=f"{verdict.problem}; {found.problem}")


def _at(stand: _Stand) -> str:
    report = stand.report
    if report is None or report.position is None:
        return ""
    where = f" at {report.where}" if report.where and stand.kind == ASLEEP else ""
    return where + (f" ({report.position.place})" if report.position.place else "")


def _in_step(stand: _Stand) -> bool:
    """Where a sleeper is the culprit: outside a step it may wait for a network, a disk or a server."""
    return stand.report is not None and stand.report.phase == STEP


def _holds_up(stand: _Stand, after: float) -> bool:
    report = stand.report
    return stand.kind not in (WAITING, DEVICE, UNKNOWN) and report is not None and report.steps > 0 and report.same_seconds >= after


def blamed(reports: Mapping[int, RankReport]) -> EndReason | None:
    """After a collective failed on its own: who did not take part, if anyone can be named."""
    positions = {rank: report.position for rank, report in reports.items() if report.position is not None}
    found = read_hang(positions) if len(positions) == len(reports) else None
    if found is not None and found.kind in (DESYNC, CYCLE):
        return EndReason(problem=found.words(), remedy=_REMEDIES[found.kind], culprits=found.culprits)
    others = {rank: report for rank, report in reports.items() if report.phase != FAILED}
    missing = [rank for rank, report in others.items() if report.kind not in (WAITING, DEVICE)]
    if not missing:
        least = min((report.collectives for report in reports.values()), default=0)
        missing = [rank for rank, report in reports.items() if report.collectives == least]
    return _missing(missing, reports, None) if missing and len(missing) < len(reports) else None


# --- words -----------------------------------------------------------------------------------------------------------


def _gone(ranks: Sequence[int], seconds: float) -> EndReason:
    verb = "is" if len(ranks) == 1 else "are"
    problem = f"{_ranks(ranks)} {verb} gone (no sign of life for {seconds:.0f} s)"
    return EndReason(problem=problem, remedy="", culprits=tuple(ranks), gone=True)


def _stopped(ranks: Sequence[int], known: Mapping[int, _RankSeen], *, alone: bool) -> EndReason:
    verb = "is" if len(ranks) == 1 else "are"
    processes = ", ".join(str(known[rank].pid) for rank in ranks)
    others = "" if alone else " and the other ranks wait"
    problem = f"{_ranks(ranks)} {verb} stopped (SIGSTOP to process {processes}){others}"
    return EndReason(problem=problem, remedy="continue a stopped rank in time with kill -CONT", culprits=tuple(ranks))


def _asleep(ranks: Sequence[int], stands: Mapping[int, _Stand]) -> EndReason:
    first = stands[ranks[0]]
    report = first.report
    assert report is not None
    silent = " and does not answer" if first.kind == IDLE else ""
    problem = (
        f"{_ranks(ranks)} made no progress for {first.seconds:.0f} s in step {report.step + 1} while the other ranks wait: "
        f"it does nothing{silent}, at {report.where}"
    )
    remedy = f"look there; where a step may rightly wait that long, allow more with {HANG_VARIABLE}=SECONDS"
    return EndReason(problem=problem, remedy=remedy, culprits=tuple(ranks))


def _missing(ranks: Sequence[int], reports: Mapping[int, RankReport], seconds: float | None) -> EndReason:
    if not ranks:
        at = "; ".join(f"rank {rank} at {report.where}" for rank, report in sorted(reports.items())[:4])
        problem = f"all ranks wait for each other for {seconds or 0:.0f} s: {at}"
        return EndReason(problem=problem, remedy="see that every rank calls the same collectives in the same order", culprits=())
    report = reports[ranks[0]]
    verb = "computes" if report.kind == BUSY else "is"
    since = f"for {seconds:.0f} s " if seconds is not None else ""
    problem = f"the other ranks waited {since}for {_ranks(ranks)}, which {verb} in {report.phase} of step {report.step + 1}, at {report.where}"
    return EndReason(problem=problem, remedy="look there: ranks must not keep each other waiting that long", culprits=tuple(ranks))


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:8]) + (" and more" if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"

