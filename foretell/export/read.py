"""Read another tool's configuration as options of `foretell fit`; whatever is not taken is named."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, MissingPackage, UserError

LARGEST = 10**9
"""Of any count."""
DEEPSPEED_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_accumulation_steps", "bf16", "fp16"}
ACCELERATE_KEYS = {"distributed_type", "compute_environment", "num_processes", "mixed_precision"}
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "fusedadam": "adamw", "torchadam": "adamw", "sgd": "sgd"}
_PLAIN = {
    "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "rdzv_backend", "same_network", "use_cpu", "gpu_ids", "enable_cpu_affinity", "downcast_bf16", "num_machines",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "commands", "command_file", "tpu_name", "tpu_zone", "tpu_vm", "mpirun_config",
}  # fmt: skip
"""Of accelerate: where things run, not how."""


@dataclass
class Theirs:
    """What a file says, as fit takes it."""

    tool: str
    options: dict[str, Any] = field(default_factory=dict)
    """Names of fit's own options."""
    world: int | None = None
    """Processes, where it says."""
    shards: int | None = None
    """Over how many of them parameters, gradients and optimizer state are split; 1: every rank has all."""
    taken: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def take(self, option: str, value: Any, said: str) -> None:
        self.options[option] = value
        self.taken.append(f"{said} → --{option.replace('_', '-')} {value}")


def read(path: Path) -> Theirs:
    """An accelerate config (YAML or JSON) or a DeepSpeed config (JSON)."""
    data = _loaded(path)
    if not isinstance(data, dict):
        raise FileFormatError(f"{path} is no configuration: it holds {type(data).__name__}", "give accelerate's YAML or DeepSpeed's JSON")
    try:
        if "distributed_type" in data or len(ACCELERATE_KEYS & data.keys()) > 1:
            return _accelerate(data)
        if DEEPSPEED_KEYS & data.keys():
            return _deepspeed(data)
    except UserError as error:
        raise FileFormatError(f"{path}: {error.problem}", error.remedy) from None
    raise FileFormatError(
        f"{path} is neither accelerate's nor DeepSpeed's: it has {', '.join(map(str, list(data)[:4])) or 'nothing'}",
        "give the file of `accelerate config`, or the JSON of DeepSpeed",
    )


def _loaded(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{path} cannot be read: {why}", "give accelerate's YAML or DeepSpeed's JSON") from error
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{path} is not JSON: {_one_line(error)}", "correct it there") from None
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise MissingPackage("PyYAML", f"reading {path}", "yaml") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not YAML: {_one_line(error)}", "correct it there") from None


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', 'error')}"
    return " ".join(str(error).split())


# --- accelerate ------------------------------------------------------------------------------------------------------


def _accelerate(data: Mapping[str, Any]) -> Theirs:
    found = Theirs(tool="accelerate")
    kind = str(data.get("distributed_type", "NO")).upper()
    found.world = _whole(data.get("num_processes"), "num_processes") or 1
    found.shards = {"FSDP": found.world, "DEEPSPEED": found.world}.get(kind, 1)
    if kind in ("MULTI_GPU", "MULTI_CPU"):
        found.taken.append(f"distributed_type {kind}: every rank holds the whole model")
    elif kind not in ("NO", "FSDP", "DEEPSPEED"):
        found.ignored.append(f"distributed_type {kind}: fit knows data parallelism and FSDP")
    fsdp = _mapping(data, "fsdp_config")
    axes = _mapping(data, "parallelism_config")
    if kind == "FSDP":
        _fsdp(fsdp, axes, found)
    _mixed(str(data.get("mixed_precision") or "no"), found)
    deep = _mapping(data, "deepspeed_config")
    if deep:
        _deep(deep, found)
    dynamo = _mapping(data, "dynamo_config")
    backend = str(dynamo.get("dynamo_backend", "NO")).upper()
    if backend != "NO":
        found.take("compile_how", "blocks" if dynamo.get("dynamo_use_regional_compilation") else "model", f"dynamo_backend {backend}")
    used = {"distributed_type", "num_processes", "mixed_precision", "fsdp_config", "parallelism_config", "deepspeed_config",
            "dynamo_config", *_PLAIN}  # fmt: skip
    found.ignored += [str(key) for key, value in data.items() if key not in used and value not in (None, {}, [], False)]
    return found


def _fsdp(fsdp: Mapping[str, Any], axes: Mapping[str, Any], found: Theirs) -> None:
    sizes = {name: _whole(axes.get(f"parallelism_config_{name}_size"), name) or 1 for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    if axes:
        found.shards = sizes["dp_shard"]
        for name in ("tp", "cp", "sp"):
            if sizes[name] > 1:
                found.ignored.append(f"parallelism_config_{name}_size {sizes[name]}: fit shards over data ranks alone; `foretell plan` knows tp")
    strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    if "NO_SHARD" in strategy or strategy == "3":
        found.shards = 1
    elif "HYBRID" in strategy and not axes:
        found.ignored.append(f"fsdp_sharding_strategy {strategy}: taken as sharded over all ranks")
    elif strategy in ("SHARD_GRAD_OP", "2"):
        found.ignored.append(f"fsdp_sharding_strategy {strategy}: fit gives parameters back after forward")
    found.taken.append(f"FSDP over {found.shards} ranks")
    if _true(fsdp.get("fsdp_activation_checkpointing")):
        found.take("recompute", "full", "fsdp_activation_checkpointing")
    if _true(fsdp.get("fsdp_offload_params")):
        found.ignored.append("fsdp_offload_params: fit moves nothing to the host")
    known = {"fsdp_version", "fsdp_sharding_strategy", "fsdp_activation_checkpointing", "fsdp_offload_params", "fsdp_state_dict_type",
             "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_auto_wrap_policy", "fsdp_use_orig_params"}  # fmt: skip
    if fsdp.get("fsdp_reshard_after_forward") not in (None, True, "true", "FULL_SHARD"):
        found.ignored.append(f"fsdp_reshard_after_forward {fsdp['fsdp_reshard_after_forward']}: fit gives parameters back")
    known |= {"fsdp_reshard_after_forward"}
    found.ignored += [str(key) for key, value in fsdp.items() if key not in known and value not in (None, False)]


def _mixed(word: str, found: Theirs) -> None:
    if word == "no":
        found.take("precision", "fp32", "mixed_precision no")
    elif word == "bf16":
        found.take("precision", "bf16-mixed", "mixed_precision bf16")
    elif word == "fp16":
        found.take("precision", "fp16-mixed", "mixed_precision fp16")
    else:
        found.ignored.append(f"mixed_precision {word}: fit has no such precision here; its default is taken")


def _deep(deep: Mapping[str, Any], found: Theirs) -> None:
    """What accelerate keeps of DeepSpeed in its own file."""
    if deep.get("deepspeed_config_file"):
        found.ignored.append(f"deepspeed_config_file {deep['deepspeed_config_file']}: give that file itself to --from")
    if deep.get("gradient_accumulation_steps") not in (None, "auto"):
        found.take("accumulate", _whole(deep["gradient_accumulation_steps"], "gradient_accumulation_steps"), "gradient_accumulation_steps")
    if deep.get("gradient_clipping") not in (None, "auto"):
        found.take("clip", _number(deep["gradient_clipping"], "gradient_clipping"), "gradient_clipping")
    if deep.get("zero_stage") is not None:
        _stage(_whole(deep["zero_stage"], "zero_stage", least=0) or 0, found)
    for key in ("offload_optimizer_device", "offload_param_device"):
        if deep.get(key) not in (None, "none"):
            found.ignored.append(f"{key} {deep[key]}: fit moves nothing to the host")


def _stage(stage: int, found: Theirs) -> None:
    if stage == 3:
        found.taken.append("ZeRO-3: parameters, gradients and optimizer state sharded over all ranks")
        return
    found.shards = 1
    if stage:
        found.ignored.append(f"ZeRO-{stage}: fit shards everything or nothing; here nothing, so the real run needs less")
    else:
        found.taken.append("ZeRO-0: every rank holds the whole model")


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def _deepspeed(data: Mapping[str, Any]) -> Theirs:
    found = Theirs(tool="deepspeed")
    numbers = {key: _auto(data, key, found) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    total, micro, accumulate = numbers.values()
    if micro:
        found.take("micro_batch", micro, "train_micro_batch_size_per_gpu")
    if accumulate:
        found.take("accumulate", accumulate, "gradient_accumulation_steps")
    if total and micro:
        each = micro * (accumulate or 1)
        if total % each:
            raise UserError(f"train_batch_size {total} is no multiple of {each}, one rank's samples a step", "correct the file")
        found.world = total // each
    zero = _mapping(data, "zero_optimization")
    found.shards = found.world
    _stage(_whole(zero.get("stage"), "zero_optimization.stage", least=0) or 0, found)
    if (_whole(zero.get("mics_shard_size"), "mics_shard_size", least=-1) or 0) > 0:
        found.shards = _whole(zero["mics_shard_size"], "mics_shard_size")
    if (_whole(zero.get("zero_hpz_partition_size"), "zero_hpz_partition_size", least=0) or 1) > 1:
        found.ignored.append("zero_hpz_partition_size: fit keeps one copy of the parameters")
    for key in ("offload_optimizer", "offload_param"):
        if _mapping(zero, key).get("device") not in (None, "none"):
            found.ignored.append(f"{key} to {zero[key]['device']}: fit moves nothing to the host")
    _halves(data, found)
    _clipped(data, found)
    kind = str(_mapping(data, "optimizer").get("type", "")).lower()
    if kind in _OPTIMIZERS:
        name = _OPTIMIZERS[kind]
        found.take("optimizer", f"{name}-fused" if name != "sgd" else name, f"optimizer {kind}")
    elif kind:
        found.ignored.append(f"optimizer {kind}")
    used = {*numbers, "zero_optimization", "bf16", "fp16", "gradient_clipping", "optimizer", "steps_per_print", "wall_clock_breakdown"}
    found.ignored += [str(key) for key in data if key not in used and not str(key).startswith("_")]
    return found


def _clipped(data: Mapping[str, Any], found: Theirs) -> None:
    value = data.get("gradient_clipping", 1.0)
    if value == "auto":
        found.ignored.append("gradient_clipping: auto")
    elif _number(value, "gradient_clipping"):
        said = "gradient_clipping" if "gradient_clipping" in data else "gradient_clipping is not said, and DeepSpeed clips at 1"
        found.take("clip", _number(value, "gradient_clipping"), said)


def _halves(data: Mapping[str, Any], found: Theirs) -> None:
    if _true(_mapping(data, "bf16").get("enabled")):
        found.take("precision", "bf16-mixed", "bf16")
        found.ignored.append("bf16: DeepSpeed keeps bf16 weights beside fp32 ones, 2 bytes a parameter more than fit counts")
    elif _true(_mapping(data, "fp16").get("enabled")):
        found.take("precision", "fp16-mixed", "fp16")
        found.ignored.append("fp16: DeepSpeed keeps fp16 weights beside fp32 ones, 2 bytes a parameter more than fit counts")
    else:
        found.take("precision", "fp32", "neither bf16 nor fp16")


# --- values ----------------------------------------------------------------------------------------------------------


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise FileFormatError(f"{key} is {value!r}, and should hold settings", "correct the file")
    return value


def _auto(data: Mapping[str, Any], key: str, found: Theirs) -> int | None:
    if data.get(key) == "auto":
        found.ignored.append(f"{key}: auto")
        return None
    return _whole(data.get(key), key)


def _whole(value: Any, key: str, least: int = 1) -> int | None:
    if value is None:
        return None
    try:
        number = int(value) if float(value) < LARGEST else least - 1
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if isinstance(value, bool) or number < least or number != float(value):
        raise FileFormatError(f"{key} is {value!r}, not a whole number of at least {least}", "correct the file")
    return number


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise FileFormatError(f"{key} is {value!r}, not a number", "correct the file") from None


def _true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"
