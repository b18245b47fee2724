"""Everything about speed at once: seconds, throughput, utilisation, joules, money, and the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.errors import FileFormatError, UserError
from foretell.hardware.footprint import footprint
from foretell.hardware.prices import carbon_g_per_kwh, carbon_of, price_per_hour, pue
from foretell.hardware.types import Cluster
from foretell.plan.precision import computes_in
from foretell.price import energy as watts
from foretell.price.host import steady
from foretell.price.machine import machine
from foretell.price.occupancy import share
from foretell.price.speeds import Options, profile_for
from foretell.price.time import Machine, op_prices, unmeasured_ops
from foretell.quantities import Cost, Energy, Mfu, Run, Throughput, Time, Utilisation
from foretell.simulate.goodput import SAVED, Goodput, assumed_costs, goodput, rejoin_costs, rejoining
from foretell.simulate.parts import PlanCost, sequence_length
from foretell.simulate.wishes import Amount, RunRequest
from foretell.trace.types import TF32, Trace

CONVENTION = "2 FLOPs a multiply-add, forward and backward counted op by op from the trace; causal attention at half; recomputation only in hfu"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """All that follows from the timeline of a step; empty where nothing is known of the device's speed."""

    time: Time | None = None
    throughput: Throughput | None = None
    mfu: Mfu | None = None
    utilisation: Utilisation | None = None
    energy: Energy | None = None
    cost: Cost | None = None
    run: Run | None = None
    goodput: Goodput | None = None
    notes: tuple[str, ...] = ()


def speed(cost: PlanCost, cluster: Cluster, how: Options, wishes: RunRequest | None = None, copies: int = 1) -> Speed:
    """What follows from a plan's seconds, for all of its ranks together, and for so many copies of it side by side."""
    asked, device, time, plan = wishes or RunRequest(), cluster.device, cost.time, cost.plan
    known = machine(device, profile_for(cluster, how.profile_of))
    if known is None or time is None:
        return Speed(notes=(f"no speed: nothing was measured on a {device.backend} device yet; run `foretell probe` there",))
    ranks, local, per_step = copies * plan.mesh.world, cost.programs[0], copies * cost.per_step
    if time.step_seconds <= 0:
        raise FileFormatError(f"the profile of {cluster.device.name} gives a step no time", "measure it again: foretell probe")
    rate = per_step / time.step_seconds
    throughput = Throughput(unit=cost.unit, per_step=per_step, per_second=rate, per_second_per_device=rate / ranks)
    dtype = computes_in(plan.precision)
    if dtype == "float32" and "tf32" in device.peak_flops_per_second and any(TF32 in op.attrs for op in local.ops()):
        dtype = "tf32"  # the user's own code asked for it
    peak = device.peak(dtype)
    flops, again = copies * cost.model_flops, copies * cost.recompute_flops
    model, all_ = (each / ranks / time.step_seconds / peak for each in (flops, flops + again))
    mfu = Mfu(
        value=model, hfu=all_, flops_per_step=flops, peak_flops_per_second=peak, peak_dtype=dtype, convention=CONVENTION
    )
    notes = list(known.notes)
    if guessed := unmeasured_ops(local, known):
        notes.append(f"seconds of {', '.join(guessed)} are assumed: the profile was measured without them; `foretell probe --full` measures them")
    load = watts.load_of(local, device, time.step_seconds, time.device_seconds)
    carbon = carbon_g_per_kwh(asked.region) if asked.region else carbon_of(cluster)
    joules = watts.energy(time, cost.watts, known.power, ranks, carbon, pue()[0]) if cost.watts is not None and known.power is not None else None
    price, source = (asked.price, "given by the user") if asked.price is not None else price_per_hour(device)
    money = watts.cost(time.step_seconds, throughput, price, source, ranks) if price is not None else None
    length = sequence_length(local, plan.micro_batch)
    return Speed(
        time=time, throughput=throughput, mfu=mfu if device.backend != "cpu" else None, energy=joules, cost=money, notes=tuple(notes),
        utilisation=_utilisation(local, known, time, load) if device.backend != "cpu" else None,
        goodput=goodput_of(cost, cluster, asked.mtbf),
        run=_run(asked.amount, throughput, time, cluster, ranks, joules, money, length),
    )  # fmt: skip


def goodput_of(cost: PlanCost, cluster: Cluster, mtbf: float | None) -> Goodput | None:
    """Of a plan that nobody has run, where a time between failures was given."""
    if mtbf is None:
        return None
    step = cost.time.step_seconds if cost.time is not None else None
    sync = cost.plan.sync
    if sync is not None and sync.quorum and cost.rounds is not None:
        known = rejoin_costs(cost.rounds.kept_bytes, cluster, step)
        return rejoining(known, mtbf, replicas=cost.plan.mesh.dp_replicate, quorum=sync.quorum, every=sync.every)
    nbytes = sum(cost.worst.memory.categories.get(name, 0) for name in SAVED)
    return goodput(assumed_costs(nbytes, cluster, step, cost.plan.mesh.world), mtbf)


def _utilisation(local: Trace, known: Machine, time: Time, load: watts.DeviceLoad) -> Utilisation:
    """Of a step's time, of multiprocessors, of product units and of memory; each op's share weighted by its seconds."""
    prices, worked = op_prices(local, known), 0.0
    for name, times in steady(local):
        worked += times * sum(prices[id(op)][1] * share(op, known.ops.device.sm_count) for op in local.programs[name].ops if id(op) in prices)
    return Utilisation(
        busy=load.busy, multiprocessors=min(load.busy, worked / time.step_seconds), compute=min(1.0, load.compute),
        memory_bandwidth=min(1.0, load.memory), provenance=time.provenance,
    )  # fmt: skip


def _run(
    amount: Amount | None, throughput: Throughput, time: Time, cluster: Cluster, ranks: int, joules: Energy | None,
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
        amount.number, amount.unit, per_step, time, ranks, energy=joules, cost=money,
        embodied_kg_per_device=made.embodied_kg_co2 if made else None, lifetime_years=made.lifetime_years if made else 5.0,
    )  # fmt: skip
