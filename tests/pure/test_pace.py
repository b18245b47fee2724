"""The pace of a CPU: two factors from other models, less of the host where autograd keeps no record, and lines of numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.probe.ops import order
from foretell.price.host import START, HostModel
from foretell.price.kernels.lines import lines
from foretell.price.kernels.shapes import Shape
from foretell.prove import zoo_cpu
from foretell.simulate.pace import Pace, ProfileSeconds, pace_of, said
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.on_cpu import trace_as_cpu
from foretell.trace.store import file
from foretell.trace.types import NO_GRAD, TensorSpec, Trace

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------- two factors


def pacers(rng: random.Random, ops: float, host: float, noise: float = 0.0, count: int = 10) -> list[tuple[ProfileSeconds, float]]:
    found = []
    for _ in range(count):
        one = ProfileSeconds(rng.uniform(1e-3, 20e-3), rng.uniform(0.3e-3, 6e-3))
        found.append((one, (ops * one.ops + host * one.host) * (1 + rng.uniform(-noise, noise))))
    return found


@pytest.mark.parametrize(("ops", "host"), [(1.0, 1.0), (1.4, 0.8), (0.7, 2.1), (2.5, 1.2)])
def test_both_factors_are_found_again(ops: float, host: float) -> None:
    rng = random.Random(1)
    found = pace_of(pacers(rng, ops, host, noise=0.05))
    assert found.models == 10
    assert found.ops == pytest.approx(ops, rel=0.12) and found.host == pytest.approx(host, rel=0.25)
    for one, measured in pacers(rng, ops, host, count=20):
        assert found.seconds(one) == pytest.approx(measured, rel=0.12)
    one_factor = sum(m for _, m in pacers(random.Random(1), ops, host)) / sum(s.ops + s.host for s, _ in pacers(random.Random(1), ops, host))
    asked = pacers(rng, ops, host, count=50)
    worst = max(abs(found.seconds(one) / measured - 1) for one, measured in asked)
    if ops != host:
        assert worst < max(abs(one_factor * (one.ops + one.host) / measured - 1) for one, measured in asked)


def test_one_model_that_is_far_off_does_not_set_the_pace() -> None:
    known = pacers(random.Random(2), 1.3, 0.9)
    spoilt = [*known[:-1], (known[-1][0], 3 * known[-1][1])]
    assert pace_of(spoilt).ops == pytest.approx(1.3, rel=0.1)


def test_models_that_are_all_alike_give_one_factor() -> None:
    found = pace_of([(ProfileSeconds(2e-3, 1e-3), 4.5e-3), (ProfileSeconds(4e-3, 2e-3), 9e-3)])
    assert found.ops == pytest.approx(1.5, rel=1e-3) and found.host == pytest.approx(1.5, rel=1e-3)
    assert pace_of([]) == Pace()


def test_no_factor_is_below_zero() -> None:
    found = pace_of([(ProfileSeconds(1e-3, 1e-3), 1e-3), (ProfileSeconds(1e-3, 9e-3), 0.8e-3), (ProfileSeconds(2e-3, 0.1e-3), 2.5e-3)])
    assert found.ops > 0 and found.host > 0


def test_a_model_never_paces_itself() -> None:
    known = dict(zip("abcdefgh", pacers(random.Random(3), 1.2, 0.8, count=8), strict=True))
    wild = {**known, "x": (ProfileSeconds(5e-3, 1e-3), 1.0)}
    assert zoo_cpu.pace_without(wild, "x") == zoo_cpu.pace_without(known, "x")
    assert zoo_cpu.pace_without(wild, "x").models == 8 and zoo_cpu.pace_without(wild, "a").models == 8
    assert not {entry.name for entry in _checked()} & set(zoo_cpu.PACERS)


def test_a_machine_that_is_slower_for_a_while_slows_the_pace() -> None:
    assert zoo_cpu.drift([2.0, 4.0], [3.0, 6.0]) == 1.5 and zoo_cpu.drift([], []) == 1.0
    slow = Pace(ops=1.2, host=0.8, models=9).slowed(1.5)
    assert slow.seconds(ProfileSeconds(2.0, 1.0)) == pytest.approx(1.5 * 3.2) and slow.models == 9
    assert set(zoo_cpu.BEAT) < set(zoo_cpu.PACERS)


def _checked() -> list[zoo_cpu.Any]:
    from foretell.prove.zoo import every

    return list(every())


def test_the_check_predicts_one_thread() -> None:
    profile = find_profile("CPU", threads=1)
    assert profile is not None and profile.threads == 1
    other = find_profile("CPU")
    assert other is not None and other.threads != 1


# ---------------------------------------------------------------- what autograd does not write down


def traced(phase: str = "neuron", **recipe: object) -> Trace:
    source = Source(model="perforated-tiny", micro_batch=2, overrides={"phase": phase})
    return trace_as_cpu(source, Recipe(precision="fp32", **recipe))  # type: ignore[arg-type]


def test_ops_of_frozen_parts_are_marked_and_the_host_has_less_to_do_for_them() -> None:
    trace = trace_as_cpu(Source(model="bert-tiny", micro_batch=2), Recipe(precision="fp32"))
    frozen = trace_as_cpu(Source(model="bert-tiny", micro_batch=2), Recipe(precision="fp32", freeze=("embeddings", "blocks")))
    asked = trace_as_cpu(Source(model="bert-tiny", micro_batch=2), Recipe(precision="fp32", mode="infer"))
    shares = [_share(one) for one in (trace, frozen, asked)]
    assert shares[0] < 0.2 < shares[1] <= shares[2] == 1.0
    for one in (trace, frozen):
        assert not any(NO_GRAD in op.attrs for op in one.ops() if op.phase in ("backward", "update"))
    model = HostModel({**START, "plain": START["forward"] / 4, "plain_view": START["view"] / 4}, {"": 0.0})
    names = [name for name, _ in trace.schedule["steady_step"]]
    plain, dear = (
        sum(sum(HostModel(weights, {"": 0.0}).issues(frozen.programs[name].ops)) for name in names)
        for weights in (model.weights, {**START, "plain": START["forward"], "plain_view": START["view"]})
    )
    assert plain < dear


def _share(trace: Trace) -> float:
    forward = [op for op in trace.ops() if op.phase == "forward" and op.name.startswith("aten.")]
    return sum(NO_GRAD in op.attrs for op in forward) / len(forward)


def test_the_shipped_profile_has_learned_that() -> None:
    profile = find_profile("CPU", threads=1)
    assert profile is not None
    weights = HostModel.from_dict(profile.host).weights
    assert weights["plain"] < 0.7 * weights["forward"] and weights["plain_view"] < 0.7 * weights["view"]


def test_a_gpus_trace_has_no_such_marks() -> None:
    from functools import partial

    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source = Source(model="bert-tiny", micro_batch=2)
    trace = capture(partial(load, source), Recipe(precision="fp32", mode="infer"), capability=(9, 0))
    assert not any(NO_GRAD in op.attrs for op in trace.ops())


def test_the_mark_is_kept_in_a_file_and_a_file_without_it_is_as_before() -> None:
    trace = traced()
    kept = file.loads(file.dumps(trace))
    assert [op.attrs for op in kept.ops()] == [op.attrs for op in trace.ops()] and any(NO_GRAD in op.attrs for op in kept.ops())
    older = replace(trace, programs={
        name: replace(program, ops=tuple(replace(op, attrs=tuple(a for a in op.attrs if a != NO_GRAD)) for op in program.ops))
        for name, program in trace.programs.items()
    })  # fmt: skip
    assert file.loads(file.dumps(older)).programs == older.programs
    profile = find_profile("CPU", threads=1)
    assert profile is not None
    from foretell.price.machine import machine

    known = machine(parse("CPU").device, profile)
    assert known is not None
    assert said(older, known).ops == pytest.approx(said(trace, known).ops) and said(older, known).host > said(trace, known).host


def test_an_older_profile_prices_both_alike() -> None:
    model = HostModel.from_dict({"weights": {name: 2 * value for name, value in START.items() if "plain" not in name}, "calls": {},
                                 "references": 0, "error": 0.0})  # fmt: skip
    assert model.weights["plain"] == model.weights["forward"] and model.weights["plain_view"] == model.weights["view"]


# ---------------------------------------------------------------- lines


def walked(whole: tuple[int, ...], inputs: list[tuple[int, ...]]) -> int:
    """Numbers before the first step that is unlike the one before it, in any tensor."""
    total = torch.Size(whole).numel()
    least = total
    for shape in inputs:
        where = torch.arange(torch.Size(shape).numel()).view(shape).expand(whole).flatten()
        steps = where.diff()
        breaks = (steps != steps[0]).nonzero() if len(steps) else steps
        least = min(least, int(breaks[0]) + 1 if len(breaks) else total)
    return least


def evenly(whole: tuple[int, ...], inputs: list[tuple[int, ...]]) -> int:
    """Numbers before the first line that does not begin as far from the one before it as that from its own, in any tensor."""
    total, line = torch.Size(whole).numel(), walked(whole, inputs)
    least = total
    for shape in inputs:
        where = torch.arange(torch.Size(shape).numel()).view(shape).expand(whole).flatten()[::line]
        steps = where.diff()
        breaks = (steps != steps[0]).nonzero() if len(steps) else steps
        least = min(least, (int(breaks[0]) + 1) * line if len(breaks) else total)
    return least


def test_lines_of_broadcast_tensors_are_those_that_a_walk_finds() -> None:
    rng = random.Random(4)
    for _ in range(300):
        whole = tuple(rng.choice((1, 2, 3, 5, 7)) for _ in range(rng.randint(1, 4)))
        inputs = [tuple(size if rng.random() < 0.6 else 1 for size in whole)[rng.randint(0, 1) :] for _ in range(2)]
        inputs.append(whole)
        op = Shape("aten.mul.Tensor", tuple(TensorSpec(shape, "float32") for shape in inputs), (TensorSpec(whole, "float32"),), ())
        numel = torch.Size(whole).numel()
        found, planes = lines("pointwise", op)
        assert found == pytest.approx(numel / walked(whole, inputs) - 1), (whole, inputs)
        assert planes == pytest.approx(numel / evenly(whole, inputs) - 1), (whole, inputs)


def test_lines_of_sums() -> None:
    def of(shape: tuple[int, ...], kept: tuple[int, ...], *attrs: int | bool) -> float:
        return lines("reduction", Shape("aten.sum.dim_IntList", (TensorSpec(shape, "float32"),), (TensorSpec(kept, "float32"),), attrs))[0]

    assert of((100, 3, 2), (100, 2), 1, False) == 299  # two numbers at a time
    assert of((100, 3, 2), (100, 1, 2), 1, True) == 299
    assert of((100, 3, 2), (100, 3), 2, False) == 299
    assert of((100, 3, 2), (100,), 1, 2, False) == 99
    assert of((100, 6), (), ) == 0


def test_narrow_cases_are_for_cpus_alone() -> None:
    assert any(family == "short_attention" for family, _ in order("cpu"))
    assert not any(family == "short_attention" for family, _ in order("cuda"))
