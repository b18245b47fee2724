"""From a trace to a verdict: replay against brute force, verdicts around the limit, sums and order of the answer."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest

from foretell.hardware import Cluster, overhead, parse
from foretell.quantities import CATEGORIES, FITS, NO, TIGHT
from foretell.simulate.memory.memory import MemoryOutcome, fits_in, predict_memory, run_order, sizes_for, smallest_limit
from foretell.simulate.memory.replay import CUBLASLT_WORKSPACE_BYTES, Replay, Sizes, holders_at
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Op, Program, Storage, Trace
from foretell.units import MIB
from tests.further import further

H100 = parse("H100")
EXTRA = overhead(H100.device, "2.11")
SIZES = sizes_for(H100, EXTRA)


@functools.cache
def traced(model: str = "gpt-tiny", micro_batch: int = 4, **recipe: Any) -> Trace:
    return capture(lambda: load(Source(model=model, micro_batch=micro_batch)), Recipe(**recipe))


def outcome(trace: Trace, cluster: Cluster = H100, **more: Any) -> MemoryOutcome:
    return predict_memory(trace, cluster, EXTRA, **more)


def with_memory(nbytes: int) -> Cluster:
    return replace(H100, device=H100.device.with_memory(nbytes, "a test"))


def made_trace(lives: list[tuple[int, int, int]], resident: int = 0) -> Trace:
    """A step of ops without scratch: (size, born in op, dies after op); the first `resident` live all along."""
    storages = {number: Storage(size, "temporary", f"m.{number % 3}") for number, (size, _, _) in enumerate(lives)}
    last = max(end for _, _, end in lives)
    ops = [
        Op(
            "test.op", (), (), "m", "forward", 0,
            allocates=tuple(n for n, life in enumerate(lives) if n >= resident and life[1] == at),
            frees=tuple(n for n, life in enumerate(lives) if n >= resident and life[2] == at),
        )
        for at in range(last + 1)
    ]  # fmt: skip
    programs = {"forward": Program("forward", tuple(ops))}
    schedule = {"evaluation": (("forward", 1),)}
    return Trace(programs, schedule, storages, tuple(range(resident)))


def random_trace(seed: int, largest: int) -> tuple[Trace, list[tuple[int, int, int]], int]:
    rng = random.Random(seed)
    lives = []
    for _ in range(rng.randint(20, 120)):
        born = rng.randrange(60)
        lives.append((rng.choice((rng.randint(1, 4096), rng.randint(1, largest))), born, born + rng.randint(0, 20)))
    resident = rng.randint(0, 5)
    return made_trace(lives, resident), lives, resident


def brute_peak(lives: list[tuple[int, int, int]], resident: int) -> tuple[int, int]:
    """Highest sum of sizes rounded up to 512 over all ops, and how many storages are alive at the most."""
    last = max(end for _, _, end in lives)
    sums, counts = [], []
    for at in range(last + 1):
        alive = [size for n, (size, born, end) in enumerate(lives) if n < resident or born <= at <= end]
        sums.append(sum(-(-size // 512) * 512 for size in alive))
        counts.append(len(alive))
    return max(sums), max(counts)


def replayed(trace: Trace, sizes: Sizes = SIZES, **more: Any) -> Replay:
    replay = Replay(trace, sizes, **more)
    replay.start()
    for name in run_order(trace):
        replay.run(name)
    return replay


# --------------------------------------------------------------------------- replay against brute force


@pytest.mark.parametrize("seed", range(25))
def test_peak_of_small_blocks_equals_the_sum_of_what_is_alive(seed: int) -> None:
    """Up to 1 MiB nothing but the rounding to 512 bytes comes on top."""
    trace, lives, resident = random_trace(seed, MIB)
    allocator = replayed(trace).allocator
    assert allocator.peak_allocated == brute_peak(lives, resident)[0]
    assert allocator.allocated == sum(-(-size // 512) * 512 for size, _, _ in lives[:resident])
    assert allocator.peak_reserved >= allocator.peak_allocated


@pytest.mark.parametrize("seed", range(25))
def test_peak_of_large_blocks_is_at_most_a_mebibyte_each_above(seed: int) -> None:
    """A rest of up to 1 MiB stays with its block, and counts as allocated. Expandable segments keep no rest."""
    trace, lives, resident = random_trace(seed, 64 * MIB)
    least, count = brute_peak(lives, resident)
    assert least <= replayed(trace).allocator.peak_allocated <= least + count * MIB
    assert replayed(trace, expandable=True).allocator.peak_allocated == least


@pytest.mark.parametrize(
    "options",
    further(
        [{}, {"recompute": "full"}, {"optimizer": "adamw"}, {"accumulate": 2}, {"mode": "infer"}],
        [{"recompute": "full"}, {"accumulate": 2}, {"mode": "infer"}], "less is alive than where blocks are computed again",
    ),
    ids=str,
)  # fmt: skip
def test_peak_of_a_real_step_lies_between_brute_force_without_and_with_all_scratch(options: dict[str, Any]) -> None:
    trace = traced(**options)
    alive = {number for number in trace.resident if not trace.storages[number].host}
    least = most = 0
    # the bounds: without cuBLAS's workspaces and any scratch, and with both of an op at the same time
    workspaces = 2 * SIZES.cublas_workspace_bytes + CUBLASLT_WORKSPACE_BYTES
    for name in run_order(trace):
        for program, times in trace.schedule[name]:
            for op in trace.programs[program].ops * times:
                alive |= {number for number in op.allocates if not trace.storages[number].host}
                live = sum(-(-trace.storages[number].nbytes // 512) * 512 for number in alive)
                stages, extra = SIZES.scratch(op)
                scratch = sum(-(-size // 512) * 512 for stage in stages for size in stage) + extra + 512
                rests = MIB * sum(trace.storages[number].nbytes > MIB for number in alive)
                least, most = max(least, live), max(most, live + scratch + rests)
                alive -= set(op.frees)
    peak = replayed(trace).allocator.peak_allocated
    assert least + SIZES.cublas_workspace_bytes <= peak <= most + workspaces


def test_holders_at_the_peak_are_those_alive_by_brute_force() -> None:
    trace, lives, resident = random_trace(3, MIB)
    peak, _ = brute_peak(lives, resident)
    found, op = holders_at(trace, SIZES, run_order(trace), peak)
    last = max(end for _, _, end in lives)
    for at in range(last + 1):
        alive = [n for n, (_, born, end) in enumerate(lives) if n < resident or born <= at <= end]
        if sum(-(-lives[n][0] // 512) * 512 for n in alive) == peak:
            break
    expected: dict[tuple[str, str], int] = {}
    for n in alive:
        key = ("temporary", f"m.{n % 3}")
        expected[key] = expected.get(key, 0) + lives[n][0]
    assert found == expected
    assert op is trace.programs["forward"].ops[at]


# --------------------------------------------------------------------------- fragmentation


def fragmenting() -> Trace:
    """Ten blocks of 30 MiB, every second one freed, then one of 100 MiB: no hole is large enough for it."""
    lives = [(30 * MIB, n, 10 if n % 2 else 13) for n in range(10)]
    return made_trace([*lives, (100 * MIB, 11, 12)])


def test_expandable_segments_reuse_holes_that_plain_ones_cannot() -> None:
    plain, expandable = (replayed(fragmenting(), expandable=on).allocator for on in (False, True))
    assert plain.peak_allocated == expandable.peak_allocated == 300 * MIB
    assert plain.peak_reserved == 400 * MIB, "ten segments and one more"
    assert expandable.peak_reserved < plain.peak_reserved


def test_a_limit_makes_the_allocator_give_back_and_try_again() -> None:
    """Freed whole segments are given back: 5 × 30 + 100 MiB pass where 400 MiB are wanted; less than 300 never do."""
    trace, names = fragmenting(), ["evaluation"]
    assert fits_in(trace, SIZES, names, 300 * MIB)
    assert not fits_in(trace, SIZES, names, 300 * MIB - 1)
    replay = Replay(trace, SIZES, limit=300 * MIB)
    replay.run("evaluation")
    assert replay.allocator.retries > 0
    found = smallest_limit(trace, SIZES, names)
    assert 300 * MIB <= found <= 306 * MIB + 2 * MIB


# --------------------------------------------------------------------------- limits and verdicts


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}, {"recompute": "full"}], ids=str)
def test_a_larger_limit_never_hurts(options: dict[str, Any]) -> None:
    trace = traced(**options)
    names = ["first_step", "steady_step"]
    free = replayed(trace).allocator
    low, high = int(free.peak_allocated * 0.9), free.peak_reserved + 4 * MIB
    answers = [fits_in(trace, SIZES, names, limit) for limit in range(low, high, MIB)]
    assert answers == sorted(answers)
    assert not answers[0] and answers[-1]
    found = smallest_limit(trace, SIZES, run_order(trace))
    assert fits_in(trace, SIZES, names, found)
    assert not fits_in(trace, SIZES, names, int(found * 0.97) - 4 * MIB)


def test_verdict_around_the_limit() -> None:
    """From no over tight to fits as the device grows, with the margin's sign saying the same."""
    trace = traced()
    need = smallest_limit(trace, SIZES, run_order(trace)) + EXTRA.context_bytes
    order = {NO: 0, TIGHT: 1, FITS: 2}
    seen = []
    for share in (0.3, 0.8, 0.95, 0.99, 1.0, 1.02, 1.04, 1.044, 1.047, 1.05, 1.053, 1.056, 1.06, 1.1, 1.5, 3):
        answer = outcome(trace, with_memory(int(need * share)))
        memory = answer.memory
        assert memory.capacity_bytes == int(need * share)
        assert memory.margin_bytes == memory.capacity_bytes - memory.device_bytes
        assert (memory.margin_bytes < 0) == (answer.verdict == NO), f"{share} of what is needed"
        seen.append(order[answer.verdict])
    assert seen == sorted(seen) and set(seen) == {0, 1, 2}
    assert seen[3] == 0, "a device smaller than what is needed never fits"


def test_tight_near_the_limit_only() -> None:
    trace = traced()
    roomy = outcome(trace)
    assert roomy.verdict == FITS
    device = roomy.memory.device_bytes
    assert outcome(trace, with_memory(int(device / 0.94))).verdict == FITS
    assert outcome(trace, with_memory(int(device / 0.96))).verdict != FITS


# --------------------------------------------------------------------------- beside a device

MEASURED = [
    ({"model": "resnet50", "micro_batch": 256}, {"optimizer": "momentum"}, 11807082496, 14682161152),
    ({"model": "resnet50", "micro_batch": 128}, {"precision": "fp32"}, 11498630144, 13698596864),
    ({"model": "benchmarks/models/unseen.py:pointnet", "micro_batch": 27, "seq": 2048}, {"optimizer": "sgd"}, 950265856, 1453326336),
]
"""Peaks of three steps on an H200, torch 2.11 (benchmarks/results/memory.jsonl, unseen.jsonl)."""


@pytest.mark.parametrize(
    ("source", "recipe", "allocated", "reserved"), further(MEASURED, [MEASURED[0], MEASURED[2]], "in fp32, as it was in bf16"),
    ids=["resnet50", "resnet50-fp32", "pointnet"],
)
def test_peaks_of_convolution_nets_are_those_measured(source: dict[str, Any], recipe: dict[str, Any], allocated: int, reserved: int) -> None:
    """What is reserved depends on where the workspaces of both gradients of a convolution come; the sum of a mask is made of int64."""
    h200 = parse("H200")
    trace = capture(lambda: load(Source(**source)), Recipe(**recipe))
    memory = predict_memory(trace, h200, overhead(h200.device, "2.11")).memory
    assert memory.allocated_bytes == pytest.approx(allocated, rel=0.001)
    low, high = memory.bands["reserved_bytes"]
    assert low <= reserved <= high


# --------------------------------------------------------------------------- the answer adds up

ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("gpt-tiny", {}), ("gpt-tiny", {"optimizer": "adamw"}), ("gpt-tiny", {"recompute": "full"}),
    ("gpt-tiny", {"mode": "infer"}), ("vit-tiny", {"precision": "fp32"}), ("resnet-tiny", {}),
    ("gpt-tiny", {"lora": 4, "nf4": True}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options"), further(ANSWERS, ANSWERS[2:4] + ANSWERS[5:], "another optimizer or model of the same answer"), ids=str)
def test_answer_is_consistent_in_itself(model: str, options: dict[str, Any]) -> None:
    trace = traced(model, **options)
    memory = outcome(trace).memory
    beside = EXTRA.context_bytes

    assert set(memory.categories) <= set(CATEGORIES)
    assert sum(memory.categories.values()) == memory.allocated_bytes
    sizes = list(memory.categories.values())
    assert sizes == sorted(sizes, reverse=True) and min(sizes) >= 0
    threads, rest = divmod(memory.categories["workspace"], SIZES.cublas_workspace_bytes)
    assert threads == (1 if options.get("mode") == "infer" else 2) and rest in (0, CUBLASLT_WORKSPACE_BYTES)
    weights = [trace.storages[n].nbytes for n in trace.resident if trace.storages[n].role in ("parameter", "buffer")]
    assert memory.categories["parameters"] == sum(weights)

    sizes = [holder.bytes for holder in memory.holders]
    assert sizes == sorted(sizes, reverse=True) and 0 < len(sizes) <= 12
    assert sum(sizes) <= memory.allocated_bytes
    for holder in memory.holders:
        assert holder.bytes <= memory.categories[holder.category]
        assert not any(part.isdigit() for part in holder.name.split("."))

    for name, (low, high) in memory.bands.items():
        assert low < getattr(memory, name) < high
    assert set(memory.bands) == {"allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes"}

    steps = ["evaluation"] if options.get("mode") == "infer" else ["first_step", "steady_step", "evaluation"]
    assert [phase.name for phase in memory.phases] == ["init", *steps, "save", "load"]
    assert memory.allocated_bytes == max(phase.allocated_bytes for phase in memory.phases)
    assert memory.reserved_bytes == max(phase.reserved_bytes for phase in memory.phases)
    assert memory.device_bytes == memory.reserved_bytes + beside
    assert memory.host_bytes == max(phase.host_bytes for phase in memory.phases)
    for phase in memory.phases:
        assert phase.allocated_bytes <= phase.reserved_bytes == phase.device_bytes - beside
    init = memory.phases[0]
    assert init.allocated_bytes >= sum(trace.storages[number].nbytes for number in trace.resident)
    assert init.allocated_bytes <= sum(trace.storages[number].nbytes + 512 for number in trace.resident) + MIB


def test_evaluation_needs_less_than_training() -> None:
    training, evaluation = outcome(traced()).memory, outcome(traced(mode="infer")).memory
    assert evaluation.allocated_bytes < training.allocated_bytes
    assert evaluation.device_bytes < training.device_bytes
    assert not {"gradients", "optimizer"} & set(evaluation.categories)
    state = 3 * 4 * traced().meta["parameters"]  # type: ignore[operator]
    assert training.phases[2].allocated_bytes - evaluation.allocated_bytes > 0.5 * state


def test_the_first_step_has_no_optimizer_state_in_its_forward() -> None:
    """Adam makes its state in the first update.

    Expandable segments, so that no unsplit rests blur the difference, and next to no workspace, which backward makes.
    """
    little = replace(EXTRA, cublas_workspace_bytes=512)
    memory = predict_memory(traced(micro_batch=16), H100, little, expandable=True).memory
    first, steady = memory.phases[1], memory.phases[2]
    state = sum(s.nbytes for s in traced(micro_batch=16).storages.values() if s.role == "optimizer")
    assert 0 <= steady.allocated_bytes - first.allocated_bytes - state <= 512 * len(
        [s for s in traced(micro_batch=16).storages.values() if s.role == "optimizer"]
    )


@pytest.mark.parametrize("micro_batch", further([1, 8], [8], "the same at another size"))
def test_more_samples_more_recompute_less(micro_batch: int) -> None:
    one, two = (outcome(traced(micro_batch=n)).memory for n in (micro_batch, 2 * micro_batch))
    assert one.allocated_bytes < two.allocated_bytes
    full = outcome(traced(micro_batch=2 * micro_batch, recompute="full")).memory
    assert full.categories.get("activations", 0) < two.categories["activations"]
    assert full.allocated_bytes < two.allocated_bytes
