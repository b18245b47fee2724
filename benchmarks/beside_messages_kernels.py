# mypy: ignore-errors
"""The kernel of benchmarks/beside_messages.py that copies all the while."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["count", "nanoseconds"])
def copying(source, target, count, nanoseconds, BLOCK: tl.constexpr):
    """Copy round and round until the time is up."""
    end = globaltimer() + nanoseconds
    step = tl.num_programs(0) * BLOCK
    start = tl.program_id(0) * BLOCK
    first = start
    now = globaltimer()
    while now < end:
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at))
        first += step
        first = tl.where(first + BLOCK > count, start, first)
        now = globaltimer()
