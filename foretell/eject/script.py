"""From a plan to a standalone training script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretell.eject.compose import ScriptPart, is_word, literal, part_of, piece, script
from foretell.eject.model import Brought, bring
from foretell.errors import UserError
from foretell.plan import legal, paths
from foretell.plan.blocks import expand
from foretell.plan.facts import facts_of
from foretell.plan.precision import MIXED
from foretell.plan.recipe import refuse_other_model
from foretell.plan.text import plain, shell_word
from foretell.plan.types import AXES, FP16, KEEP, PRECISIONS, Mesh, Plan
from foretell.runtime.parallel.shard import units
from foretell.runtime.train.folder import RunSettings
from foretell.trace.fold.blocks import find_blocks

SCHEDULES = {"gpipe": "gpipe", "1f1b": "one", "interleaved-1f1b": "looped"}
"""Schedules whose stages plain PyTorch can run → the flag of the part that says so."""
_OPTIONS = {"fused": "fused=True", "foreach": "foreach=True", "loop": "foreach=False, fused=False", "": ""}
_WRITTEN = {
    "model", "hardware", "mesh", "placement", "pipeline", "split", "micro_batch", "accumulate", "precision", "optimizer",
    "clip", "blocks", "reshard", "compile", "kernels", "predicted", "notes", "version",
}  # fmt: skip
"""Fields of a plan that a script follows, or that change nothing."""


@dataclass(frozen=True, kw_only=True)
class Ejected:
    """A script and what is to be known about it."""

    text: str
    command: str
    notes: tuple[str, ...]


def eject(plan: Plan, out: Path, settings: RunSettings | None = None) -> Ejected:
    """The script of a plan, to be written to `out`; raises what needs foretell's own runtime, and why."""
    settings = settings or RunSettings()
    legal.check(plan, facts_of(plan))
    for what, why in needs_runtime(plan):
        raise UserError(f"{what} cannot be ejected: {why}", "run it with `foretell run`, or change that in the plan")
    brought = bring(plan, settings.data, out.absolute().parent)
    model = brought.workload.model
    refuse_other_model(plan, {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()})
    blocks = find_blocks(model)
    flags = _flags(plan, brought, blocks)
    values = _values(plan, brought, blocks, settings, out)
    parts = [brought.part]
    if plan.mesh.tp > 1:
        from foretell.eject.tensor import styled

        split = styled(plan, blocks)
        flags["loss_parallel"] = split.loss
        parts.append(part_of(f'"""Tensor parallelism"""\nfrom torch import nn\n{split.text}'))
    if plan.mesh.pp > 1:
        from foretell.eject.stages import leaving

        left = leaving(brought.workload, plan, blocks)
        flags["tied"] = bool(left.tied)
        values.update(TIED=literal(list(left.tied)), LAYERS=_rows_text(left.layers))
    command = _command(plan, out)
    text = script(_header(plan, brought, command), [piece("settings", flags, values), *parts, *_pieces(plan, flags, values)])
    return Ejected(text=text, command=command, notes=tuple(_notes(plan, flags, model)))


def needs_runtime(plan: Plan) -> list[tuple[str, str]]:
    """What of a plan only foretell's own runtime does, and why."""
    found: list[tuple[str, str]] = []
    if plan.placement:
        found.append(("the placement", "torchrun gives rank r the r-th device, and the plan has them in another order"))
    if plan.states or plan.weights:
        found.append(("states or weights on the host", "moving them in time is foretell's own"))
    if plan.precision not in PRECISIONS:
        found.append((f"precision {plan.precision}", "a script has fp32, bf16 and mixed precision alone"))
    if plan.mesh.cp > 1:
        found.append((f"cp {plan.mesh.cp}", "attention over a shared sequence is foretell's own"))
    if plan.mesh.ep > 1:
        found.append((f"ep {plan.mesh.ep}", "sending tokens to experts on other ranks is foretell's own"))
    if plan.mesh.pp > 1 and plan.pipeline is not None:
        if plan.mesh.tp > 1:
            found.append(("tp with pp", "between stages PyTorch's schedules send plain tensors, and its styles keep split ones"))
        if plan.pipeline.schedule not in SCHEDULES:
            found.append((f"the schedule {plan.pipeline.schedule}", "its stages take backward apart, for which foretell prepares what they send"))
    strange = [op for op, kernel in plan.kernels.items() if (op, kernel) != ("loss", "compiled")]
    if strange:
        found.append((f"the kernel for {strange[0]}", "it is foretell's own"))
    default = Plan(model={}, hardware="")
    for item in fields(Plan):
        if item.name not in _WRITTEN and getattr(plan, item.name) != getattr(default, item.name):
            found.append((item.name, "a script has no way to say it"))
    for axis in fields(Mesh):
        if axis.name not in AXES and getattr(plan.mesh, axis.name) != 1:
            found.append((f"mesh.{axis.name}", "a script has no way to say it"))
    for pattern, residency in plan.blocks.items():
        if residency.mode not in ("keep", "recompute", "selective"):
            found.append((f"{pattern}: {residency.mode}", "moving activations is foretell's own"))
    return found


# --- what the parts are told -----------------------------------------------------------------------------------------


def _flags(plan: Plan, brought: Brought, blocks: Sequence[str]) -> dict[str, bool]:
    mesh = plan.mesh
    modes = {residency.mode for residency in expand(plan.blocks, blocks).values()}
    own = brought.samples in ("indexed", "stream")
    schedule = SCHEDULES[plan.pipeline.schedule] if plan.pipeline is not None and mesh.pp > 1 else ""
    kind = plan.optimizer.partition("-")[0]
    return {
        "several": mesh.world > 1, "data": mesh.data > 1, "hybrid": mesh.dp_replicate > 1, "tp": mesh.tp > 1, "pp": mesh.pp > 1,
        **{name: schedule == name for name in SCHEDULES.values()},
        **{name: kind == name for name in ("adamw", "adam", "sgd", "momentum")},
        "mixed": plan.precision in MIXED, "bf16": plan.precision == "bf16", "fp16": plan.precision == FP16,
        "autocast": plan.precision in MIXED and mesh.data == 1,
        "full": "recompute" in modes, "selective": "selective" in modes,
        "compile_blocks": plan.compile == "blocks", "compile_model": plan.compile == "model",
        "compile_graphs": plan.compile == "graphs",
        "changed": bool(modes & {"recompute", "selective"}) or plan.compile == "blocks",
        "blocks": mesh.world > 1 or bool(modes & {"recompute", "selective"}) or plan.compile == "blocks",
        "units": mesh.data > 1 and mesh.pp == 1 and not _plain_units(brought, blocks),
        "clip": plan.clip is not None, "tied": False, "loss_parallel": False,
        "text": brought.samples == "text", "indexed": brought.samples == "indexed", "stream": brought.samples == "stream",
        "example": not own, "ordered": own or brought.samples == "text",
    }  # fmt: skip


def _plain_units(brought: Brought, blocks: Sequence[str]) -> bool:
    """Whether every block is gathered by itself."""
    model = brought.workload.model
    return [[id(block) for block in unit] for unit in units(model, blocks)] == [[id(model.get_submodule(path))] for path in blocks]


def _values(plan: Plan, brought: Brought, blocks: Sequence[str], settings: RunSettings, out: Path) -> dict[str, str]:
    mesh = {axis: getattr(plan.mesh, axis) for axis in AXES if getattr(plan.mesh, axis) > 1 and axis != "ep"}
    if plan.mesh.dp_replicate > 1:
        mesh["dp_shard"] = plan.mesh.dp_shard
    kept = {path: residency.mode for path, residency in expand(plan.blocks, blocks).items()}
    schedule = settings.schedule_for(plan)
    data = settings.data if settings.data and not settings.data.endswith(".py") else None
    names = {id(module): path for path, module in brought.workload.model.named_modules()}
    return {
        "BLOCKS": _paths_text(blocks),
        "RECOMPUTE": _chosen(kept, "recompute"), "SELECTIVE": _chosen(kept, "selective"),
        "CUTS": literal(list(plan.pipeline.cuts)) if plan.pipeline else "[]",
        "MESH": literal({axis: mesh[axis] for axis in AXES if axis in mesh}),
        "UNITS": literal([[names[id(block)] for block in unit] for unit in units(brought.workload.model, blocks)]),
        "RESHARD": literal(plan.reshard), "MICRO_BATCH": literal(plan.micro_batch), "ACCUMULATE": literal(plan.accumulate),
        "SEQ": literal(brought.seq), "CLIP": literal(plan.clip), "STEPS": literal(settings.steps), "DATA": literal(data),
        "LEARNING_RATE": literal(schedule.peak), "SCHEDULE": literal(settings.schedule), "WARMUP": literal(settings.warmup),
        "SEED": literal(settings.seed), "OUT": literal(f"runs/{out.stem}"),
    }  # fmt: skip


def _chosen(kept: Mapping[str, str], mode: str) -> str:
    chosen = [path for path, found in kept.items() if found == mode]
    return "BLOCKS" if len(chosen) == len(kept) else _paths_text(chosen)


def _paths_text(names: Sequence[str]) -> str:
    """`[f"blocks.{n}" for n in range(12)]` where that says it, else every name."""
    folded = paths.fold_names(names)
    if len(folded) == 1 and len(names) > 2 and list(paths.unfold(folded[0])) == list(names):
        before, _, span = folded[0].rpartition(".")
        first, dash, last = span.partition("-")
        if dash and first.isdigit() and last.isdigit() and all(map(is_word, before.split("."))):
            start = "" if first == "0" else f"{first}, "
            return f'[f"{before}.{{n}}" for n in range({start}{int(last) + 1})]'
    return literal(list(names))


def _rows_text(values: Mapping[str, Any]) -> str:
    """A mapping with a line for every entry."""
    return "{\n" + "".join(f"    {literal(key)}: {literal(value)},\n" for key, value in values.items()) + "}"


def _pieces(plan: Plan, flags: Mapping[str, bool], values: Mapping[str, str]) -> list[ScriptPart]:
    names = ["order"] if flags["ordered"] else []
    names += ["text"] if flags["text"] else []
    names += ["own"] if flags["indexed"] or flags["stream"] else []
    names += ["ranks"]
    names += ["blocks"] if flags["changed"] or flags["data"] else []
    names += ["loss"]
    names += ["scale"] if flags["fp16"] else []
    names += ["pipeline"] if flags["pp"] else []
    names += ["step", "keep", "main"]
    words = _OPTIONS[plan.optimizer.partition("-")[2]]
    found = [piece(name, flags, values) for name in names]
    return [replace(part, body=part.body.replace(", OPTIONS=True", f", {words}" if words else "")) for part in found]


# --- in words --------------------------------------------------------------------------------------------------------


def _command(plan: Plan, out: Path) -> str:
    world = plan.mesh.world
    name = shell_word(out.name)
    return f"torchrun --nproc-per-node {world} {name}" if world > 1 else f"python {name}"


def _header(plan: Plan, brought: Brought, command: str) -> str:
    mesh = [f"{axis} {getattr(plan.mesh, axis)}" for axis in AXES if getattr(plan.mesh, axis) > 1]
    modes = sorted({residency.mode for residency in plan.blocks.values() if residency != KEEP})
    said = [f"precision {plan.precision}", f"optimizer {plan.optimizer}"]
    said += [f"blocks: {', '.join(modes)}"] if modes else []
    said += [f"compile {plan.compile}"] if plan.compile != "none" else []
    said += [f"{plan.pipeline.schedule} over {plan.pipeline.stages} stages"] if plan.pipeline and plan.mesh.pp > 1 else []
    needs = f"torch and {plain(brought.needs)}" if brought.needs else "torch alone"
    return "\n".join([
        f"Train {plain(str(plan.model['model']))} on {' × '.join(mesh) or 'one device'}. Written by `foretell plan eject`; needs {needs}.",
        "",
        f"    {command}",
        "",
        f"The plan: {', '.join(said)}; {plan.global_batch} samples a step.",
        "Samples come in the same order, and losses are the same, as with `foretell run` of the plan and the same seed.",
    ])  # fmt: skip


def _notes(plan: Plan, flags: Mapping[str, bool], model: Any) -> list[str]:
    from torch import nn

    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    found = ["it does not evaluate, and its checkpoints are PyTorch's own (torch.distributed.checkpoint)"]
    if drops and (flags["tp"] or flags["pp"]):
        found.append("dropout draws other numbers than under `foretell run`: losses are alike, not equal")
    if plan.mesh.world > 1 and plan.precision == "bf16":
        found.append("weights are bf16: sums over ranks round, and losses agree to about three digits")
    return found
