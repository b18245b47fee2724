"""The ranks of `foretell run`, watched from outside and started again after a fault, from the newest checkpoint that is whole."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretell.runtime.process.blame import TIMEOUT_SECONDS, Limits
from foretell.runtime.process.launch import TRAINS, Launcher, RunEnded
from foretell.runtime.process.signals import exit_status
from foretell.runtime.process.supervise import reaper
from foretell.runtime.process.supervise.budget import RestartBudget
from foretell.runtime.process.supervise.faults import RunFault, fault_of, kills_for_memory
from foretell.runtime.process.supervise.notices import Notices
from foretell.runtime.process.supervise.standby import Standby
from foretell.runtime.train.folder import CHECKPOINTS, PLAN, SETTINGS, note_fault

_PAUSE_LOOK_SECONDS = 0.05
_MOST_STANDBYS = 10
"""Where each is ended again, for want of memory say, ranks are started without."""
_KEPT = ("--json", "--debug", "--update-profile")


def again_words(words: Sequence[str], out: Path) -> list[str]:
    """The words of `foretell` that go on with a run that these have started, as far as it is there: its folder knows the rest."""
    if "--resume" in words or not all((out / name).is_file() for name in (PLAN, SETTINGS)):
        return list(words)
    kept = [word for word in words if word in _KEPT or word.startswith("--device=")]
    for place, word in enumerate(words[:-1]):
        if word == "--device":
            kept += words[place : place + 2]
    return ["run", str(out), "--resume", *kept]


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How a run is kept alive."""

    restarts: int
    """In a row, without getting further."""
    standby: bool = True
    notices: tuple[str, ...] = ()
    """Where to look for word that this machine is about to be taken away."""


class Keeper:
    """One run: `run` starts it, and starts it again."""

    def __init__(
        self, words: Sequence[str], world: int, out: Path, *, how: Supervision, say: Callable[[str], None],
        program: Sequence[str] = ("-m", "foretell"),
    ) -> None:  # fmt: skip
        """`words` start the run, in the folder `out`."""
        self.words, self.world, self.out, self.how, self.say, self.program = words, world, out, how, say, program
        self.budget = RestartBudget(how.restarts)
        self._fault: RunFault | None = None
        """The last one, until ranks train again."""
        self._standby: Standby | None = None
        self._standbys = 0
        """How many may still be started."""

    def run(self) -> RunEnded:
        """Until it is done, is asked to stop, or fails of something that a restart does not mend."""
        limits = Limits.usual(TIMEOUT_SECONDS, restarts=self.how.restarts > 0)
        with contextlib.ExitStack() as stack:
            adopts = stack.enter_context(reaper.adopting())
            launcher = stack.enter_context(Launcher(
                self.world, say=self.say, limits=limits, program=self.program, restarts=self.how.restarts > 0, told=self._told,
                beat=lambda: self._warm(launcher, stack),
            ))  # fmt: skip
            stack.enter_context(Notices(self.how.notices, self.say, lambda: launcher.forward(signal.SIGUSR1, None)))
            self._standbys = _MOST_STANDBYS if self.how.standby and self.how.restarts > 0 and adopts else 0
            words = self.words
            while True:
                self._warm(launcher, stack)
                kills = kills_for_memory()
                ended = launcher.attempt(words)
                fault = fault_of(ended, out_of_memory=kills_for_memory() > kills)
                if fault is None or launcher.forward.asked or not self.how.restarts:
                    return ended
                pause = self._pause(fault)
                if pause is None:
                    return self._spent(ended, fault)
                reaper.end_sessions([child.pid for child in launcher.children])
                if not self._paused(pause, launcher):
                    return RunEnded(exit_status(launcher.forward.asked))
                words = again_words(self.words, self.out)

    def _warm(self, launcher: Launcher, stack: contextlib.ExitStack) -> None:
        """See that there is a standby; one that was ended is replaced while the ranks train."""
        if self._standbys and (self._standby is None or not self._standby.lives):
            self._standbys -= 1
            self._standby = stack.enter_context(contextlib.closing(Standby(self.world)))
            launcher.start = self._standby.start

    def _pause(self, fault: RunFault) -> float | None:
        """Tell of a fault; how long to wait before the next start, None where there is none."""
        kept = self._kept()
        pause = self.budget.spend(kept if kept is not None else -1)
        self._fault = fault
        note_fault(self.out, "fault", kind=fault.kind, ranks=list(fault.ranks), words=fault.words, step=fault.step, checkpoint=kept)
        if pause is not None:
            where = f"from the checkpoint of step {kept}" if kept is not None else "from the start: there is no checkpoint yet"
            when = f" in {pause:.0f} s" if pause else ""
            self.say(f"{fault.words}, in step {fault.step + 1} or soon after; restart {self.budget.row} of {self.how.restarts}{when}, {where}")
        return pause

    def _kept(self) -> int | None:
        from foretell.checkpoint import store  # brings numpy: not before it is needed

        found = store.complete(self.out / CHECKPOINTS)
        return found[0].step if found else None

    def _spent(self, ended: RunEnded, fault: RunFault) -> RunEnded:
        times = "once" if self.how.restarts == 1 else f"{self.how.restarts} times in a row"
        problem = f"{ended.problem or fault.words}; it was restarted {times} and came no further"
        return replace(ended, problem=problem, remedy=ended.remedy or "look for what ends it there; --max-restarts N allows more")

    def _paused(self, seconds: float, launcher: Launcher) -> bool:
        """Whether nobody asked to stop meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not launcher.forward.asked:
            time.sleep(_PAUSE_LOOK_SECONDS)
        return not launcher.forward.asked

    def _told(self, rank: int, said: Mapping[str, Any]) -> None:
        """The first step after a restart is done."""
        fault, step, at = self._fault, said.get(TRAINS), said.get("at")
        if rank != 0 or fault is None or type(step) is not int or not isinstance(at, float):
            return
        self._fault = None
        seconds = at - fault.noticed
        self.say(f"training again {seconds:.1f} s after it was noticed, with step {step}: restart {self.budget.total} of this run")
        note_fault(self.out, "restarted", step=step, seconds=round(seconds, 3), restart=self.budget.total)
