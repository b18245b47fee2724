"""A kernel of one warp that watches the device's clock: every jump is a stretch in which another process had the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["most", "nanoseconds", "least"])
def _watch(out, most, nanoseconds, least):
    begin = globaltimer()
    last = begin
    place = begin * 0
    tl.store(out, begin)
    while last - begin < nanoseconds:
        now = globaltimer()
        jumped = (now - last > least) & (place + 3 < most)
        tl.store(out + place + 1, last, mask=jumped)
        tl.store(out + place + 2, now, mask=jumped)
        place += 2 * jumped.to(tl.int64)
        last = now
    tl.store(out + place + 1, last)


def watch(out: torch.Tensor, nanoseconds: int, least: int) -> None:
    """Write begin and end of each stretch in turn, for so long; a stretch ends where the clock jumps by more than `least`."""
    _watch[(1,)](out, out.numel(), nanoseconds, least, num_warps=1)
