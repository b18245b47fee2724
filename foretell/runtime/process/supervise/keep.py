"""The ranks of `foretell run`, watched from outside and started again after a fault, from the newest checkpoint that is whole."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.plan.types import Plan
from foretell.runtime.process.blame import TIMEOUT_SECONDS, Limits
from foretell.runtime.process.launch import GROWN, SLOWER, TRAINS, Launcher, RunEnded, started
from foretell.runtime.process.signals import exit_status
from foretell.runtime.process.supervise import reaper
from foretell.runtime.process.supervise.budget import RestartBudget
from foretell.runtime.process.supervise.elastic import Elastic
from foretell.runtime.process.supervise.faults import RunFault, fault_of, kills_for_memory
from foretell.runtime.process.supervise.notices import Notices
from foretell.runtime.process.supervise.standby import FEWEST, Standby
from foretell.runtime.train.folder import CHECKPOINTS, PLAN, SETTINGS, note_fault

_PAUSE_LOOK_SECONDS = 0.05
_MOST_STANDBYS = 10
"""Where each is ended again, for want of memory say, ranks are started without."""
IMPORT_ONCE = True
"""Whether ranks without a standby come from one process that imports torch for all; where starting one takes no import, it does not matter."""
_KEPT = ("--json", "--debug", "--update-profile")


def again_words(words: Sequence[str], out: Path, *, other_plan: bool = False) -> list[str]:
    """The words of `foretell` that go on with a run that these have started, as far as it is there: its folder knows the rest. With
    `other_plan` these words may name one that is not the run's any more."""
    if ("--resume" in words and not other_plan) or not all((out / name).is_file() for name in (PLAN, SETTINGS)):
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
    elastic: bool = False
    """Whether the run may go on with another number of ranks."""
    ranks: Path | None = None
    """A file that says with how many."""
    replan: bool = False
    """Whether another plan is looked for where steps take longer than predicted."""


class Keeper:
    """One run: `run` starts it, and starts it again."""

    def __init__(
        self, words: Sequence[str], world: int, out: Path, *, how: Supervision, say: Callable[[str], None],
        program: Sequence[str] = ("-m", "foretell"), elastic: Elastic | None = None, memory: Path | None = None,
    ) -> None:  # fmt: skip
        """`words` start the run, in the folder `out`. `elastic` knows plans for other numbers of ranks, where these may change; `memory`
        is where the run has checkpoints in memory, where it has any."""
        self.memory = memory
        self.words, self.world, self.out, self.how, self.say, self.program = words, world, out, how, say, program
        self.elastic = elastic
        self.budget = RestartBudget(how.restarts)
        self._noticed: float | None = None
        """When the ranks were last ended, by the monotonic clock, until they train again."""
        self._trains = self._asked = self._changed = False
        """Whether the ranks have trained since they were started; whether they were asked to leave; whether the plan is another by now."""
        self._grown: Mapping[str, Any] | None = None
        """What the ranks said of a model that has changed."""
        self._dead: set[int] = set()
        """Ranks whose fault it was every time, since the run last came further."""
        self._standby: Standby | None = None
        self._standbys = 0
        """How many may still be started."""

    def run(self) -> RunEnded:
        """Until it is done, is asked to stop, or fails of something that a restart does not mend."""
        limits = Limits.usual(TIMEOUT_SECONDS, restarts=self.how.restarts > 0)
        with contextlib.ExitStack() as stack:
            if self.elastic is not None:
                stack.enter_context(self.elastic)
            adopts = stack.enter_context(reaper.adopting())
            launcher = stack.enter_context(Launcher(
                self.world, say=self.say, limits=limits, program=self.program, restarts=self.how.restarts > 0, told=self._told,
                beat=lambda: self._beat(launcher, stack),
            ))  # fmt: skip
            stack.enter_context(Notices(self.how.notices, self.say, lambda: launcher.forward(signal.SIGUSR1, None)))
            if self.memory is not None:
                launcher.guardian.forget(str(self.memory))
                stack.callback(self._leave_memory, self.memory)
            self._standbys = _MOST_STANDBYS if self.how.standby and self.how.restarts > 0 and adopts else 0
            words = self.words
            while True:
                self._warm(launcher, stack)
                if IMPORT_ONCE and adopts and self.how.restarts and not self.how.standby and launcher.world > 1:
                    self._import_once(launcher, stack)
                kills = kills_for_memory()
                self._trains = self._asked = False
                ended = launcher.attempt(words)
                fault = fault_of(ended, out_of_memory=kills_for_memory() > kills)
                if launcher.forward.asked:
                    return ended
                if self._asked and ended.status == exit_status("SIGUSR1"):
                    try:
                        pause: float | None = self._resized(launcher)
                    except UserError as error:
                        return RunEnded(1, error.problem, error.remedy)
                elif fault is None or not self.how.restarts:
                    return ended
                else:
                    pause = self._pause(fault)
                    if pause is None:
                        pause = self._without(fault, launcher)
                if pause is None:
                    assert fault is not None
                    return self._spent(ended, fault)
                reaper.end_sessions([child.pid for child in launcher.children])
                if not self._paused(pause, launcher):
                    return RunEnded(exit_status(launcher.forward.asked))
                words = again_words(self.words, self.out, other_plan=self._changed)

    def _warm(self, launcher: Launcher, stack: contextlib.ExitStack) -> None:
        """See that there is a standby; one that was ended is replaced while the ranks train."""
        if self._standbys and (self._standby is None or not self._standby.lives):
            self._standbys -= 1
            self._standby = stack.enter_context(contextlib.closing(Standby(self.world)))
            launcher.start = self._standby.start

    def _import_once(self, launcher: Launcher, stack: contextlib.ExitStack) -> None:
        """Several ranks without a standby: one process imports torch and is forked for each of them, as one for each would import it as
        often, on the same cores. It ends once they are there."""
        self._standby = stack.enter_context(contextlib.closing(Standby(launcher.world, modules=FEWEST)))
        launcher.start = self._standby.start

    def _beat(self, launcher: Launcher, stack: contextlib.ExitStack) -> None:
        """About once a second."""
        self._warm(launcher, stack)
        if self._standby is not None and not self.how.standby:
            self._standby.close()
            self._standby, launcher.start = None, started
        if self.elastic is not None and self.elastic.next is not None and self._trains and not self._asked:
            self._asked, self._noticed = True, time.monotonic()
            launcher.leave()

    def _resized(self, launcher: Launcher) -> float:
        """There is another plan, or has to be, and the ranks have saved and left."""
        assert self.elastic is not None
        if self._grown is not None:
            said, self._grown = self._grown, None
            self.elastic.plan_grown(said)
        assert self.elastic.next is not None
        self._go_over(self.elastic.next, launcher, self.elastic.why, **self.elastic.figures)
        return 0.0

    def _without(self, fault: RunFault, launcher: Launcher) -> float | None:
        """Restarts are used up: where it was the same rank every time, the run goes on without it."""
        if self.elastic is None or not self._dead or launcher.world == 1:
            return None
        plan = self.elastic.most(launcher.world - len(self._dead))
        if plan is None:
            return None
        self.elastic.leave_out(sorted(self._dead))
        named = f"rank {', '.join(map(str, sorted(self._dead)))}"
        self._noticed = fault.noticed
        self._go_over(plan, launcher, f"{named} did not come back after {self.how.restarts} {'restart' if self.how.restarts == 1 else 'restarts'}")
        return 0.0

    def _go_over(self, plan: Plan, launcher: Launcher, why: str, **figures: float | None) -> None:
        """From here on the run has the plan, and its ranks."""
        assert self.elastic is not None
        before, kept = launcher.world, self._kept()
        self.elastic.go_over(plan)
        launcher.world, self._changed = plan.mesh.world, True
        if self.elastic.now != before:
            self.budget, self._dead = RestartBudget(self.how.restarts), set()
        where = f"from the checkpoint of step {kept}" if kept is not None else "from the start: there is no checkpoint yet"
        axes = " × ".join(f"{axis} {size}" for axis, size in asdict(plan.mesh).items() if size > 1) or "one process"
        said = f"{axes}, micro-batches of {plan.micro_batch}, {plan.accumulate} a step: the same samples in the same order"
        what = f"{before} → {launcher.world} ranks" if before != launcher.world else "another plan"
        self.say(f"{what}, since {why}: {said}; {where}")
        note_fault(self.out, "resized" if before != launcher.world else "replanned", before=before, ranks=launcher.world, why=why, checkpoint=kept,
                   mesh=asdict(plan.mesh), micro_batch=plan.micro_batch, accumulate=plan.accumulate, **figures)  # fmt: skip

    def _pause(self, fault: RunFault) -> float | None:
        """Tell of a fault; how long to wait before the next start, None where there is none."""
        kept = self._kept()
        pause = self.budget.spend(kept if kept is not None else -1)
        self._noticed = fault.noticed
        self._dead = set(fault.ranks) if pause is not None and self.budget.row == 1 else self._dead & set(fault.ranks)
        note_fault(self.out, "fault", kind=fault.kind, ranks=list(fault.ranks), words=fault.words, step=fault.step, checkpoint=kept)
        if pause is not None:
            where = f"from the checkpoint of step {kept}" if kept is not None else "from the start: there is no checkpoint yet"
            when = f" in {pause:.0f} s" if pause else ""
            self.say(f"{fault.words}, in step {fault.step + 1} or soon after; restart {self.budget.row} of {self.how.restarts}{when}, {where}")
        return pause

    def _kept(self) -> int | None:
        from foretell.checkpoint import store  # not before it is needed

        found = store.complete(self.out / CHECKPOINTS)
        newest = [found[0].step] if found else []
        if self.memory is not None:
            from foretell.checkpoint import memory

            newest += [step] if (step := memory.newest_step(self.memory)) is not None else []
        return max(newest, default=None)

    def _leave_memory(self, folder: Path) -> None:
        """What is in memory alone goes to the disk, and the folder goes."""
        from foretell.checkpoint import memory

        kept = memory.rescue(folder, self.out / CHECKPOINTS)
        if kept is not None:
            self.say(f"the newest checkpoint was in memory alone: it is written to {kept}")
        memory.remove(folder)

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
        noticed, step, at = self._noticed, said.get(TRAINS), said.get("at")
        if rank == 0 and self.elastic is not None and isinstance(slow := said.get(SLOWER), float):
            self.elastic.slower(slow)
        if rank == 0 and self.elastic is not None and isinstance(grown := said.get(GROWN), dict):
            self._grown, self._asked, self._noticed = grown, True, time.monotonic()
        if rank != 0 or type(step) is not int or not isinstance(at, float):
            return
        self._trains = True
        if self.elastic is not None:
            self.elastic.trains = True
        if noticed is None:
            return
        self._noticed = None
        seconds = at - noticed
        how = f"restart {self.budget.total} of this run" if self.budget.total else "with the new plan"
        self.say(f"training again {seconds:.1f} s after it was noticed, with step {step}: {how}")
        note_fault(self.out, "restarted", step=step, seconds=round(seconds, 3), restart=self.budget.total)
