"""Other plans of a run that goes on: for as many ranks as there are, or since steps take longer than predicted.

    a rank dies again and again ─┐
    the file says another number ┼─► the planner ─► another plan ─► the run folder ─► ranks that resume from the newest checkpoint
    steps are slow for long ─────┤
    the model has grown ─────────┘
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.process import launch
from foretell.runtime.process.supervise.notices import LOOK_SECONDS
from foretell.runtime.train.folder import PLAN, note_fault, refuse_other_course, settle

DEVICES = "CUDA_VISIBLE_DEVICES"
_ROWS = 6
"""Of what ranks took, the last so many: half a minute."""
MOST_BYTES = 64
"""Of a file with one number."""

PlanFor = Callable[[Plan, Sequence[int]], Plan]
"""A plan of the same training for one of these numbers of ranks; raises where there is none."""
Answer = tuple[Plan | None, str, Mapping[str, float | None]]
"""A better plan, or none; why; and figures of it."""
Better = Callable[[Plan, float, float], Answer]
"""Asked with a plan, the seconds of its step and those of its messages, as measured."""
Grown = Callable[[Plan, Mapping[str, Any]], Plan]
"""A plan of the same model with other settings; raises where there is none."""


class Elastic:
    """The plans of one run. Numbers of ranks go up to that of the plan it was started with."""

    def __init__(
        self, plan: Plan, plan_for: PlanFor | None, out: Path, say: Callable[[str], None], where: Path | None = None, better: Better | None = None,
        grown: Grown | None = None,
    ) -> None:  # fmt: skip
        """`plan_for` makes plans for other numbers of ranks, where there may be; `where` is the file. `better` is asked where steps are slow,
        `grown` where the model is another."""
        self.grown = grown
        self.first, self.plan_for, self.out, self.say, self.where, self.better = plan, plan_for, out, say, where, better
        self.plans: dict[int, Plan | None] = {plan.mesh.world: plan}
        self.plan = plan
        """The run's."""
        self._devices = os.environ.get(DEVICES)
        self.now = plan.mesh.world
        """Ranks that the run has."""
        self.next: Plan | None = None
        """Under which it is to go on, and why; what a row of `faults.jsonl` says besides."""
        self.why, self.figures = "", dict[str, float | None]()
        self._of_grown: Plan | None = None
        self._slow: float | None = None
        """Seconds of a step that are more than predicted, until it was looked for another plan."""
        self.trains = False
        """Whether the ranks train: from then on a plan for one less is looked for, so that it is there when it is needed."""
        self._slow_under: Plan | None = None
        self._heard: int | None = None
        """The file's time when a rank was given up: what it said until then counted that one."""
        self._done, self._turn, self._told = threading.Event(), threading.Lock(), ""
        if where is not None:
            self.read()

    def __enter__(self) -> Elastic:
        threading.Thread(target=self._run, name="foretell-ranks", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def read(self) -> int | None:
        """How many ranks the file says there may be; None where there is no file. Anything else raises."""
        assert self.where is not None
        try:
            with self.where.open("rb") as stream:
                text = stream.read(MOST_BYTES).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            if not self.where.parent.is_dir():
                raise UserError(f"--ranks {self.where}: there is no folder {self.where.parent}", "name a file in a folder that is there") from None
            return None
        except OSError as error:
            raise UserError(f"--ranks {self.where} cannot be read: {error.strerror or error}", "name a file with one number in it") from None
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"--ranks {self.where} has {text[:20]!a} and not a number of ranks", "write one whole number above zero into it")
        return int(text)

    def most(self, ranks: int) -> Plan | None:
        """The plan for as many ranks, or the next smaller number that has one; the one that the run began with is not looked for again."""
        plan_for = self.plan_for
        for world in range(min(ranks, self.first.mesh.world), 0, -1):
            with self._turn:
                if world not in self.plans:
                    try:
                        self.plans[world] = plan_for(self.first, (world,)) if plan_for is not None else None
                    except Exception as error:  # whatever the planner fails of is no reason to end a run that trains
                        self.plans[world] = None
                        self.say(_words(error))
            if (found := self.plans[world]) is not None:
                return found
        return None

    def go_over(self, plan: Plan) -> None:
        """The run folder has that plan from now on; one that trains otherwise is refused."""
        stored = plans.read(self.out / PLAN)
        if plan is self._of_grown:
            self.first, self.plans = plan, {}
            stored = stored.with_(model=plan.model)
        refuse_other_course(self.out, stored, plan)
        settle(self.out, plan)
        self.now, self.next, self.plan, self._slow = plan.mesh.world, None, plan, None
        self.plans[self.now] = plan

    def leave_out(self, ranks: Sequence[int]) -> None:
        """They are gone, and their devices are not used any more, until the file is written anew."""
        self._heard = self._time()
        if not launch.gpus():
            return
        named = os.environ.get(DEVICES)
        devices = [name.strip() for name in named.split(",")] if named is not None else [str(at) for at in range(launch.gpus())]
        os.environ[DEVICES] = ",".join(name for at, name in enumerate(devices) if at not in ranks)

    def _all_devices(self) -> None:
        if self._devices is not None:
            os.environ[DEVICES] = self._devices
        else:
            os.environ.pop(DEVICES, None)

    def plan_grown(self, said: Mapping[str, Any]) -> None:
        """The run goes on with the model as it is now: a plan for that. Raises where there is none."""
        settings, words = said.get("settings"), str(said.get("words"))
        if self.grown is None or not isinstance(settings, dict):
            raise UserError(f"the model has changed ({words}), and nobody plans it again", "give --replan")
        self.next = self._of_grown = self.grown(self.plan, settings)
        built = ", ".join(f"{name} {value}" for name, value in settings.items())
        self.why, self.figures = f"the model has changed ({words}) and is built with {built} now", {}

    def slower(self, seconds: float) -> None:
        """Steps take so long, which is for long more than was predicted. Looked for once under a plan."""
        if self._slow_under is not self.plan:
            self._slow, self._slow_under = seconds, self.plan

    def _look_for_better(self, seconds: float, better: Better) -> None:
        self._slow = None
        plan = self.plan
        found, why, figures = better(plan, seconds, self._message_seconds(seconds))
        self.why, self.figures = why, dict(figures)
        if plan is not self.plan:
            return  # it is another one by now
        if found is None:
            self.say(f"steps take {seconds * 1e3:.3g} ms, longer than predicted: {why}")
            note_fault(self.out, "not replanned", seconds=seconds, why=why, **figures)
        else:
            self.next = found

    def _message_seconds(self, step_seconds: float) -> float:
        """What messages themselves take of a step: the rank that waits least waits for them alone. 0 where nothing was recorded."""
        from foretell.runtime.detect.history import read_history  # brings numpy

        rows = [row for row in read_history(self.out) if len(row.waited) == self.now][-_ROWS:]
        return min(0.95 * step_seconds, median(min(row.waited) for row in rows)) if rows and self.now > 1 else 0.0

    def _time(self) -> int | None:
        """When the file was written last."""
        with contextlib.suppress(OSError):
            return self.where.stat().st_mtime_ns if self.where is not None else None
        return None

    def _wanted(self) -> int | None:
        """What the file says, if it has said it since a rank was given up; then all devices may be used again."""
        if self.where is None or (self._heard is not None and self._time() == self._heard):
            return None
        wanted = self.read()
        if wanted is not None and self._heard is not None:
            self._heard = None
            self._all_devices()
        return wanted

    def _run(self) -> None:
        """Look about once a second; plans are looked for while the ranks train."""
        while not self._done.wait(LOOK_SECONDS):
            said = ""
            try:
                if self.trains:
                    self.most(self.now - 1)
                wanted = self._wanted()
                if wanted is not None and self.next is None and min(wanted, self.first.mesh.world) != self.now:
                    found = self.most(wanted)
                    if found is not None and found.mesh.world != self.now:
                        self.why, self.figures, self.next = f"{self.where} says so", {}, found
                if self._slow is not None and self.next is None and self.better is not None:
                    self._look_for_better(self._slow, self.better)
            except Exception as error:
                said = _words(error)
            if said and said != self._told:
                self.say(said)
            self._told = said


def _words(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else f"another plan was not found: {type(error).__name__}: {str(error)[:200]}"
