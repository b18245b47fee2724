"""Faults that are done to supervised runs of a plan on purpose, each run compared with one that nothing hurt. No torch; Linux.

    campaign ──► trial: `foretell run PLAN --max-restarts` ◄── faults: kill, hang, damage, ...
        │           │
        │           └─► remains: losses, checkpoint sums, place in the data  ──► compared with those of the twin
        └─► trials file, one row each ──► table

`boot` is found by the Python of a trial's processes where the fault is a clock that jumps.
"""
