# mypy: ignore-errors
"""Kernels of the stand-ins: each has so many thread blocks, moves the bytes of its message and ends when the message would.

The clock is the device's own, in nanoseconds (%globaltimer), so that a lower clock rate changes nothing. A block notes the
time, moves its part of the data and then waits: what is moved is inside the duration, and the cores are taken throughout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

BLOCK = 8192
"""Elements that a thread block moves at a time: so many loads under way that 16 blocks keep up with any link."""
WARPS = 16
"""Of a block: 512 threads, as NCCL has, so that no product's block finds room beside it."""


@triton.jit
def _wait_until(end):
    now = globaltimer()
    while now < end:
        now = globaltimer()


@triton.jit(do_not_specialize=["count", "copies", "nanoseconds"])
def spread(source, target, count, copies, nanoseconds, BLOCK: tl.constexpr):
    """`copies` times `count` elements of the source, one after the other; source and target may be the same. Of one copy nothing is
    written where target is source, but all is read and written back: that is what a sum in place moves."""
    end = globaltimer() + nanoseconds
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, count, step):
        at = first.to(tl.int64) + tl.arange(0, BLOCK)
        inside = at < count
        values = tl.load(source + at, mask=inside)
        for copy in range(copies):
            tl.store(target + copy.to(tl.int64) * count + at, values, mask=inside)
    _wait_until(end)


@triton.jit(do_not_specialize=["count", "pieces", "scale", "nanoseconds"])
def add_up(source, target, count, pieces, scale, nanoseconds, BLOCK: tl.constexpr):
    """The sum of the source's pieces, times `scale`."""
    end = globaltimer() + nanoseconds
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, count, step):
        at = first.to(tl.int64) + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for piece in range(0, pieces, 2):  # two at a time, so that enough loads are under way
            one = source + piece.to(tl.int64) * count + at
            first_half = tl.load(one, mask=inside)
            second_half = tl.load(one + count, mask=inside & (piece + 1 < pieces), other=0.0)
            total += first_half.to(tl.float32) + second_half.to(tl.float32)
        tl.store(target + at, (total * scale).to(target.dtype.element_ty), mask=inside)
    _wait_until(end)


@triton.jit(do_not_specialize=["count", "seed", "scale"])
def normal(target, count, seed, scale, BLOCK: tl.constexpr):
    """Normal numbers."""
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, count, step):
        at = first + tl.arange(0, BLOCK)
        values = tl.randn(seed, at) * scale
        tl.store(target + at, values.to(target.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["count", "nanoseconds"])
def leave(source, stamp, count, nanoseconds, BLOCK: tl.constexpr):
    """Read what is sent, and note when it is gone: the latest of the blocks."""
    end = globaltimer() + nanoseconds
    step = tl.num_programs(0) * BLOCK
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for first in range(tl.program_id(0) * BLOCK, count, step):
        at = first.to(tl.int64) + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < count, other=0).to(tl.int64)
    used = tl.sum(total, axis=0) == -9223372036854775807  # so that it is read; never the case
    _wait_until(end)
    tl.atomic_max(stamp, globaltimer() + used.to(tl.int64))


@triton.jit
def note(stamp):
    """The time now."""
    tl.store(stamp, globaltimer())


@triton.jit(do_not_specialize=["count"])
def arrive(stamps, delays, count, BLOCK: tl.constexpr):
    """Wait until every stamp is at least its delay ago; a delay below zero is none."""
    at = tl.arange(0, BLOCK)
    delay = tl.load(delays + at, mask=at < count, other=-1)
    stamp = tl.load(stamps + at, mask=at < count, other=0, volatile=True)
    _wait_until(tl.max(tl.where(delay < 0, 0, stamp + delay), axis=0))


@triton.jit(do_not_specialize=["nanoseconds"])
def hold(nanoseconds):
    """Only wait."""
    _wait_until(globaltimer() + nanoseconds)
