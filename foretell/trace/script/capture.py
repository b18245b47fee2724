"""The script run once from its start to the end of its second step, and what was recorded of it as a trace."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from foretell.errors import ForetellError, ModelError
from foretell.trace import types
from foretell.trace.cuda.select import cuda_choices
from foretell.trace.load.model import model_error
from foretell.trace.record.capture import any_code, seeded
from foretell.trace.record.collection import no_collection
from foretell.trace.record.cpu import cpu_choices
from foretell.trace.record.gradients import plain_formulas
from foretell.trace.record.recorder import Recorder
from foretell.trace.sandbox.replaced import replaced
from foretell.trace.script.change import StepChange
from foretell.trace.script.follow import Follower, StepDone
from foretell.trace.script.made import (
    nobody,
    not_initialised,
    not_torchs,
)
from foretell.trace.script.pretrained import MissingCheckpoint
from foretell.trace.script.ranks import launcher_remedy
from foretell.trace.script.shards import imported
from foretell.trace.script.spread import spread_told
from foretell.trace.script.words import ScriptCommand
from foretell.trace.script.world import as_on_a_device


def capture_script(
    script: ScriptCommand, *, capability: tuple[int, int] | None, hints: Mapping[str, float] | None = None, rank: int = 0,
    change: StepChange | None = None,
) -> tuple[types.Trace, Follower]:  # fmt: skip
    """One step of one of the script's ranks, as a device of this compute capability runs it, or without one this CPU; and what else was
    seen of it."""
    imported(script)
    recorder, release = Recorder(hints), torch.__version__
    recorder.patient = False
    choices = cuda_choices(recorder, capability, release) if capability else cpu_choices(recorder)
    sees = not_torchs if capability else nobody
    with (
        no_collection(), seeded(), recorder, plain_formulas(), choices, any_code(recorder, capability, sees),
        as_on_a_device(script, recorder, rank, "cuda" if capability else "cpu", change.batch if change else None) as world,
        replaced(not_initialised(recorder)),
    ):  # fmt: skip
        follower = Follower(recorder, world, change or StepChange())
        with follower.following(), world.ranks.telling(), replaced(follower.change.patches()), replaced(follower.places.patches()):
            _run(script, follower)
    with world.ranks.telling():
        trace = follower.trace(script, capability, release)
    assert follower.found is not None
    if world.options:
        trace = replace(trace, meta={**trace.meta, "options": [list(one) for one in world.options]})
    return spread_told(world.ranks, trace, follower.found.model, follower.second), follower


def _run(script: ScriptCommand, follower: Follower) -> None:
    before, folder = list(sys.argv), str(Path(script.file).resolve().parent) if script.file else str(Path.cwd())
    sys.argv, sys.path[:0] = [script.name, *script.arguments], [folder]
    try:
        if script.file:
            runpy.run_path(script.file, run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    except StepDone:
        pass
    except SystemExit as error:
        if not follower.stepped:
            raise _left(script, error) from error
        follower.once(f"{script.name} exits")
    except MissingCheckpoint as error:
        raise ModelError(error.problem, error.remedy, error.detail) from error
    except ForetellError:
        raise
    except Exception as error:
        if not follower.stepped:
            raise model_error(script.name, error, "following", launcher_remedy(script, error)) from error
        follower.once(model_error(script.name, error, "following").problem)
    else:
        follower.once(f"{script.name} ends")
    finally:
        sys.argv = before
        sys.path.remove(folder)


def _left(script: ScriptCommand, error: SystemExit) -> ModelError:
    """A script that left by itself: argparse's complaints are on its own stderr."""
    told = f"exit({error.code!r})" if error.code not in (None, 0) else "exit"
    return ModelError(f"{script.name} left with {told} before its first step", "start it as it is to see what it says", str(error.__context__ or ""))
