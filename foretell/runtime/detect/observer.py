"""What a run has of all this: one object for each rank, made when ranks have met and closed when they part.

Every rank records and hashes; the first one reads and tells. Where collectives cannot be recorded (one rank alone, stand-ins for the
others, or FORETELL_RECORD=0) it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.hardware.parse import parse
from foretell.hardware.prices import price_per_hour
from foretell.plan.types import AXES, Plan
from foretell.runtime.detect.detector import Expectation, StragglerDetector
from foretell.runtime.detect.links import CONTROL
from foretell.runtime.detect.probe import LinkProbe
from foretell.runtime.detect.recorder import CollectiveRecorder, recording
from foretell.runtime.detect.replicas import ReplicaWatch
from foretell.runtime.parallel.apply import Job
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.process.control import Control
from foretell.runtime.process.progress import Monitor, Progress

VARIABLE = "FORETELL_RECORD"
"""0 there: no collective is recorded, and nobody looks for slow ranks."""


class RunObserver:
    """Of one rank of a run."""

    def __init__(
        self, plan: Plan, ranks: Ranks, run: Path, control: Control, progress: Progress, monitor: Monitor, *, log: Path,
        tell: Callable[[str], None], comparable: bool,
    ) -> None:  # fmt: skip
        """`comparable`: what the plan predicts is of this kind of device."""
        self.plan, self.ranks, self.control, self.progress = plan, ranks, control, progress
        self.recorder: CollectiveRecorder | None = None
        self.detector: StragglerDetector | None = None
        self._stack = contextlib.ExitStack()
        if control.group is None:
            return
        session = str(control.first(lambda: secrets.token_hex(8) if os.environ.get(VARIABLE, "").strip() != "0" else ""))
        if not session:
            return
        self.recorder = CollectiveRecorder(ranks, progress, run, session=session, names=_names(ranks, control))
        self._stack.enter_context(recording(self.recorder))
        monitor.position = self.recorder.position
        if ranks.is_first:
            said = plan.predicted if comparable else {}
            self.detector = StragglerDetector(
                run, session, ranks.world, log=log, tell=tell, price_per_hour=_price(plan), step=lambda: progress.step,
                expected=Expectation(step_seconds=_number(said.get("step_seconds")), high_seconds=_number(said.get("high_seconds"))),
            )  # fmt: skip

    def follow(self, job: Job) -> None:
        """Steps are about to begin."""
        if self.recorder is None:
            return
        detector = self.detector
        if self.plan.sync is not None:  # links are slow, and replicas differ between rounds, which compare them themselves
            return
        links = LinkProbe(self.control, detector.located if detector is not None else None)
        if links.works:
            self._observe(links.stepped)
            if detector is not None:
                detector.locate = links.ask
        if job.moved is None:  # tensors that are elsewhere are not hashed
            give = detector.give if detector is not None else None
            replicas = ReplicaWatch(self.plan.mesh, self.control, job.named_parameters, self.progress.step_seconds, give)
            if replicas.works:
                self._observe(replicas.stepped)
        if detector is not None:
            detector.start()

    def _observe(self, stepped: Callable[[int], None]) -> None:
        self.progress.observers.append(stepped)
        self._stack.callback(self.progress.observers.remove, stepped)

    def close(self) -> None:
        if self.detector is not None:
            self.detector.close()
        self._stack.close()


def _names(ranks: Ranks, control: Control) -> dict[str, str]:
    """Group name of torch → what it is for."""
    found = {}
    with contextlib.suppress(Exception):  # not torch's public face
        found[str(control.group.group_name)] = CONTROL
    for axis in AXES:
        with contextlib.suppress(Exception):
            group = ranks.group(axis)
            if group is not None:
                found[str(group.group_name)] = axis
    return found


def _price(plan: Plan) -> float | None:
    with contextlib.suppress(UserError, OSError):
        return price_per_hour(parse(plan.hardware).device)[0]
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
