"""transformers' Trainer: its arguments as JSON (`TrainingArguments.to_json_string`), or the JSON of `fsdp_config` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.export.read import fsdp
from foretell.export.read.reading import Reading, Tables, ToolConfig

_OWN = {"per_device_train_batch_size", "output_dir", "fsdp", "fsdp_config", "gradient_checkpointing", "num_train_epochs", "optim"}
_PREFIXES = ("fsdp_config.", "fsdp_config.fsdp_")
_BARE = ("", "fsdp_")
OPTIMIZERS = {
    "adamw_torch": "adamw-foreach", "adamw_torch_fused": "adamw-fused", "adamw_hf": "adamw-foreach", "adamw_apex_fused": "adamw-fused",
    "sgd": "sgd",
}  # fmt: skip
SMALLER = ("adafactor", "lion", "rmsprop", "adagrad", "galore", "apollo", "lomo", "adalomo", "stable_adamw", "8bit", "4bit", "paged_adamw",
           "paged_lion", "schedule_free_adamw", "grokadamw", "ademamix_8bit")  # fmt: skip
"""Parts of names of optimizers with no more state for each parameter than AdamW's two moments."""

TABLES = Tables(
    taken={
        "per_device_train_batch_size": "--micro-batch", "gradient_accumulation_steps": "accumulation", "max_grad_norm": "--clip",
        "bf16": "--precision bf16-mixed", "fp16": "--precision fp16-mixed", "optim": "--optimizer", "gradient_checkpointing": "--recompute full",
        "torch_compile": "--compile model", "fsdp": "dp_shard, dp_replicate, reshard_after_forward", "deepspeed": "refused: give that file itself",
        "fsdp_config": "refused if it is a path: give that file itself", **fsdp.tables(_PREFIXES, fsdp.TAKEN), **fsdp.tables(_BARE, fsdp.TAKEN),
    },
    ignored={
        **fsdp.tables(_PREFIXES, fsdp.IGNORED), **fsdp.tables(_BARE, fsdp.IGNORED),
        **dict.fromkeys((f"{prefix}xla*" for prefix in (*_PREFIXES, *_BARE)), "for TPUs alone"),
        **dict.fromkeys(("output_dir", "overwrite_output_dir", "logging_*", "log_*", "report_to", "run_name", "disable_tqdm", "push_to_hub*", "hub_*",
                         "project", "trackio_*", "include_num_input_tokens_seen", "skip_memory_metrics", "debug"), "logging changes no step"),
        **dict.fromkeys(("save_*", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "resume_from_checkpoint",
                         "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "ignore_data_skip"), "checkpoints change no step"),
        **dict.fromkeys(("eval_*", "do_*", "per_device_eval_batch_size", "per_gpu_eval_batch_size", "prediction_loss_only", "include_for_metrics",
                         "batch_eval_metrics", "label_names", "include_inputs_for_metrics", "bf16_full_eval", "fp16_full_eval",
                         "predict_with_generate", "generation_*"), "evaluation is not predicted"),
        **dict.fromkeys(("learning_rate", "weight_decay", "adam_*", "lr_scheduler_*", "warmup_*", "num_train_epochs", "max_steps", "seed",
                         "data_seed", "label_smoothing_factor", "average_tokens_across_devices", "full_determinism"),
                        "numbers of the update, not its cost"),
        **dict.fromkeys(("dataloader_*", "remove_unused_columns", "group_by_length", "length_column_name", "train_sampling_strategy",
                         "accelerator_config*", "ray_*", "local_rank", "ddp_*", "use_cpu", "no_cuda", "use_ipex", "use_mps_device", "tpu_*",
                         "past_index", "jit_mode_eval", "mp_parameters", "n_gpu", "half_precision_backend", "fp16_opt_level", "fp16_backend",
                         "torch_empty_cache_steps", "gradient_checkpointing_kwargs*", "_*"), "where it runs, not what a step costs"),
    },
    cannot={
        **fsdp.tables(_PREFIXES, fsdp.CANNOT), **fsdp.tables(_BARE, fsdp.CANNOT),
        "auto_find_batch_size": "the batch is halved until it fits: the first one is predicted",
        "tf32": "TF32 products are faster than those predicted",
        "torch_compile_*": "foretell predicts inductor's default mode", "optim_args": "not read", "optim_target_modules": "not read",
        "neftune_noise_alpha": "not predicted", "use_liger_kernel": "Liger's kernels are not predicted: the real run needs less",
        "liger_kernel_config*": "Liger's kernels are not predicted: the real run needs less", "parallelism_config*": "give accelerate's file instead",
        "per_gpu_train_batch_size": "give per_device_train_batch_size", "use_cache": "not predicted",
    },
    missing={"model": "MODEL is your script's", "seq": "your script's data", "number of ranks": "`torchrun`: --on says it here"},
)  # fmt: skip


def suits(data: Mapping[str, Any]) -> bool:
    names = {str(key).removeprefix("fsdp_") for key in data}
    bare = ({*fsdp.TAKEN, *fsdp.IGNORED, *fsdp.CANNOT} - {"version"}) & names
    return len(_OWN & data.keys()) > 1 or "per_device_train_batch_size" in data or "fsdp_config" in data or bool(bare)


def read(data: Mapping[str, Any]) -> ToolConfig:
    reading = Reading("trainer", data, TABLES)
    if not (_OWN | {"bf16", "fp16"}) & data.keys():
        return _bare(reading)
    if reading.get("deepspeed") not in (None, ""):
        raise FileFormatError("the argument deepspeed says how the model is sharded, in another file", "give that file to --from")
    _batch(reading)
    _precision(reading)
    _optimizer(reading)
    _sharding(reading)
    if "recompute" not in reading.found.options:
        again = reading.flag("gradient_checkpointing")
        reading.take("recompute", "full" if again else "none", "gradient_checkpointing", "" if again is not None else "the Trainer's default")
    elif reading.flag("gradient_checkpointing"):
        reading.take("recompute", "full", "gradient_checkpointing")
    compiled = reading.flag("torch_compile")
    reading.take("compile", "model" if compiled else "none", "torch_compile", "" if compiled is not None else "the Trainer's default")
    return reading.done()


def _bare(reading: Reading) -> ToolConfig:
    """`fsdp_config` alone."""
    fsdp.read(reading, _BARE, 1)
    for option in ("micro_batch", "accumulate", "precision", "optimizer", "clip"):
        reading.found.missing[option] = "the Trainer's other arguments"
    return reading.done()


def _batch(reading: Reading) -> None:
    for option, path, usual in (("micro_batch", "per_device_train_batch_size", 8), ("accumulate", "gradient_accumulation_steps", 1)):
        value = reading.whole(path)
        reading.take(option, value or usual, path, "" if value else "the Trainer's default")
    clip = reading.number("max_grad_norm")
    reading.take("clip", 1.0 if clip is None else clip, "max_grad_norm", "" if clip is not None else "the Trainer's default")


def _precision(reading: Reading) -> None:
    half, fp16 = reading.flag("bf16"), reading.flag("fp16")
    if half and fp16:
        raise FileFormatError("bf16 and fp16 are both true", "set one of them")
    ours = "bf16-mixed" if half else "fp16-mixed" if fp16 else "fp32"
    reading.take("precision", ours, "fp16" if fp16 else "bf16", "" if half or fp16 else "neither bf16 nor fp16")


def _optimizer(reading: Reading) -> None:
    name = reading.word("optim")
    kind = (name or "adamw_torch_fused").lower().rpartition(".")[2]
    if kind in OPTIMIZERS:
        reading.take("optimizer", OPTIMIZERS[kind], "optim", "" if name else "the Trainer's default")
    elif any(part in kind for part in SMALLER):
        reading.take("optimizer", "adamw-fused", "optim")
        reading.cannot("optim", f"{kind:.40} is not predicted: AdamW's states are counted, which are no smaller")
    else:
        reading.cannot("optim", "its states are not known")
        reading.found.demands["optimizer"] = f"optim {kind!r:.40} is not predicted"


def _sharding(reading: Reading) -> None:
    value = reading.get("fsdp")
    if reading.get("fsdp_config") if not any(key.startswith("fsdp_config.") for key in reading.leaves) else None:
        raise FileFormatError("fsdp_config is a path, and says how the model is sharded", "write its settings here")
    listed = value if isinstance(value, list) else value.replace(",", " ").split() if isinstance(value, str) else []
    words = [str(word).lower() for word in listed]
    if value in (None, False, "", []) or words == ["false"]:
        reading.axis("dp_replicate", -1, "fsdp", "without FSDP every rank holds the whole model")
        for path in [key for key in reading.leaves if key.startswith("fsdp_config.")]:
            reading.ignore(path, "nothing without fsdp")
        return
    if not isinstance(value, bool | str | list):
        raise FileFormatError("fsdp is neither true nor a list of words", "true, or full_shard, shard_grad_op, offload, auto_wrap")
    fsdp.read(reading, _PREFIXES, 1)
    for word in words:
        if word in ("hybrid_shard", "hybrid_shard_zero2"):
            raise FileFormatError(f"fsdp {word} shards inside a node, and the number of nodes is not here", "type --dp-shard in `foretell plan`")
        if word == "shard_grad_op":
            reading.take("reshard", False, "fsdp")
        elif word == "no_shard":
            reading.found.mesh.clear()
            reading.axis("dp_replicate", -1, "fsdp")
        elif word == "offload":
            reading.cannot("fsdp", fsdp.CANNOT["cpu_offload"])
        elif word not in ("full_shard", "auto_wrap", "true"):
            raise FileFormatError(f"fsdp {word!r:.60} is not known", "full_shard, shard_grad_op, no_shard, offload, auto_wrap")
