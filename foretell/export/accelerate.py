"""Hugging Face Accelerate: the file of `accelerate launch --config_file` (1.15 and alike)."""

from __future__ import annotations

from typing import Any

from foretell.export.text import yaml
from foretell.export.types import Exported, header, machines_of, modes_of, only_on_foretell, refuse
from foretell.plan.precision import computes_in
from foretell.plan.types import Plan, Split

NAME = "accelerate.yaml"


def write(plan: Plan) -> Exported:
    mesh, where = plan.mesh, machines_of(plan)
    if mesh.pp > 1:
        raise refuse("accelerate", f"pp {mesh.pp}", "it trains no pipelines")
    if mesh.ep > 1:
        raise refuse("accelerate", f"ep {mesh.ep}", "it spreads no experts")
    if mesh.tp > 1 and not str(plan.model.get("model")).startswith("hf:"):
        raise refuse("accelerate", f"tp {mesh.tp}", "its tensor parallelism is that of models of transformers alone")
    sharded = mesh.dp_shard > 1 or mesh.tp > 1 or mesh.cp > 1
    plain = "MULTI_CPU" if where.backend == "cpu" else "MULTI_GPU"
    kind = "FSDP" if sharded else plain if mesh.world > 1 else "NO"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[computes_in(plan.precision)],
        "use_cpu": where.backend == "cpu",
        "num_machines": where.nodes,
        "num_processes": mesh.world,
        "machine_rank": 0,
        "rdzv_backend": "static" if where.nodes == 1 else "c10d",
        "same_network": True,
        "main_training_function": "main",
    }
    if sharded:
        values["fsdp_config"] = _fsdp(plan)
        values["parallelism_config"] = {
            f"parallelism_config_{axis}_size": getattr(mesh, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp")
        }
    if plan.compile in ("model", "blocks"):
        values["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": plan.compile == "blocks"}
    lost = _lost(plan)
    steps = f" --gradient_accumulation_steps {plan.accumulate}" if plan.accumulate > 1 else ""
    return Exported(
        files={NAME: header(plan, "accelerate", lost) + yaml(values)},
        command=f"accelerate launch --config_file {NAME}{steps} YOUR_SCRIPT.py", lost=tuple(lost),
    )  # fmt: skip


def _fsdp(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.reshard is not False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": modes_of(plan) == {"recompute"},
    }


def _lost(plan: Plan) -> list[str]:
    lost = [f"micro_batch: your script's data loader must give {plan.micro_batch} samples at a time"]
    if plan.accumulate > 1:
        lost.append(f"accumulate: --gradient_accumulation_steps {plan.accumulate} of `accelerate launch` says it, and the script must use it")
    lost.append(f"optimizer: {plan.optimizer} is chosen by your script")
    if plan.clip is not None:
        lost.append(f"clip: your script must call accelerator.clip_grad_norm_ with {plan.clip:g}")
    if plan.mesh.dp_shard > 1:
        lost.append("blocks to shard: set fsdp_transformer_layer_cls_to_wrap to their class; models of transformers know it themselves")
    if plan.mesh.data > 1 and type(plan.reshard) is int and plan.reshard > 1:
        lost.append(f"reshard: parameters go back to groups of {plan.reshard} ranks; here to all")
    modes = modes_of(plan)
    if modes - {"keep"} and (modes != {"recompute"} or plan.mesh.dp_shard == 1):
        told = ", ".join(sorted(modes))
        lost.append(f"blocks: {told}; only FSDP's recompute of every block can be said here, the rest is your script's to do")
    if plan.precision == "bf16":
        lost.append("precision: weights in bf16 are your script's; mixed_precision bf16 keeps them in fp32")
    if plan.mesh.tp > 1:
        lost.append("split: layers are split as the model's own plan says (transformers), not as this plan derives it")
        if not (plan.split or Split()).sequence:
            lost.append("split.sequence")
    if plan.compile == "graphs":
        lost.append("compile: CUDA graphs")
    return lost + only_on_foretell(plan)
