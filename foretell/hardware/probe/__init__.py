"""Measure this machine: what ops, copies, launches and watts cost here. Every figure is a row of a profile.

    run.probe("auto", "quick")     → Measured, every row kept in a journal as soon as it is known
    journal.gather(path)           → Measured, of a journal that is there, finished or not
    ranks.probe_ranks()            → under torchrun: collectives and every pair of ranks, as one cluster
    summary.summary(measured)      → the few figures people ask for first

`journal` and `summary` do without torch, and so does this package itself.
"""

import os


def under_torchrun() -> bool:
    """Whether this process is one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")
