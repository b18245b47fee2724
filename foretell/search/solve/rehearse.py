"""The chosen plan before it runs on devices that are here: what was tried of it without them, in words.

A pipeline is really cut and run, one rank after the other, with fake tensors and messages that go nowhere: what torch
refuses, it refuses here. Other plans were replayed op by op from a trace made in the same way.
"""

from __future__ import annotations

from foretell.errors import ForetellError, UserError
from foretell.plan.types import Plan
from foretell.trace.load.model import Source
from foretell.units import human_bytes


def rehearse(source: Source, plan: Plan, *, exact: bool) -> str:
    """What was tried of a plan; raises a UserError with what torch said where it cannot run."""
    if plan.mesh.pp == 1 or plan.mesh.tp > 1:
        return "replayed op by op from a step with fake tensors" if exact else "not tried: estimated from the costs of its blocks"
    from foretell.runtime.parallel.pipeline.dry_run import dry_run

    told = []
    for rank in (0, plan.mesh.pp - 1):
        try:
            dry = dry_run(source, plan, rank)
        except ForetellError:
            raise
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"a dry run of rank {rank} of the pipeline failed: {first}", "--pp 1, or another --schedule") from error
        sent = sum(event.nbytes for event in dry.events if event.what.startswith("send"))
        told.append(f"rank {rank} of the pipeline: {len(dry.events)} events, {human_bytes(sent)} sent")
    return f"dry run with fake tensors, {'; '.join(told)}"
