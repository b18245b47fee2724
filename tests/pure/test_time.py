"""The step's timeline: sums, waits and collectives of small traces whose seconds are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.hardware import parse
from foretell.plan.types import Mesh
from foretell.price.bands import UNFAMILIAR, Evidence, factors
from foretell.price.host import COUNTS, HostModel
from foretell.price.kernels.ops import OpModel
from foretell.price.speeds import Speeds, alone, comm_time_over, fabrics_of
from foretell.price.time import Machine
from foretell.simulate.time.step import plan_time
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

BIG, SMALL = TensorSpec((8192, 8192), "bfloat16"), TensorSpec((8, 8), "bfloat16")
H200 = parse("H200")


def machine(host_seconds: float = 0.0, in_step: float = 1.0) -> Machine:

    weights = {name: host_seconds if name in ("forward", "backward", "update", "view", "backward_view") else 0.0 for name in COUNTS}

    return Machine(ops=OpModel(H200.device, {}), host=HostModel(weights, {"": 0.0}), in_step={"compute": in_step, "memory": in_step})


def trace(spec: TensorSpec, products: int, times: int = 1) -> Trace:
    ref = Ref(0, spec)
    work = 2 * spec.shape[0] ** 3
    ops = tuple(Op("aten.mm.default", (ref, ref), (ref,), "", "forward", work) for _ in range(products))
    return Trace({"p": Program("p", ops)}, {"steady_step": (("p", times),)}, {}, ())


def test_a_device_bound_step_is_the_sum_of_its_ops() -> None:
    known = machine()
    one = next(iter(known.ops.seconds([_shape(BIG)]).values()))
    time, _ = plan_time(trace(BIG, 5, times=3), alone(known))
    assert time.step_seconds == pytest.approx(15 * one, rel=1e-3)
    assert time.binds == "compute" and time.breakdown["gemm"] == pytest.approx(15 * one)
    assert 2 * 8192**3 / H200.device.peak("bfloat16") <= one


def _shape(spec: TensorSpec) -> object:
    from foretell.price.kernels.features import Shape

    return Shape("aten.mm.default", (spec, spec), (spec,), ())


def test_a_small_model_waits_for_its_host() -> None:
    time, _ = plan_time(trace(SMALL, 1000), alone(machine(host_seconds=50e-6)))
    assert time.step_seconds == pytest.approx(1000 * 50e-6, rel=0.01)
    assert time.binds == "host" and time.waiting_for_host_seconds > 0.9 * time.step_seconds


def test_the_breakdown_adds_up_to_the_step() -> None:
    for spec, host in ((BIG, 1e-6), (SMALL, 30e-6)):
        time, _ = plan_time(trace(spec, 200), alone(machine(host)))
        assert sum(time.breakdown.values()) == pytest.approx(time.step_seconds, rel=1e-6)


def test_ops_take_longer_inside_a_step() -> None:
    plain, _ = plan_time(trace(BIG, 10), alone(machine()))
    longer, _ = plan_time(trace(BIG, 10), alone(machine(in_step=1.1)))
    assert longer.step_seconds == pytest.approx(1.1 * plain.step_seconds, rel=1e-6)


def gathered(prefetched: bool) -> Trace:
    """Two blocks whose parameters come from other ranks; the first is copied out, which frees the way for the second gather,
    before the first compute or after it."""
    ref, flat = Ref(0, BIG), TensorSpec((1 << 28,), "bfloat16")
    part = TensorSpec((1 << 25,), "bfloat16")
    gather = Op("foretell.all_gather", (Ref(1, part),), (Ref(2, flat),), "", "forward", 0, attrs=("axis:dp_shard", "ranks:8"))
    out = Op("foretell.all_gather_copy_out", (Ref(2, SMALL),), (Ref(3, SMALL),), "", "forward", 0)
    work = [Op("aten.mm.default", (ref, ref), (ref,), "", "forward", 2 * 8192**3) for _ in range(10)]
    first = [gather, out, *work, gather, out] if prefetched else [gather, *work, out, gather, out]
    return Trace({"p": Program("p", (*first, *work))}, {"steady_step": (("p", 1),)}, {}, ())


def test_a_prefetched_gather_hides_behind_compute_and_a_late_one_does_not() -> None:
    eight = Speeds(machine=machine(), comm_time=comm_time_over(fabrics_of(Mesh(dp_shard=8), parse("H200:8"))), alone=False)
    early, _ = plan_time(gathered(True), eight)
    late, _ = plan_time(gathered(False), eight)
    assert early.step_seconds < late.step_seconds
    assert early.exposed_communication_seconds < late.exposed_communication_seconds
    assert late.provenance == "assumed"


def test_the_band_is_the_one_of_what_is_known_of_the_step() -> None:
    known = machine(host_seconds=50e-6)
    time, _ = plan_time(trace(SMALL, 500), alone(known))
    low, high = factors(Evidence(host_share=time.waiting_for_host_seconds / time.step_seconds))
    assert time.binds == "host"
    assert time.low_seconds == pytest.approx(low * time.step_seconds)
    assert time.high_seconds == pytest.approx(high * time.step_seconds)
    far, _ = plan_time(trace(SMALL, 500), alone(replace(known, known_by=UNFAMILIAR)))
    assert far.step_seconds == time.step_seconds and far.high_seconds > time.high_seconds


def test_counts_of_steps_are_read_by_the_host_beside_the_device() -> None:
    """An optimizer that is not fused reads one number for each parameter. They are in host memory: nobody waits for the device."""
    spec = TensorSpec((4096, 4096), "bfloat16")
    plain, count = trace(spec, 20), Ref(900, TensorSpec((), "float32"))
    reading = Op("aten._local_scalar_dense.default", (count,), (), "", "update", 0)
    program = next(iter(plain.programs.values()))
    longer = replace(program, ops=(*program.ops, *[reading] * 500))

    def seconds(*, host: bool) -> float:
        storages = {**plain.storages, 900: Storage(4, "optimizer", "", host=host)}
        read = replace(plain, programs={program.name: longer}, storages=storages)
        return plan_time(read, alone(machine()))[0].step_seconds

    alone_ = plan_time(plain, alone(machine()))[0].step_seconds
    assert seconds(host=True) == pytest.approx(alone_)
    assert seconds(host=False) > 1.1 * alone_
