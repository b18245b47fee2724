"""torchtitan: a job file for 0.2 (TOML), and the same as a configuration function for 0.3, which reads no job files."""

from __future__ import annotations

from typing import Any

from foretell.export.text import toml
from foretell.export.types import Exported, header, machines_of, modes_of, only_on_foretell, refuse
from foretell.plan.blocks import stages_of
from foretell.plan.recipe import known_blocks
from foretell.plan.text import quoted
from foretell.plan.types import FP16, Mesh, Plan, Split

FLAVORS = {"llama3-8b": "8B", "llama3-70b": "70B", "llama3-405b": "405B"}
"""Models of the zoo that torchtitan has too, by its own name."""
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble",
             "zero-bubble-v": "ZBVZeroBubble"}  # fmt: skip
JOB, FUNCTION = "train.toml", "foretell_plan.py"
_HOW = {"fused": "fused", "foreach": "foreach", "loop": "for-loop", "": "foreach"}
_ACTIVATIONS = {"recompute": "full", "selective": "selective", "keep": "none"}


def write(plan: Plan) -> Exported:
    model = str(plan.model.get("model"))
    if model not in FLAVORS or plan.model.get("overrides"):
        told = f"{model} with other settings" if model in FLAVORS else model
        raise refuse("torchtitan", told, f"it trains its own models, of which foretell knows {', '.join(FLAVORS)}")
    kind, _, how = plan.optimizer.partition("-")
    if kind not in ("adam", "adamw"):
        raise refuse("torchtitan", f"the optimizer {plan.optimizer}", "it has Adam and AdamW")
    if plan.precision == FP16:
        raise refuse("torchtitan", f"precision {FP16}", "it scales no loss", "plan with --precision bf16-mixed or fp32")
    where, lost = machines_of(plan), _lost(plan)
    tables: dict[str, dict[str, Any]] = {
        "job": {"description": f"written by foretell for {model} on {plan.hardware}"},
        "model": {"name": "llama3", "flavor": FLAVORS[model]},
        "optimizer": {"name": {"adam": "Adam", "adamw": "AdamW"}[kind], "lr": 3e-4, "implementation": _HOW[how]},
        "training": _training(plan),
        "parallelism": _parallelism(plan, head="output"),
        "activation_checkpoint": _activations(plan),
        "compile": {"enable": plan.compile in ("model", "blocks"), "components": ["model", *(["loss"] if plan.kernels.get("loss") else [])]},
    }
    nodes = f'--nnodes {where.nodes} --rdzv-backend c10d --rdzv-endpoint "$HEAD":29500 ' if where.nodes > 1 else ""
    start = f"torchrun {nodes}--nproc-per-node {where.per_node} -m torchtitan.train"
    return Exported(
        files={
            JOB: header(plan, "torchtitan", [*lost, f"torchtitan 0.3 and later take {FUNCTION} instead"]) + toml(tables),
            FUNCTION: _function(plan, model, lost, f"{start} --module foretell_plan --config plan"),
        },
        command=f"{start} --job.config_file {JOB}",
        lost=(*lost, f"torchtitan 0.3 and later read no {JOB}: give --module foretell_plan --config plan instead"),
    )  # fmt: skip


def _training(plan: Plan) -> dict[str, Any]:
    local = plan.micro_batch * (plan.accumulate if plan.mesh.pp > 1 else 1)
    mixed = plan.precision == "bf16-mixed"
    return {
        "local_batch_size": local, "global_batch_size": plan.global_batch, "seq_len": plan.model.get("seq") or 8192,
        "max_norm": plan.clip if plan.clip is not None else 1e9,
        "dtype": "bfloat16" if plan.precision == "bf16" else "float32",
        "mixed_precision_param": "bfloat16" if mixed or plan.precision == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
    }  # fmt: skip


def _parallelism(plan: Plan, head: str) -> dict[str, Any]:
    mesh = plan.mesh
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.dp_replicate, "data_parallel_shard_degree": mesh.dp_shard,
        "tensor_parallel_degree": mesh.tp, "context_parallel_degree": mesh.cp, "pipeline_parallel_degree": mesh.pp,
        "fsdp_reshard_after_forward": "never" if plan.reshard is False else "always",
    }  # fmt: skip
    if mesh.pp > 1 and plan.pipeline is not None:
        values["pipeline_parallel_schedule"] = SCHEDULES[plan.pipeline.schedule]
        values["pipeline_parallel_microbatch_size"] = plan.micro_batch
        known = known_blocks(plan)
        if known:
            values["module_fqns_per_model_part"] = _parts(plan, known, head)
    return values


def _parts(plan: Plan, known: tuple[str, ...], head: str) -> list[list[str]]:
    """Modules of every stage by torchtitan's names."""
    parts = [[path.replace("blocks.", "layers.", 1) for path in stage] for stage in stages_of(plan, known)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def _activations(plan: Plan) -> dict[str, Any]:
    modes = modes_of(plan)
    mode = _ACTIVATIONS[next(iter(modes))] if len(modes) == 1 else "selective"
    return {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}


def trains_mixed(mesh: Mesh) -> bool:
    """Whether mixed precision takes effect: by FSDP, or by autocast where there is no tp and no pp."""
    return mesh.dp_shard * mesh.cp > 1 or mesh.tp * mesh.pp == 1


def _lost(plan: Plan) -> list[str]:
    lost = ["data and tokenizer: set training.dataset and model.hf_assets_path", "schedule of the learning rate: set lr_scheduler"]
    if plan.precision == "bf16-mixed" and not trains_mixed(plan.mesh):
        lost.append("precision: torchtitan computes in fp32 where tp or pp stand without FSDP, which takes more memory and time")
    if plan.clip is None:
        lost.append("clip: null; max_norm is set so high that it never clips")
    if len(modes_of(plan)) > 1:
        lost.append(f"blocks: {', '.join(sorted(modes_of(plan)))} each for some; torchtitan treats all alike, here selectively")
    if plan.compile == "graphs":
        lost.append("compile: graphs")
    if plan.compile == "model":
        lost.append("compile: torchtitan compiles block by block")
    if type(plan.reshard) is int and plan.reshard > 1:
        lost.append(f"reshard: to groups of {plan.reshard} ranks")
    if plan.mesh.pp > 1 and not known_blocks(plan):
        lost.append("pipeline.cuts: the plan does not name the model's blocks, so torchtitan cuts by itself")
    if plan.mesh.tp > 1 and not (plan.split or Split()).loss:
        lost.append("split.loss")
    if plan.mesh.ep > 1:
        lost.append("mesh.ep")
    return lost + only_on_foretell(plan)


def _function(plan: Plan, model: str, lost: list[str], command: str) -> str:
    """A module for `--module foretell_plan --config plan`. It begins with code: a comment there could name an encoding."""
    name = model.replace("-", "_")
    modes = modes_of(plan)
    only = next(iter(modes)) if len(modes) == 1 else "selective"
    kept = {"recompute": "FullAC.Config()", "selective": "SelectiveAC.Config()", "keep": "None"}[only]
    lines = [
        "from __future__ import annotations",
        "",
        f"# {command}",
        header(plan, "torchtitan", lost).rstrip(),
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401",
        f"from torchtitan.models.llama3.config_registry import {name}",
        "", "",
        "def plan():",
        f"    config = {name}()",
        *(f"    config.training.{key} = {_python(value)}" for key, value in _training(plan).items()),
        *(f"    config.parallelism.{key} = {_python(value)}" for key, value in _parallelism(plan, head="lm_head").items()),
        f"    config.compile.enable = {plan.compile in ('model', 'blocks')}",
        f"    config.activation_checkpoint = {kept}",
        "    return config",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)
