"""DeepSpeed: the JSON of `deepspeed.initialize(config=...)` (0.19 and alike)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.export.read.reading import Reading, Tables, ToolConfig

OWN = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps", "bf16", "fp16"}
CLIP = 1.0
"""What DeepSpeed clips at where the file does not say."""
OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "fusedadam": "adamw", "torchadam": "adamw", "sgd": "sgd"}
SMALLER = {"lion", "adagrad", "lamb", "fusedlamb", "muon", "adafactor", "rmsprop", "fusedlion"}
"""Optimizers with no more state for each parameter than AdamW's two moments."""
_ZERO = "zero_optimization."
_COPY = "DeepSpeed keeps 16-bit weights beside fp32 ones, 2 bytes a parameter more than is predicted"

TABLES = Tables(
    taken={
        "train_batch_size": "--global-batch, and with the two below the number of ranks", "train_micro_batch_size_per_gpu": "--micro-batch",
        "gradient_accumulation_steps": "accumulation", "gradient_clipping": "--clip",
        "bf16.enabled": "--precision bf16-mixed", "fp16.enabled": "--precision fp16-mixed",
        f"{_ZERO}stage": "0, 1: dp_replicate; 2: dp_shard, reshard_after_forward false; 3: dp_shard",
        f"{_ZERO}zero_hpz_partition_size": "dp_shard, the rest dp_replicate", f"{_ZERO}mics_shard_size": "dp_shard, the rest dp_replicate",
        "tensor_parallel.autotp_size": "tp", "sequence_parallel_size": "1 alone; more is refused",
        "optimizer.type": "--optimizer", "optimizer.params.torch_adam": "not fused", "optimizer.params.momentum": "--optimizer momentum",
    },
    ignored={
        **dict.fromkeys(("_*", "steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard*", "wandb*", "csv_monitor*", "comet*",
                         "flops_profiler*", "comms_logger*", "monitor_config*"), "logging changes no step"),
        **dict.fromkeys(("optimizer.params.*", "scheduler*", "gradient_predivide_factor", "prescale_gradients", "optimizer.legacy_fusion"),
                        "numbers of the update, not its cost"),
        **dict.fromkeys(("fp16.*", "bf16.*", "bf16_master*", "communication_data_type", "zero_force_ds_cpu_optimizer"),
                        "how 16-bit numbers are scaled and sent"),
        **dict.fromkeys((f"{_ZERO}{name}" for name in (
            "overlap_comm", "contiguous_gradients", "round_robin_gradients", "ignore_unused_parameters", "load_from_fp32_weights",
            "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save", "elastic_checkpoint", "memory_efficient_linear",
            "legacy_stage1", "use_multi_rank_bucket_allreduce", "mics_hierarchical_params_gather", "override_module_apply",
            "log_trace_cache_warnings",
        )), "foretell predicts FSDP2's own order of messages, or it changes no step"),
        "checkpoint*": "checkpoints change no step", "dataloader_drop_last": "data changes no step", "seed": "changes no step",
        "zero_allow_untested_optimizer": "a check", "tensor_parallel.*": "layers are split as the model's dataflow says",
    },
    cannot={
        **dict.fromkeys((f"{_ZERO}offload_*", f"{_ZERO}cpu_offload*", f"{_ZERO}super_offload"),
                        "offloading by DeepSpeed is not predicted: the real run needs less of the device, and more time"),
        **dict.fromkeys((f"{_ZERO}reduce_bucket_size", f"{_ZERO}allgather_bucket_size", f"{_ZERO}stage3_*", f"{_ZERO}sub_group_size",
                         f"{_ZERO}allgather_partitions", f"{_ZERO}reduce_scatter", f"{_ZERO}param_persistence_threshold", f"{_ZERO}prefetch_*",
                         f"{_ZERO}max_live_parameters", f"{_ZERO}max_reuse_distance", f"{_ZERO}model_persistence_threshold"),
                        "DeepSpeed's buckets and limits are not predicted: foretell gathers and reduces block by block, as FSDP2"),
        f"{_ZERO}zero_quantized_*": "quantized messages are not predicted: the real run sends less",
        "activation_checkpointing*": "it takes effect by calls in the model: recompute is not taken from it",
        "pipeline*": "stages are in the model's code (PipelineModule)", "amp*": "apex is not predicted", "torch_autocast*": "see bf16 and fp16",
        "data_types*": "the format of accumulated gradients is not predicted", "compile*": "engine.compile() is a call of your script",
        "sparse_*": "sparse attention and gradients are not predicted", "compression_training*": "not predicted",
        "data_efficiency*": "not predicted", "curriculum_learning*": "not predicted", "elasticity*": "the number of ranks may change",
        "autotuning*": "not predicted", "aio*": "the disk is not predicted from a file", "eigenvalue*": "not predicted",
        "progressive_layer_drop*": "not predicted", "quantize_training*": "not predicted", "hybrid_engine*": "not predicted",
        "disable_allgather": "not predicted",
    },
    missing={
        "model": "MODEL is your script's", "seq": "your script's data", "recompute": "calls in the model", "compile": "a call of your script",
    },
)  # fmt: skip


def suits(data: Mapping[str, Any]) -> bool:
    return bool(OWN & data.keys())


def read(data: Mapping[str, Any]) -> ToolConfig:
    reading = Reading("deepspeed", data, TABLES)
    tensor = reading.whole("tensor_parallel.autotp_size", least=0) or 1
    if (reading.whole("sequence_parallel_size") or 1) > 1:
        raise FileFormatError("sequence_parallel_size: DeepSpeed's sequence parallelism is not predicted", "sequence_parallel_size 1")
    _batch(reading, tensor)
    stage = reading.whole(f"{_ZERO}stage", least=0) or 0
    sharding(reading, stage, f"{_ZERO}stage")
    _groups(reading, stage)
    if tensor > 1:
        reading.axis("tp", tensor, "tensor_parallel.autotp_size")
    _precision(reading)
    clip = reading.number("gradient_clipping")
    if reading.leaves.get("gradient_clipping") != "auto":
        reading.take("clip", CLIP if clip is None else clip, "gradient_clipping", "" if clip is not None else "DeepSpeed clips at 1")
    _optimizer(reading)
    return reading.done()


def sharding(reading: Reading, stage: int, path: str) -> None:
    """What a stage of ZeRO is as a mesh."""
    if stage > 3:
        raise FileFormatError(f"{path} is {stage}", "0 to 3")
    why = "" if path in reading.leaves else f"{path} is not said, {stage} is meant"
    if stage < 2:
        reading.axis("dp_replicate", -1, path, why if stage == 0 else "ZeRO-1 is not predicted: states are counted whole, the real run needs less")
        if stage == 1:
            reading.cannot(path, "ZeRO-1 is not predicted: states are counted whole on every rank, the real run needs less")
        return
    reading.axis("dp_shard", -1, path, why)
    reading.take("reshard", stage == 3, path, "parameters are whole from forward to backward" if stage == 2 else why)


def _groups(reading: Reading, stage: int) -> None:
    """Shards inside groups of ranks: MiCS, and what ZeRO++ keeps a second copy for."""
    for path in (f"{_ZERO}mics_shard_size", f"{_ZERO}zero_hpz_partition_size"):
        size = reading.whole(path, least=-1) or 1
        if size > 1 and stage == 3:
            second = "hpz" in path
            reading.axis("dp_shard", size, path, "states are counted by groups too, the real run needs less" if second else "")
            reading.axis("dp_replicate", -1, path, "the rest of the ranks are replicas of the groups")


def _batch(reading: Reading, tensor: int) -> None:
    total, micro, rounds = (reading.whole(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    if total:
        reading.take("global_batch", total, "train_batch_size")
    if micro:
        reading.take("micro_batch", micro, "train_micro_batch_size_per_gpu")
    if rounds:
        reading.take("accumulate", rounds, "gradient_accumulation_steps")
    if total and micro and tensor == 1 and (rounds or reading.leaves.get("gradient_accumulation_steps") is None):
        each = micro * (rounds or 1)
        if total % each:
            raise FileFormatError(f"train_batch_size {total} is no multiple of {each}, one rank's samples a step", "correct the file")
        if rounds:  # without it, DeepSpeed finds it from the number of ranks
            reading.found.world = total // each


def _precision(reading: Reading) -> None:
    half, fp16 = reading.flag("bf16.enabled"), reading.flag("fp16.enabled")
    path = "bf16.enabled" if half else "fp16.enabled"
    if half and fp16:
        raise FileFormatError("bf16 and fp16 are both enabled", "enable one of them")
    if half or fp16:
        reading.take("precision", "bf16-mixed" if half else "fp16-mixed", path, _COPY)
    elif "auto" in (reading.leaves.get("bf16.enabled"), reading.leaves.get("fp16.enabled")):
        reading.found.missing["precision"] = "auto in the file: the Trainer's own arguments"
    else:
        reading.take("precision", "fp32", "bf16.enabled", "neither bf16 nor fp16 is enabled")


def _optimizer(reading: Reading) -> None:
    kind, plain, momentum = (reading.word("optimizer.type") or "").lower(), reading.flag("optimizer.params.torch_adam"), 0.0
    if kind == "sgd":
        momentum = reading.number("optimizer.params.momentum") or 0.0
    if not kind:
        reading.found.missing["optimizer"] = "your script"
    elif kind in OPTIMIZERS:
        name = OPTIMIZERS[kind]
        way = "foreach" if plain or kind == "torchadam" else "fused"
        reading.take("optimizer", ("momentum" if momentum else "sgd") if name == "sgd" else f"{name}-{way}", "optimizer.type")
    elif kind in SMALLER:
        reading.take("optimizer", "adamw-fused", "optimizer.type")
        reading.cannot("optimizer.type", f"{kind} is not predicted: AdamW's states are counted, which are no smaller")
    else:
        reading.cannot("optimizer.type", "its states are not known")
        reading.found.demands["optimizer"] = f"optimizer.type {kind!r:.40} is not predicted"
