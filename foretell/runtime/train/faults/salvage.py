"""A rank's code failed in the middle of a step: what was trained before it is saved by all ranks together."""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING

from foretell.runtime.process import whose_error
from foretell.runtime.train import save

if TYPE_CHECKING:
    from foretell.runtime.train.loop import TrainingRun

LEAVE_SECONDS = 10.0
"""A run that fails waits so long for a save under way."""
SALVAGE_SECONDS = 60.0
"""After one rank's code failed, ranks take at most so long to save together what was trained."""


def alone(run: TrainingRun, error: BaseException) -> None:
    """One process saves what was trained before the step that failed."""
    try:
        traceback.clear_frames(error.__traceback__)  # they hold what the step has computed
        run.job.optimizer.zero_grad(set_to_none=True)
        run.job.skips.abandon()
        if run.bad is None:
            run.save()
    except Exception as other:  # a device that is gone, say: the first error is the one to tell
        run.screen.say(f"what was trained could not be saved: {whose_error.words(other)}")


def together(run: TrainingRun, step: int) -> None:
    """Save what was trained: called in the thread of the rank that failed, and beside those that wait for it."""
    if run.between is None or run.saver is None:
        return
    thread = threading.Thread(target=_saved, args=(run, run.between, run.saver, step), name="foretell-salvage", daemon=True)
    thread.start()
    thread.join(SALVAGE_SECONDS)


def _saved(run: TrainingRun, between: save.Between, saver: save.Saver, step: int) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while (run.step < step or run.job.changing) and time.monotonic() < deadline:
        time.sleep(0.05)  # a rank that is behind comes this far by itself, and no further
    try:
        saver.wait()
        back = saver.back
        if back.gather([run.step == step, run.job.changing]) != [[True, False]] * run.ranks.world:
            return
        run.job.skips.abandon()
        all_of_them = save.Saver(run.folder.checkpoints, back, back, keep=run.settings.keep, spare=save.room(run.ranks))
        all_of_them.good = saver.good
        pieces, own, extra = between.state(run.job)
        all_of_them.begin(step, pieces, own, run.about(), extra=extra, wait=True)
    except Exception as error:
        run.screen.say(f"what was trained could not be saved: {whose_error.words(error)}")
