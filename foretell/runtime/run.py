"""Run a plan from start to end on this rank: join the others, make or take up the folder, train, leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.plan.types import Plan
from foretell.runtime import folder as folders
from foretell.runtime import ranks as members
from foretell.runtime.control import Control
from foretell.runtime.folder import Folder, Settings
from foretell.runtime.train import Outcome, Screen, train


def run(
    plan: Plan, asked: Mapping[str, Any], *, screen: Screen, out: Path | None = None, resume: bool = False,
    device: str = "auto", command: str = "",
) -> Outcome:  # fmt: skip
    """What `foretell run` does once there are processes; every rank calls it. `asked` are fields of `Settings`."""
    folders.check(plan, asked, resume=resume)
    ranks = members.start(plan, device=device)
    try:
        control = Control(ranks)
        path = Path(control.first(lambda: str(out or folders.usual_path(plan))))
        if resume:
            settings = Settings.from_json(control.first(lambda: folders.go_on(path, plan, dict(asked)).to_json()))
        else:
            settings = Settings(**asked).settled(plan)
            control.first(lambda: folders.begin(path, plan, settings))
        where = Folder(path=path)
        return train(plan, settings, ranks, where, screen=screen, control=control, resume=resume, command=command)
    finally:
        members.stop()
