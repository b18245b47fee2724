"""Run a plan from start to end on this rank: join the others, make or take up the folder, train, leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.plan.types import Plan
from foretell.runtime.parallel import exact_plans
from foretell.runtime.parallel import ranks as members
from foretell.runtime.process.control import Control, is_collective
from foretell.runtime.process.lock import Lock
from foretell.runtime.process.signals import EARLY, Signals, Stopped
from foretell.runtime.train import folder as folders
from foretell.runtime.train.folder import Folder, RunSettings
from foretell.runtime.train.log import LOG, read
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.outcome import RunOutcome, RunScreen
from foretell.runtime.train.train import train


def run(
    plan: Plan, asked: Mapping[str, Any], *, screen: RunScreen, out: Path | None = None, resume: bool = False,
    device: str = "auto", command: str = "", signals: Signals | None = None,
) -> RunOutcome:  # fmt: skip
    """What `foretell run` does once there are processes; every rank calls it. `asked` are fields of `RunSettings`; `signals` are
    those that the caller listens to already. Raises `Stopped` where one comes before the first step is done."""
    folders.check(plan, asked, resume=resume)
    with ExitStack() as stack:
        if signals is None:
            signals = stack.enter_context(Signals(lambda text: screen.say(text) if _is_first() else None, phase=EARLY))
        stack.callback(members.stop)
        try:
            ranks = members.start(plan, device=device)
            control = Control(ranks)
            if ranks.replica is not None and not ranks.replica.is_hub:  # the folder is the hub's
                where = Folder(path=Path(out or ""))
                settings = folders.read_settings(where.path) or RunSettings(**asked)
                return train(plan, settings, ranks, where, screen=Silent(), control=control, command=command, signals=signals)
            path = Path(control.first(lambda: str(out or folders.usual_path(plan))))
            stack.enter_context(_Owned(path, control, screen, resume=resume))
            if resume:
                settings = RunSettings.from_json(control.first(lambda: folders.go_on(path, plan, dict(asked)).to_json()))
                plan = exact_plans.unpredicted(plan) if settings.exact else plan
            else:
                settings = RunSettings(**asked).settled(plan)
                if settings.exact:
                    settings = replace(settings, threads=control.first(_threads))
                plan = exact_plans.unpredicted(plan) if settings.exact else plan
                control.first(lambda: folders.begin(path, plan, settings))
        except RuntimeError as error:
            signals.check()
            if not is_collective(error):
                raise
            why = f"the ranks did not come together: {' '.join(str(error).split())[:300]}"
            raise RunFailed(why, "see that all of them start", transient=True) from error
        where = Folder(path=path)
        return train(
            plan, settings, ranks, where, screen=screen, control=control, resume=resume, command=command, signals=signals
        )


def _threads() -> int:
    """Those of a rank as long as the run lasts, whatever their number."""
    said = os.environ.get(folders.THREADS, "")
    return int(said) if said.isdecimal() and int(said) else 1


class Silent:
    """The screen of a replica: who joins them speaks."""

    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def _is_first() -> bool:
    return os.environ.get("RANK", "0").strip() in ("", "0")


class _Owned:
    """A run folder while it is this run's own. The first rank holds it for all; all learn who has it where it cannot."""

    def __init__(self, path: Path, control: Control, screen: RunScreen, *, resume: bool) -> None:
        self.path, self.control, self.screen, self.resume = path, control, screen, resume
        self.lock: Lock | None = None
        self.made = False

    def __enter__(self) -> None:
        self.control.first(self._claim)

    def _claim(self) -> None:
        self.made = not self.path.exists()
        self.lock = folders.claim(self.path, resume=self.resume, say=self.screen.say, lost=self._lost)

    def _lost(self, why: str) -> None:
        """Another process saves there now: whatever this one saved would harm it."""
        self.screen.say(f"error: {why}, because this one gave no heartbeat: it ends without saving")
        os._exit(RunFailed.exit_code)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.lock is None:
            return
        begun = self.resume or kind is None or not self._is_new(stopped=issubclass(kind, Stopped))
        if not begun:
            folders.undo(self.path)
        self.lock.release()
        if self.made and not begun:
            with suppress(OSError):
                self.path.rmdir()

    def _is_new(self, *, stopped: bool) -> bool:
        """Whether nothing was trained yet; a log that only says that the run began is nothing either to one that stops."""
        path = self.path / LOG
        return not path.exists() or (stopped and all(row.get("event") == "start" for row in read(path)))
