"""A program that leaves memory as it found it is not replayed again: what comes out is what replaying all of it gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretell.simulate.memory.allocator import CachingAllocator, OutOfMemory
from foretell.simulate.memory.replay import Curve, Replay, Sizes, holders_at
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

MIB = 1 << 20


def drawn(seed: int, times: int) -> Trace:
    """A step whose repeated program makes and frees tensors of random sizes, some of which stay until the next one."""
    draw = random.Random(seed)
    storages = {n: Storage(draw.choice((700, MIB // 2, 3 * MIB, 11 * MIB, 40 * MIB)) + draw.randrange(MIB), types.TEMPORARY, "m") for n in range(24)}
    ops: list[Op] = []
    alive: list[int] = []
    free = list(storages)
    for _ in range(60):
        gone: tuple[int, ...] = ()
        if alive and (draw.random() < 0.5 or not free):
            gone = (alive.pop(draw.randrange(len(alive))),)
        born = (free.pop(draw.randrange(len(free))),) if free else ()
        ops.append(Op("aten.mm.default", (), tuple(Ref(n, TensorSpec((storages[n].nbytes,), "uint8")) for n in born), "m", "forward", 0, born, gone))
        alive += born
        free += gone
    programs = {"again": Program("again", tuple(ops)), "once": Program("once", (Op("x", (), (), "", "update", 0, (), tuple(alive[::2])),))}
    run = (("again", times), ("once", 1))
    return Trace(programs=programs, schedule={"first_step": run, "steady_step": run}, storages=storages, resident=())


def replayed(trace: Trace, *, skip: bool, limit: int | None = None) -> object:
    replay = Replay(trace, Sizes((9, 0), 8 * MIB), limit=limit)
    if not skip:
        replay.watch(lambda *_: None)
    try:
        replay.start()
        for name in ("first_step", "steady_step", "steady_step"):
            replay.run(name)
    except OutOfMemory:
        return "out of memory"
    allocator = replay.allocator
    assert isinstance(allocator, CachingAllocator)
    return allocator.peak_allocated, allocator.peak_reserved, allocator.reserved, allocator.segments(), allocator.retries


@pytest.mark.parametrize("seed", range(12))
def test_repetitions_are_skipped_only_where_nothing_would_differ(seed: int) -> None:
    for times in (3, 9):
        trace = drawn(seed, times)
        whole = replayed(trace, skip=False)
        assert replayed(trace, skip=True) == whole
        assert isinstance(whole, tuple)
        for share in (0.98, 0.9, 0.75):  # the cache is given back on the way, or memory runs out
            limit = int(whole[1] * share)
            assert replayed(trace, skip=True, limit=limit) == replayed(trace, skip=False, limit=limit)
        assert holders_at(trace, Sizes((9, 0), 8 * MIB), ["first_step"], whole[0])[0]


def test_repetitions_are_skipped_and_the_curve_has_them() -> None:
    trace = drawn(1, 9)
    looked: list[int] = []
    replay = Replay(trace, Sizes((9, 0), 8 * MIB))
    replay.watch(lambda *_: looked.append(replay.allocator.allocated))
    replay.run("first_step")
    again = Replay(trace, Sizes((9, 0), 8 * MIB))
    curve, steps = Curve(again), list[Op]()
    step = again._step
    again._step = lambda op, stages, extra: (steps.append(op), step(op, stages, extra))[1]  # type: ignore[method-assign]
    again.run("first_step")
    assert [allocated for allocated, _ in curve.points] == looked
    assert len(steps) < len(looked), "some were not run"


@pytest.mark.parametrize("seed", range(12))
def test_holders_of_a_moment_are_those_that_a_replay_up_to_it_finds(seed: int) -> None:
    trace, sizes = drawn(seed, 5), Sizes((9, 0), 8 * MIB)
    twice = Program("again", trace.programs["again"].ops * 2)  # ops may be in a program more than once
    named = {number: storage._replace(module=f"m{number}") for number, storage in trace.storages.items()}
    trace = replace(trace, programs={**trace.programs, "again": twice}, storages=named)
    replay = Replay(trace, sizes)
    curve, names = Curve(replay), ["first_step", "steady_step", "steady_step"]
    replay.start()
    for name in names:
        replay.run(name)
    assert curve.highest is not None and curve.highest.allocated == replay.allocator.peak_allocated
    found, op = holders_at(trace, sizes, names, replay.allocator.peak_allocated)
    assert replay.holders_then(curve.highest) == found and curve.highest.op is op
