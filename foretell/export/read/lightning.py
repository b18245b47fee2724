"""Lightning: the YAML of LightningCLI; its `trainer` says devices, strategy, precision and accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.export.read.deepspeed import sharding
from foretell.export.read.fsdp import STRATEGIES
from foretell.export.read.reading import Reading, Tables, ToolConfig

_T = "trainer."
_S, _A = "trainer.strategy.class_path", "trainer.strategy.init_args."
PRECISIONS = {
    "32": "fp32", "32-true": "fp32", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed", "16": "fp16-mixed", "16-mixed": "fp16-mixed",
    "bf16-true": "bf16",
}  # fmt: skip

TABLES = Tables(
    taken={
        "trainer.strategy": "dp_shard, dp_replicate (by name: auto, ddp, fsdp, deepspeed_stage_N)", _S: "the same by class",
        f"{_A}sharding_strategy": "dp_shard, dp_replicate, reshard_after_forward", f"{_A}device_mesh": "dp_replicate, dp_shard",
        f"{_A}data_parallel_size": "dp_shard of ModelParallelStrategy", f"{_A}tensor_parallel_size": "tp of ModelParallelStrategy",
        f"{_A}stage": "of DeepSpeedStrategy", f"{_A}activation_checkpointing_policy": "--recompute full",
        f"{_A}activation_checkpointing": "--recompute full", "trainer.devices": "number of ranks, with num_nodes",
        "trainer.num_nodes": "number of ranks, with devices", "trainer.precision": "--precision", "trainer.accumulate_grad_batches": "accumulation",
        "trainer.gradient_clip_val": "--clip", "trainer.gradient_clip_algorithm": "norm alone",
    },
    ignored={
        **dict.fromkeys((f"{_A}{name}" for name in ("state_dict_type", "save_distributed_checkpoint", "timeout", "process_group_backend",
                                                    "auto_wrap_policy*", "find_unused_parameters", "static_graph", "gradient_as_bucket_view",
                                                    "use_orig_params", "limit_all_gathers", "*prefetch*", "checkpoint_io*")),
                        "foretell shards block by block, or it changes no step"),
        **dict.fromkeys((f"{_T}{name}" for name in (
            "accelerator", "logger*", "callbacks*", "fast_dev_run", "max_*", "min_*", "limit_*", "overfit_batches", "val_check_interval",
            "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "enable_*", "deterministic", "benchmark", "inference_mode",
            "use_distributed_sampler", "profiler*", "detect_anomaly", "barebones", "reload_dataloaders_every_n_epochs", "default_root_dir",
            "model_registry", "sync_batchnorm",
        )), "logging, evaluation and length change no predicted step"),
        **dict.fromkeys(("seed_everything", "ckpt_path", "verbose", "return_predictions", "lr_scheduler*"), "changes no step"),
    },
    cannot={
        f"{_A}cpu_offload*": "offloading by FSDP is not predicted: the real run needs less of the device, and more time",
        f"{_A}offload_*": "offloading by DeepSpeed is not predicted: the real run needs less of the device, and more time",
        f"{_A}mixed_precision*": "a policy of your own is not read: trainer.precision is", f"{_A}*": "not read",
        "trainer.plugins*": "plugins are not read", "model*": "your own class: name MODEL", "data*": "your own class: type --micro-batch and --seq",
        "optimizer*": "a class for your model: type --optimizer",
    },
    missing={
        "model": "MODEL is your own class", "micro_batch": "your data module", "seq": "your data module", "optimizer": "configure_optimizers",
        "recompute": "configure_model, but for FSDP's own", "compile": "a call of yours",
    },
)  # fmt: skip


def suits(data: Mapping[str, Any]) -> bool:
    trainer = data.get("trainer")
    return isinstance(trainer, Mapping) and bool({"strategy", "devices", "precision", "accelerator", "max_epochs", "max_steps"} & trainer.keys())


def read(data: Mapping[str, Any]) -> ToolConfig:
    reading = Reading("lightning", data, TABLES)
    nodes, each = reading.whole("trainer.num_nodes") or 1, _devices(reading)
    reading.found.world = nodes * each if each else None
    _strategy(reading, nodes, each)
    word = (reading.word("trainer.precision") or "32-true").lower()
    if word in PRECISIONS:
        reading.take("precision", PRECISIONS[word], "trainer.precision", "" if "trainer.precision" in reading.leaves else "Lightning's default")
    else:
        reading.cannot("trainer.precision", "not predicted")
        reading.found.demands["precision"] = f"trainer.precision {word!r:.40} is not predicted"
    rounds = reading.whole("trainer.accumulate_grad_batches") or 1
    reading.take("accumulate", rounds, "trainer.accumulate_grad_batches", "" if rounds > 1 else "Lightning's default")
    reading.take("clip", reading.number("trainer.gradient_clip_val") or 0.0, "trainer.gradient_clip_val", "Lightning clips nothing by itself")
    if (reading.word("trainer.gradient_clip_algorithm") or "norm") != "norm":
        reading.cannot("trainer.gradient_clip_algorithm", "clipping by the norm is predicted")
    return reading.done()


def _devices(reading: Reading) -> int | None:
    """On each node; None where all that are there are meant."""
    value = reading.get("trainer.devices")
    if isinstance(value, list):
        return len(value) or None
    if isinstance(value, str) and "," in value:
        return len([word for word in value.split(",") if word.strip()])
    count = reading.whole("trainer.devices", -1)
    if count == 0:
        raise FileFormatError("trainer.devices is 0", "a number above zero, -1 or auto")
    return None if count in (None, -1) else count


def _strategy(reading: Reading, nodes: int, each: int | None) -> None:
    by_class = _S in reading.leaves
    path = _S if by_class else "trainer.strategy"
    if reading.leaves.get(path) == "auto":
        reading.axis("dp_replicate", -1, path, "Lightning's choice")
        return
    word = (reading.word(path) or "auto").rpartition(".")[2].lower().removesuffix("strategy")
    if word == "modelparallel":
        data, tensor = reading.whole(f"{_A}data_parallel_size"), reading.whole(f"{_A}tensor_parallel_size")
        reading.axis("dp_shard", data or nodes, f"{_A}data_parallel_size", "auto is the number of nodes")
        if tensor is None and each is None:
            raise FileFormatError("tensor_parallel_size is auto, and the number of devices is not said", "set tensor_parallel_size")
        reading.axis("tp", tensor or each or 1, f"{_A}tensor_parallel_size", "auto is the devices of a node")
        reading.take("reshard", True, "", "configure_model is taken to apply fully_shard and tensor parallelism")
    elif word.startswith("fsdp"):
        _fsdp(reading, path, nodes)
        if word == "fsdp_cpu_offload":
            reading.cannot(path, TABLES.cannot[f"{_A}cpu_offload*"])
    elif word.startswith("deepspeed"):
        digits = "".join(char for char in word if char.isdigit())
        stage = int(digits) if digits and not by_class else reading.whole(f"{_A}stage", 0)
        sharding(reading, 2 if stage is None else stage, f"{_A}stage" if f"{_A}stage" in reading.leaves else path)
        if "offload" in word:
            reading.cannot(path, TABLES.cannot[f"{_A}offload_*"])
    elif word.startswith("ddp") or word in ("auto", "singledevice"):
        reading.axis("dp_replicate", -1, path, "" if path in reading.leaves else "Lightning's default")
    else:
        raise FileFormatError(f"{path} {word!r:.60} is not predicted", "auto, ddp, fsdp, deepspeed or ModelParallelStrategy")


def _fsdp(reading: Reading, path: str, nodes: int) -> None:
    name = f"{_A}sharding_strategy"
    strategy = (reading.word(name) or "FULL_SHARD").upper()
    if strategy not in STRATEGIES:
        raise FileFormatError(f"{name} is {strategy!r:.60}", f"one of {', '.join(STRATEGIES)}")
    by = name if name in reading.leaves else path
    if strategy == "NO_SHARD":
        reading.axis("dp_replicate", -1, by)
    else:
        reading.axis("dp_shard", -1, by)
        mesh = reading.names(f"{_A}device_mesh")
        if mesh:
            if len(mesh) != 2 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in mesh):
                raise FileFormatError(f"{_A}device_mesh has to be two numbers, replicas and shards", "such as [2, 8]")
            reading.axis("dp_shard", mesh[1], f"{_A}device_mesh")
            reading.axis("dp_replicate", mesh[0], f"{_A}device_mesh", f"dp_shard {mesh[1]}")
            reading.found.world = reading.found.world or math.prod(mesh)
        elif strategy.startswith("HYBRID") and nodes > 1:
            reading.axis("dp_replicate", nodes, by, "sharded inside a node, replicated over nodes")
        reading.take("reshard", strategy in ("FULL_SHARD", "HYBRID_SHARD"), by)
    for key in ("activation_checkpointing_policy", "activation_checkpointing"):
        if reading.get(f"{_A}{key}") not in (None, False, [], ""):
            reading.take("recompute", "full", f"{_A}{key}", "the classes named there are taken to be the blocks")
