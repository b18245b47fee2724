"""Everything about speed at once: seconds, throughput, utilisation, joules, money, and the whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.cost import energy as watts
from foretell.cost.host import steady
from foretell.cost.machine import machine
from foretell.cost.prediction import Cost, Energy, Mfu, Run, Throughput, Time
from foretell.cost.streams import Timeline
from foretell.cost.time import predict_time, unmeasured_ops
from foretell.cost.wishes import Amount, Wishes
from foretell.errors import UserError
from foretell.hardware.footprint import footprint
from foretell.hardware.prices import carbon_g_per_kwh, carbon_of, price_per_hour, pue
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.trace.recipe import COMPUTES, Recipe
from foretell.trace.types import Trace

CONVENTION = "2 FLOPs a multiply-add, counted op by op from the trace; causal attention at half; recomputation only in hfu"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """All that follows from the timeline of a step; empty where nothing is known of the device's speed."""

    time: Time | None = None
    throughput: Throughput | None = None
    mfu: Mfu | None = None
    energy: Energy | None = None
    cost: Cost | None = None
    run: Run | None = None
    timeline: Timeline | None = None
    notes: tuple[str, ...] = ()


def speed(
    trace: Trace, counted: Trace, recipe: Recipe, cluster: Cluster, micro_batch: int,
    profile_of: Callable[[str], Profile | None], wishes: Wishes,
) -> Speed:  # fmt: skip
    """`trace` is what one rank runs; `counted` the step as the model defines it, for FLOPs."""
    device = cluster.device
    profile = profile_of(device.name) or profile_of(NEAREST.get(device.backend, ""))
    known = machine(device, profile)
    if known is None:
        return Speed(notes=(f"no speed: nothing was measured on a {device.backend} device yet; run `foretell probe` there",))
    time, timeline = predict_time(trace, known, cluster)
    throughput = _throughput(counted, recipe, cluster, micro_batch, time)
    flops, hardware_flops = _flops(counted)
    dtype = COMPUTES[recipe.precision]
    peak = device.peak(dtype)
    mfu = Mfu(
        value=flops / time.step_seconds / peak, hfu=hardware_flops / time.step_seconds / peak,
        flops_per_step=flops * cluster.count, peak_flops_per_second=peak, peak_dtype=dtype, convention=CONVENTION,
    )  # fmt: skip
    notes = list(known.notes)
    if guessed := unmeasured_ops(trace, known):
        notes.append(f"seconds of {', '.join(guessed)} are assumed: the profile was measured without them; `foretell probe --full` measures them")
    joules = None
    if known.power is not None:
        load = watts.load_of(trace, device, time.step_seconds, time.device_seconds)
        carbon = carbon_g_per_kwh(wishes.region) if wishes.region else carbon_of(cluster)
        joules = watts.energy(time, load, known.power, cluster.count, carbon, pue()[0])
    price, source = (wishes.price, "given by the user") if wishes.price is not None else price_per_hour(device)
    money = watts.cost(time, throughput, price, source, cluster.count) if price is not None else None
    return Speed(
        time=time, throughput=throughput, mfu=mfu, energy=joules, cost=money,
        run=_run(wishes.amount, throughput, time, cluster, joules, money, sequence_length(counted, micro_batch)),
        timeline=timeline, notes=tuple(notes),
    )  # fmt: skip


NEAREST = {"cuda": "H200-SXM-141GB", "rocm": "H200-SXM-141GB", "mps": "H200-SXM-141GB", "cpu": "CPU"}
"""Backend → the device whose profile is carried over to those that have none."""


def _throughput(counted: Trace, recipe: Recipe, cluster: Cluster, micro_batch: int, time: Time) -> Throughput:
    ranks = cluster.count if recipe.mode == "train" else 1
    samples = micro_batch * (recipe.accumulate if recipe.mode == "train" else 1) * ranks
    length = sequence_length(counted, micro_batch)
    per_step = samples * (length or 1)
    rate = per_step / time.step_seconds
    return Throughput(
        unit="tokens" if length else "samples", per_step=per_step, per_second=rate,
        per_second_per_device=rate / cluster.count,
    )  # fmt: skip


def sequence_length(trace: Trace, micro_batch: int) -> int | None:
    """Tokens of a sample: the batch's first table of integers with a row for every sample, or None."""
    batch = trace.meta.get("batch", [])
    assert isinstance(batch, list)
    for dtype, *shape in batch:
        if str(dtype).startswith("int") and len(shape) == 2 and shape[0] == micro_batch:
            return int(shape[1])
    return None


def _flops(trace: Trace) -> tuple[int, int]:
    """FLOPs of a step on one device: of the model, and with what is computed again."""
    model = again = 0
    for name, times in steady(trace):
        for op in trace.programs[name].ops:
            if op.phase == "recompute":
                again += times * (op.flops or 0)
            else:
                model += times * (op.flops or 0)
    return model, model + again


def _run(
    amount: Amount | None, throughput: Throughput, time: Time, cluster: Cluster, joules: Energy | None,
    money: Cost | None, length: int | None,
) -> Run | None:  # fmt: skip
    if amount is None:
        return None
    if amount.unit == "tokens" and throughput.unit != "tokens":
        raise UserError("the run is given in tokens, but this model's batch has none", "give it in --samples or --epochs")
    per_step = throughput.per_step
    if amount.unit == "samples" and throughput.unit == "tokens":
        per_step //= length or 1
    made = footprint(cluster.device)
    return watts.whole_run(
        amount.number, amount.unit, per_step, time, cluster.count, energy=joules, cost=money,
        embodied_kg_per_device=made.embodied_kg_co2 if made else None, lifetime_years=made.lifetime_years if made else 5.0,
    )  # fmt: skip
