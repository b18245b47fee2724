"""What a user may ask of a plan, and what cannot be asked together. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from foretell.errors import UserError, near_names
from foretell.hardware.types import Cluster
from foretell.plan.described import DescribedLayout
from foretell.plan.legal import stages_allowed
from foretell.plan.precision import refuse_plan
from foretell.plan.types import (
    AXES,
    CODED_FORMATS,
    COMPILES,
    FORMATS,
    FP16,
    MASTER,
    PRECISIONS,
    SCHEDULES,
    Adapters,
    Mesh,
    Sync,
)
from foretell.trace.recipe import base_untrained, coded_problems

OBJECTIVES = {
    "throughput": "most tokens (or samples) a second",
    "latency": "least seconds a step",
    "cost": "least money a token",
    "energy": "least joules a token",
    "smallest": "fewest devices that fit, then the fastest",
}
APART = ("tp", "cp", "pp")
"""Axes with which experts are not spread: rows of whole samples alone are sent, and no pipeline of them is predicted."""


@dataclass(frozen=True, kw_only=True)
class SearchConstraints:
    """What the user asks of a plan."""

    global_batch: int | None = None
    """Samples of one optimizer step; None: whatever runs fastest."""
    precision: str | None = None
    """None: as the hardware computes fastest (`plan.precision`)."""
    optimizer: str = "adamw-fused"
    clip: float | None = 1.0
    ranks: tuple[int, ...] = ()
    """Numbers of ranks to try; empty: all devices, on a CPU one and two."""
    compile: tuple[str, ...] = ()
    """Ways to compile to try; empty: those whose speed was measured."""
    meshes: tuple[Mesh, ...] = ()
    """Meshes to try; empty: all that make sense."""
    objective: str = "throughput"
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Axis → degree that it must have."""
    schedule: str | None = None
    """Of pipelines; None: any."""
    micro_batch: int | None = None
    margin: float = 0.0
    """Share of each device's memory to leave free, besides what the prediction may be off by."""
    tokens: float | None = None
    """Of the whole run."""
    deadline_seconds: float | None = None
    """For the whole run."""
    budget: float | None = None
    """Dollars for the whole run."""
    hbm: int | None = None
    """Bytes of each device that plans may use, where that is less than it has."""
    host: int | None = None
    """Bytes of host memory that plans may use; None: what the host is known to have, less a reserve."""
    disk: int = 0
    """Bytes on the disk that plans may use."""
    state_format: str | None = None
    """Of optimizer states, with bf16-master or one of CODED_FORMATS; None: fp32."""
    adapters: Adapters | None = None
    """What is trained instead of the model."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Of adapted layers: the format of their frozen weights, as plans have it."""
    loss_chunks: int | None = None
    """Of the output layer and the loss; None: 1, and more where nothing fits otherwise and logits are what is large."""
    kernels: tuple[str, ...] = ()
    """Ops that foretell's own kernels do."""
    sync: Sync | None = None
    """How replicas that step alone are joined; None: gradients are summed in every step."""
    may_part: bool = False
    """Whether replicas may step alone, where links are slow."""
    may_adapt: bool = False
    """Whether plans may have adapters, where nothing fits that trains the model."""
    may_code: bool = False
    """Whether plans may have moments in 8 bits, where nothing fits without."""
    described: DescribedLayout | None = None
    """The layout of another tool's file: that plan is costed, and no other is looked for."""

    @property
    def coded(self) -> str:
        """Format of states that stay on the device beside weights without a master."""
        return self.state_format if self.state_format in CODED_FORMATS and self.precision != MASTER else "fp32"

    @property
    def any_size(self) -> bool:
        """Whether plans may leave devices idle."""
        return self.objective in ("cost", "energy", "smallest")


def check(wishes: SearchConstraints, cluster: Cluster | None = None, blocks: int | None = None) -> None:
    """Raise where wishes are not known, or contradict each other or the hardware; the first such, in one line."""
    _names(wishes)
    _amounts(wishes)
    _whole_run(wishes)
    _degrees(wishes)
    _adapters(wishes)
    _loss_chunks(wishes)
    _sync(wishes)
    if cluster is not None:
        _hardware(wishes, cluster)
    if blocks is not None:
        _blocks(wishes, blocks)


def _names(wishes: SearchConstraints) -> None:
    for what, value, known in (
        ("objective", wishes.objective, OBJECTIVES), ("precision", wishes.precision, (*PRECISIONS, MASTER)),
        ("state-format", wishes.state_format, FORMATS),
        ("schedule", wishes.schedule, SCHEDULES), *(("compile", way, COMPILES) for way in wishes.compile),
    ):  # fmt: skip
        if value is not None and value not in known:
            near = near_names(str(value), tuple(known))
            raise UserError(f"--{what} {value!r} is not known", " or ".join(near) if near else f"one of {', '.join(known)}")


def _amounts(wishes: SearchConstraints) -> None:
    for what, number in (("global-batch", wishes.global_batch), ("micro-batch", wishes.micro_batch)):
        if number is not None and number < 1:
            raise UserError(f"--{what} is {number}", "give a whole number above zero")
    if not 0 <= wishes.margin < 1:
        raise UserError(f"--margin is {wishes.margin:g}", "give the share of memory to leave free, such as 0.1")
    for what, amount in (("tokens", wishes.tokens), ("deadline", wishes.deadline_seconds), ("budget", wishes.budget)):
        if amount is not None and not 0 < amount < float("inf"):
            raise UserError(f"--{what} is {amount:g}", "give a number above zero")
    if wishes.global_batch is not None and wishes.micro_batch is not None and wishes.global_batch % wishes.micro_batch:
        raise UserError(
            f"--global-batch {wishes.global_batch} is no multiple of --micro-batch {wishes.micro_batch}",
            "give sizes of which one divides the other",
        )


def _whole_run(wishes: SearchConstraints) -> None:
    _formats(wishes)
    for what, amount in (("deadline", wishes.deadline_seconds), ("budget", wishes.budget)):
        if amount is not None and wishes.precision == MASTER:
            raise UserError(f"--{what} is not searched for with --precision {MASTER}", f"leave --{what} out")
        if amount is not None and wishes.tokens is None:
            raise UserError(f"--{what} is given without the length of the run", "add --tokens, such as --tokens 1e12")
    if wishes.objective == "latency" and wishes.global_batch is None:
        raise UserError("--objective latency is given without --global-batch: one sample would win", "add --global-batch")


def _formats(wishes: SearchConstraints) -> None:
    asked = wishes.state_format
    if asked not in (None, "fp32", *CODED_FORMATS) and wishes.precision != MASTER:
        raise UserError(f"--state-format {asked} is for bf16 weights with a master", f"add --precision {MASTER}")
    if asked == "int4" and wishes.precision == MASTER:
        raise UserError(f"--state-format int4 does not go with --precision {MASTER}", "int8, or another precision")
    for problem, remedy in coded_problems(wishes.coded, wishes.optimizer, wishes.precision == FP16):
        raise UserError(f"--state-format {asked}: {problem}", remedy)
    for axis in ("tp", "ep") if wishes.coded != "fp32" else ():
        if wishes.fixed.get(axis, 1) > 1:
            raise UserError(f"--{axis} {wishes.fixed[axis]} and --state-format {asked}: rows with one scale are not cut", f"leave --{axis} out")


def _degrees(wishes: SearchConstraints) -> None:
    for axis, degree in wishes.fixed.items():
        if axis not in AXES:
            raise UserError(f"'{axis}' is no axis of a mesh", f"one of {', '.join(AXES)}")
        if degree < 1:
            raise UserError(f"--{flag(axis)} is {degree}", "give a whole number above zero")
    experts = wishes.fixed.get("ep", 1)
    for axis in APART:
        if experts > 1 and wishes.fixed.get(axis, 1) > 1:
            raise UserError(f"--ep {experts} and --{axis} {wishes.fixed[axis]} do not go together", "leave one of them out")
    if wishes.fixed.get("dp_shard", experts) % experts:
        raise UserError(f"--ep {experts} is no part of --dp-shard {wishes.fixed['dp_shard']}", "a divisor of --dp-shard")
    if wishes.schedule is not None and wishes.fixed.get("pp") == 1:
        raise UserError(f"--schedule {wishes.schedule} and --pp 1 are given together", "leave one of them out")
    data = wishes.fixed.get("dp_replicate", 1) * wishes.fixed.get("dp_shard", 1)
    batch = wishes.global_batch
    if batch is not None and batch % data:
        told = _told(wishes, ("dp_replicate", "dp_shard"))
        raise UserError(f"--global-batch {batch} cannot be shared by the {data} data ranks of {told}", "give a multiple of them")
    if batch is not None and wishes.micro_batch is not None and batch % (data * wishes.micro_batch):
        raise UserError(
            f"--global-batch {batch} is no multiple of {data} data ranks × --micro-batch {wishes.micro_batch}",
            f"--global-batch {max(1, batch // (data * wishes.micro_batch)) * data * wishes.micro_batch}",
        )


def _adapters(wishes: SearchConstraints) -> None:
    if wishes.base and wishes.adapters is None:
        raise UserError(base_untrained(wishes.base.values()), "add --lora RANK, for example --lora 16")
    if wishes.adapters is None and not wishes.may_adapt:
        return
    if wishes.fixed.get("ep", 1) > 1:
        raise UserError(f"--ep {wishes.fixed['ep']} and adapters are asked for: experts have no adapters", "leave --ep out")
    whole = "a packed base" if wishes.base else str(wishes.adapters.kind) if wishes.adapters and "dora" in wishes.adapters.kind else ""
    if wishes.fixed.get("tp", 1) > 1 and whole:
        raise UserError(f"--tp {wishes.fixed['tp']} and {whole} are asked for, which needs whole layers", "leave --tp out, or use --pp or --cp")
    for what, given in (("precision bf16-master", wishes.precision == MASTER), ("from", wishes.described is not None)):
        if given:
            raise UserError(f"--{what} does not go with adapters", "leave one of them out")


def _loss_chunks(wishes: SearchConstraints) -> None:
    chunks = wishes.loss_chunks
    if chunks is None or chunks == 1:
        return
    if chunks < 1:
        raise UserError(f"--loss-chunks is {chunks}", "give a whole number above zero")
    for axis in ("tp", "pp", "cp", "ep"):
        if wishes.fixed.get(axis, 1) > 1:
            told = f"--{axis} {wishes.fixed[axis]} and --loss-chunks are given: chunks are of tokens that a rank has whole"
            raise UserError(told, f"leave --{axis} out")
    for what, given in (("precision bf16-master", wishes.precision == MASTER), ("from", wishes.described is not None)):
        if given:
            raise UserError(f"plans with --{what} are not searched with --loss-chunks", "leave one of them out")


def _sync(wishes: SearchConstraints) -> None:
    if wishes.sync is None:
        return
    for axis in ("tp", "pp", "cp", "ep"):
        if wishes.fixed.get(axis, 1) > 1:
            told = f"--{axis} {wishes.fixed[axis]} and --sync-every are given: replicas that step alone have whole layers, or shards of them"
            raise UserError(told, f"leave --{axis} out")
    for what, given in (("precision bf16-master", wishes.precision == MASTER), ("from", wishes.described is not None),
                        ("may sync", wishes.may_part), ("lora", wishes.adapters is not None)):  # fmt: skip
        if given:
            raise UserError(f"plans with --{what} are not searched with --sync-every", "leave one of them out")


def _hardware(wishes: SearchConstraints, cluster: Cluster) -> None:
    if wishes.precision is not None:
        refuse_plan(wishes.precision, cluster)
    if wishes.precision == MASTER and cluster.device.backend == "cpu":
        raise UserError(f"--precision {MASTER} is planned for GPUs, and --on is a CPU", "GPUs, or bf16-mixed")
    if cluster.device.backend == "cpu":
        return
    count, degrees = cluster.count, {axis: n for axis, n in wishes.fixed.items() if axis != "ep"}
    ranks = prod(degrees.values())
    told = _told(wishes, tuple(degrees))
    if ranks > count:
        raise UserError(f"{told} makes {ranks} ranks and there are {count} devices", "smaller degrees, or more devices")
    if count % ranks and not wishes.any_size:
        raise UserError(f"{told} makes groups of {ranks} ranks, and {count} devices are no multiple of that", "other degrees")
    inside = cluster.devices_per_domain or cluster.devices_per_node
    tensor = degrees.get("tp", 1)
    if cluster.nodes > 1 and (tensor > inside or inside % tensor):
        raise UserError(
            f"--tp {tensor} does not lie inside a node of {inside} devices, and would cross the network in every block",
            f"a divisor of {inside}",
        )
    all_given = {"dp_replicate", "dp_shard", "tp", "pp"} <= degrees.keys()
    if all_given and ranks != count and not wishes.any_size:
        raise UserError(f"{told} makes {ranks} ranks and there are {count} devices", "leave one of the degrees out")


def _blocks(wishes: SearchConstraints, blocks: int) -> None:
    stages = wishes.fixed.get("pp", 1)
    if stages > 1 and wishes.schedule is not None:
        allowed = stages_allowed(wishes.schedule, stages)
        stages = allowed[2] if allowed else stages
    if stages > max(1, blocks):
        have = f"{blocks} blocks" if blocks else "no repeated blocks"
        raise UserError(f"--pp {wishes.fixed['pp']} wants {stages} stages and the model has {have}", f"--pp {max(1, blocks)} or less")


def _told(wishes: SearchConstraints, axes: tuple[str, ...]) -> str:
    return " × ".join(f"--{flag(axis)} {wishes.fixed[axis]}" for axis in axes if axis in wishes.fixed)


def flag(axis: str) -> str:
    return axis.replace("_", "-")
