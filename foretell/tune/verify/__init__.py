"""Verify a kernel as if it were trying to cheat.

    parent: seeds, inputs, fp64 oracle, comparison, clock
      │  raw bytes ──►  reference process: the reference, eager and in fp64
      └─ raw bytes ──►  candidate process: no network, no way out, limits; it never sees a seed, a reference or an expected value

`harness.py` runs the stages in order and stops at the first that fails; a stage is checks over what the parent received
(`checks.py`, `compare.py`: pure). `cases.py` draws what is asked, `source.py` and `scan.py` read files without running them;
`inside` is the other side.
"""
