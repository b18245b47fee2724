"""What a file says of ranks and batches, put together with what is typed and with the devices there are. What is typed wins."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from foretell.errors import UserError
from foretell.export.read.reading import ToolConfig
from foretell.export.torchtitan import trains_mixed
from foretell.plan.described import DescribedLayout
from foretell.plan.types import AXES, LOOPED, Mesh

_RANKS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that make ranks: ep uses those of others."""


def ranks(config: ToolConfig, typed: Mapping[str, Any]) -> int | None:
    """How many the file means, with degrees that are typed; None where the devices decide."""
    degrees = _degrees(config, typed)
    return prod(degrees.values()) if -1 not in degrees.values() else config.world


def described(config: ToolConfig, typed: Mapping[str, Any], devices: int) -> DescribedLayout:
    """The layout on so many devices; `typed` are options by name, None or missing where they were not typed."""
    for option, why in config.demands.items():
        if typed.get(option) is None:
            raise UserError(why, f"type --{option.replace('_', '-')} to answer for another")
    mesh = _mesh(config, typed, devices)
    options = config.options
    micro, accumulate, total = _batch(config, typed, mesh)
    precision = typed.get("precision") or options.get("precision")
    if options.get("mixed_needs_shards") and typed.get("precision") is None and not trains_mixed(mesh) and precision == "bf16-mixed":
        precision = "fp32"
        config.assumed.append("torchtitan computes in fp32 where tp or pp stand without FSDP: --precision fp32")
    given = {name: options[name] for name in ("cuts", "per_stage", "ends", "split_loss") if options.get(name) is not None}
    schedule = typed.get("schedule") or options.get("schedule") or "1f1b"
    if schedule in LOOPED and "cuts" in given and typed.get("schedule"):
        del given["cuts"]  # of another schedule
    clip = typed.get("clip") if typed.get("clip") is not None else options.get("clip")
    return DescribedLayout(
        mesh=mesh, micro_batch=micro, accumulate=accumulate, global_batch=total, precision=precision, clip=clip, schedule=schedule,
        optimizer=typed.get("optimizer") or options.get("optimizer"), recompute=typed.get("recompute") or options.get("recompute"),
        reshard=options.get("reshard", True), compile=typed.get("compile") or options.get("compile"), **given,
    )  # fmt: skip


def told(mesh: Mesh) -> str:
    return " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one device"


# ---------------------------------------------------------------------- ranks


def _degrees(config: ToolConfig, typed: Mapping[str, Any]) -> dict[str, int]:
    found = {axis: config.mesh.get(axis, 1) for axis in _RANKS}
    found.update({axis: int(typed[axis]) for axis in _RANKS if typed.get(axis) is not None})
    return found


def _mesh(config: ToolConfig, typed: Mapping[str, Any], devices: int) -> Mesh:
    degrees = _degrees(config, typed)
    said = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree != 1) or "one rank"
    for axis, degree in degrees.items():
        if degree < 1 and degree != -1:
            raise UserError(f"{axis} is {degree}", "give a whole number above zero")
    wanted = ranks(config, typed)
    if wanted is not None and wanted != devices:
        raise UserError(f"the file has {wanted} ranks ({said}) and there are {devices} devices", f"--on as many as {wanted}, or other degrees")
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    others = prod(degree for degree in degrees.values() if degree != -1)
    if rest:
        if len(rest) > 1:
            raise UserError(f"{' and '.join(rest)} are both the rest of the ranks", "give one of them")
        if devices % others:
            raise UserError(f"{said} makes groups of {others} ranks, and {devices} devices are no multiple of that", "other degrees")
        degrees[rest[0]] = devices // others
    experts = int(typed.get("ep") or config.mesh.get("ep", 1))
    if (degrees["dp_shard"] * degrees["cp"]) % experts:
        raise UserError(f"ep {experts} is no part of dp_shard {degrees['dp_shard']}", "a divisor of dp_shard")
    return Mesh(**degrees, ep=experts)


# ---------------------------------------------------------------------- batches


def _batch(config: ToolConfig, typed: Mapping[str, Any], mesh: Mesh) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, how many of them, and where that is open the samples of a step."""
    options = config.options
    pipelined = mesh.pp > 1 and "pipeline_micro_batch" in options
    micro = typed.get("micro_batch") or options.get("pipeline_micro_batch" if pipelined else "micro_batch")
    rounds = options.get("accumulate")
    total = typed.get("global_batch") or options.get("global_batch")
    if pipelined and total is None:
        total = options.get("local_batch", options["micro_batch"]) * mesh.data
    own = "micro_batch" not in typed and "global_batch" not in typed  # typed sizes win over all three of a file
    if typed.get("accumulate"):
        return micro, int(typed["accumulate"]), None
    if total is not None:
        if rounds and micro and own and total != micro * rounds * mesh.data:
            raise UserError(
                f"{total} samples a step are not {micro} × {rounds} of {mesh.data} data ranks", "correct the file, or the number of devices"
            )
        if micro is None and rounds and "global_batch" not in typed and total % (rounds * mesh.data) == 0:
            micro = total // (rounds * mesh.data)
        if micro is None:
            if total % mesh.data:
                raise UserError(f"{total} samples a step cannot be shared by {mesh.data} data ranks", "a multiple of them")
            return None, None, total
        if total % (micro * mesh.data):
            raise UserError(f"{total} samples a step are no multiple of {mesh.data} data ranks × {micro}", "sizes of which one divides the other")
        return micro, total // (micro * mesh.data), None
    return micro, rounds or (1 if mesh.pp == 1 else None), None
