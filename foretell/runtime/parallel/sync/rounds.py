"""Replicas that step alone, seen by the training loop: joined when a round ends, told of, compared at the end."""

from __future__ import annotations

from foretell.errors import UserError
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.parallel.apply import Job
from foretell.runtime.process.control import Control
from foretell.runtime.train.log import RunLog
from foretell.runtime.train.numbers.guard import not_finite

ASK_SECONDS = 2.0
"""How often replicas ask each other whether to stop, about: the answer crosses a slow link while they step."""


def begin(job: Job, control: Control) -> None:
    """Before the first step."""
    if job.outer is not None:
        control.ask_seconds = ASK_SECONDS


def join(job: Job, step: int, log: RunLog | None, *, last: bool) -> None:
    """After a step; rounds that have ended are written down."""
    if job.outer is None:
        return
    job.changing = True
    job.outer.stepped(step, last=last)
    job.changing = False
    for one in job.outer.take_done():
        if log is not None:
            log.write("round", one.step, seconds=one.seconds, message_seconds=one.message_seconds, hash=f"{one.hash & (2**64 - 1):016x}")


def refuse(job: Job, bad: StepReading | None) -> None:
    """A replica whose numbers are none ends the run by itself: the others are in the middle of steps of their own."""
    if job.outer is not None and bad is not None:
        what = not_finite(bad)
        raise UserError(f"the {what} of step {bad.step} is not a number on this replica", "look at its samples, or lower --lr")


def compare(job: Job, control: Control) -> None:
    """At the end: whether all replicas have the same weights, bit for bit. Shards of one replica differ, and are compared with their like."""
    if job.outer is None:
        return
    told = control.gather([job.ranks.coordinate("dp_shard"), job.outer.hash()])
    for shard in range(job.ranks.size("dp_shard")):
        found = [one for place, one in told if place == shard]
        if len(set(found)) > 1:
            raise UserError("replicas ended with different weights", "resume from an older checkpoint, and check the memory of all devices")
