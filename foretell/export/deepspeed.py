"""DeepSpeed: the JSON that `deepspeed.initialize(config=...)` takes (0.19 and alike)."""

from __future__ import annotations

import json
from typing import Any

from foretell.export.types import Exported, machines_of, modes_of, only_on_foretell, refuse, title
from foretell.plan.precision import MIXED, computes_in
from foretell.plan.types import FP16, Plan

NAME = "ds_config.json"
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "momentum": "SGD"}
RATES = {"adam": 3e-4, "adamw": 3e-4, "sgd": 0.1, "momentum": 0.02}


def write(plan: Plan) -> Exported:
    mesh, where = plan.mesh, machines_of(plan)
    if mesh.pp > 1:
        raise refuse("deepspeed", f"pp {mesh.pp}", "its pipelines are models rewritten as PipelineModule, not configuration")
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1:
            raise refuse("deepspeed", f"{axis} {getattr(mesh, axis)}", "its own is called from the model's code")
    if mesh.tp > 1 and not str(plan.model.get("model")).startswith("hf:"):
        raise refuse("deepspeed", f"tp {mesh.tp}", "its tensor parallelism knows models of transformers alone")
    kind = plan.optimizer.partition("-")[0]
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulate,
        "gradient_clipping": plan.clip or 0.0,
        "bf16": {"enabled": computes_in(plan.precision) == "bfloat16"},
        **({"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2000}} if plan.precision == FP16 else {}),
        "zero_optimization": _zero(plan),
        "optimizer": {"type": OPTIMIZERS[kind], "params": {"lr": RATES[kind], **_options(plan)}},
    }
    if mesh.tp > 1:
        values["tensor_parallel"] = {"autotp_size": mesh.tp}
    else:  # with tp DeepSpeed counts all ranks here, and would find that the numbers do not agree
        values = {"train_batch_size": plan.global_batch, **values}
    lost = _lost(plan)
    command = f"deepspeed --num_nodes {where.nodes} --num_gpus {where.per_node} YOUR_SCRIPT.py --deepspeed_config {NAME}"
    told = {"_written_by": f"foretell plan export --to deepspeed, for {title(plan)}", "_not_said_here": lost}
    return Exported(files={NAME: json.dumps({**told, **values}, indent=2) + "\n"}, command=command, lost=tuple(lost))


def _zero(plan: Plan) -> dict[str, Any]:
    if plan.mesh.dp_shard == 1:
        return {"stage": 0}
    if plan.reshard is False:  # parameters stay whole from forward to backward
        return {"stage": 2, "overlap_comm": True, "contiguous_gradients": True}
    values: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if plan.mesh.dp_replicate > 1:
        values["zero_hpz_partition_size"] = plan.mesh.dp_shard
    return values


def _options(plan: Plan) -> dict[str, Any]:
    kind, _, how = plan.optimizer.partition("-")
    if kind == "momentum":
        return {"momentum": 0.9}
    if kind in ("adam", "adamw"):
        weights = {"weight_decay": 0.01} if kind == "adamw" else {}
        return {"betas": [0.9, 0.999], "eps": 1e-8, **weights, **({"torch_adam": True} if how != "fused" else {})}
    return {}


def _lost(plan: Plan) -> list[str]:
    lost = ["schedule of the learning rate: add a \"scheduler\", or step one of your own"]
    modes = modes_of(plan) - {"keep"}
    if modes:
        lost.append(f"blocks: {', '.join(sorted(modes))} is done by calls in the model (gradient_checkpointing_enable in transformers)")
    if plan.precision in MIXED:
        name = plan.precision.partition("-")[0]
        lost.append(f"precision: {name} here means {name} weights beside fp32 master weights, which takes 2 bytes a parameter more")
    if plan.precision == "bf16":
        lost.append("precision: fp32 master weights are kept beside those in bf16")
    if plan.mesh.dp_shard > 1 and plan.reshard is False:
        lost.append("reshard: ZeRO-2 keeps parameters whole on every rank always, not only from forward to backward")
    if plan.mesh.dp_shard > 1 and type(plan.reshard) is int and plan.reshard > 1:
        lost.append(f"reshard: to groups of {plan.reshard} ranks")
    if plan.mesh.dp_shard > 1 and plan.mesh.dp_replicate > 1:
        lost.append(
            f"dp_replicate {plan.mesh.dp_replicate}: ZeRO-3 shards over all ranks; zero_hpz_partition_size keeps a second copy of "
            f"the parameters within every {plan.mesh.dp_shard} of them, as the plan's forward does"
        )
    if plan.compile != "none":
        lost.append(f"compile: {plan.compile} is a call of your script (engine.compile())")
    if plan.mesh.tp > 1:
        lost.append("split: layers are split as AutoTP finds them, not as this plan derives it")
    return lost + only_on_foretell(plan)
