"""accelerate: the file of `accelerate config` (YAML or JSON; 1.15 and alike)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.export.read import fsdp
from foretell.export.read.deepspeed import CLIP, sharding
from foretell.export.read.reading import Reading, Tables, ToolConfig

_OWN = {"distributed_type", "compute_environment", "num_processes", "mixed_precision"}
_FSDP, _AXES, _DEEP = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_", "deepspeed_config."
_PLACE = "where it runs, not how"
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
PRECISIONS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "bf16-mixed"}

TABLES = Tables(
    taken={
        "distributed_type": "the mesh: NO, MULTI_GPU and MULTI_CPU (dp_replicate), FSDP, DEEPSPEED",
        "num_processes": "number of ranks", "num_machines": "nodes of a hybrid strategy", "mixed_precision": "--precision",
        **fsdp.tables((_FSDP,), fsdp.TAKEN),
        **{f"{_AXES}{axis}_size": axis if axis != "sp" else "1 alone; more is refused" for axis in _SIZES},
        f"{_DEEP}zero_stage": "dp_shard, dp_replicate, reshard_after_forward", f"{_DEEP}gradient_accumulation_steps": "accumulation",
        f"{_DEEP}gradient_clipping": "--clip", f"{_DEEP}deepspeed_config_file": "refused: give that file itself",
        "dynamo_config.dynamo_backend": "--compile", "dynamo_config.dynamo_use_regional_compilation": "--compile blocks",
    },
    ignored={
        **dict.fromkeys(
            ("compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend",
             "same_network", "use_cpu", "gpu_ids", "enable_cpu_affinity", "downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
             "commands", "command_file", "tpu_name", "tpu_zone", "tpu_vm", "mpirun_config*", "log_with", "deepspeed_config.deepspeed_hostfile",
             "deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_*clusion_filter"), _PLACE,
        ),
        **fsdp.tables((_FSDP,), fsdp.IGNORED),
        f"{_DEEP}zero3_*": "loading and checkpoints change no step", f"{_DEEP}offload_*_nvme_path": "a path; whether it is used is said elsewhere",
        f"{_DEEP}deepspeed_moe_layer_cls_names": "which classes are whole units of ZeRO-3",
        f"{_AXES}cp_comm_strategy": "how positions are exchanged: foretell predicts one way",
        f"{_AXES}cp_backend": "torch is the only one", f"{_AXES}sp_*": "nothing without sp_size above 1",
        "dynamo_config.dynamo_mode": "foretell predicts the default mode", "dynamo_config.dynamo_use_fullgraph": "the same kernels either way",
        "dynamo_config.dynamo_use_dynamic": "foretell predicts fixed shapes",
    },
    cannot={
        **fsdp.tables((_FSDP,), fsdp.CANNOT),
        f"{_DEEP}offload_*_device": "offloading by DeepSpeed is not predicted: the real run needs less of the device, and more time",
        "fp8_config*": "float8 is not predicted: bf16-mixed is", "megatron_lm_config*": "Megatron-LM's layouts are not read",
    },
    missing={
        "model": "MODEL is your script's", "micro_batch": "your script's data loader", "accumulate": "your script, or `accelerate launch`",
        "seq": "your script's data", "optimizer": "your script", "clip": "your script",
        "recompute": "your script, but for FSDP's own",
    },
)  # fmt: skip


def suits(data: Mapping[str, Any]) -> bool:
    return "distributed_type" in data or len(_OWN & data.keys()) > 1


def read(data: Mapping[str, Any]) -> ToolConfig:
    reading = Reading("accelerate", data, TABLES)
    kind = (reading.word("distributed_type") or "NO").upper()
    world, nodes = reading.whole("num_processes") or 1, reading.whole("num_machines") or 1
    reading.found.world = world
    if world % nodes:
        raise FileFormatError(f"num_processes {world} is no multiple of num_machines {nodes}", "correct the file")
    if kind == "FSDP":
        fsdp.read(reading, (_FSDP,), nodes)
    elif kind == "DEEPSPEED":
        _deepspeed(reading)
    elif kind in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU"):
        reading.axis("dp_replicate", -1, "distributed_type")
    else:
        raise FileFormatError(f"distributed_type {kind} is not predicted", "NO, MULTI_GPU, FSDP or DEEPSPEED")
    _axes(reading)
    _precision(reading)
    _compile(reading)
    return reading.done()


def _axes(reading: Reading) -> None:
    """Sizes of `parallelism_config`, where one of them is above 1."""
    sizes = {axis: reading.whole(f"{_AXES}{axis}_size") or 1 for axis in _SIZES}
    if sizes.pop("sp") > 1:
        raise FileFormatError("parallelism_config_sp_size: DeepSpeed's sequence parallelism is not predicted", "cp, or sp 1")
    if all(size == 1 for size in sizes.values()):
        return
    reading.found.mesh.clear()
    for axis, size in sizes.items():
        reading.axis(axis, size, f"{_AXES}{axis}_size")


def _precision(reading: Reading) -> None:
    word = (reading.word("mixed_precision") or "no").lower()
    if word not in PRECISIONS:
        raise FileFormatError(f"mixed_precision is {word!r:.60}", f"one of {', '.join(PRECISIONS)}")
    reading.take("precision", PRECISIONS[word], "mixed_precision", "" if word != "fp8" else "float8 is not predicted")
    if word == "fp8":
        reading.cannot("mixed_precision", "float8 is not predicted: bf16-mixed is")


def _compile(reading: Reading) -> None:
    backend = (reading.word("dynamo_config.dynamo_backend") or "no").upper()
    blocks = reading.flag("dynamo_config.dynamo_use_regional_compilation")
    way = "none" if backend == "NO" else "blocks" if blocks else "model"
    reading.take("compile", way, "dynamo_config.dynamo_backend", "" if backend != "NO" else "without dynamo_config nothing is compiled")


def _deepspeed(reading: Reading) -> None:
    """What accelerate keeps of DeepSpeed in its own file."""
    other = reading.word(f"{_DEEP}deepspeed_config_file")
    if other:
        raise FileFormatError(f"deepspeed_config_file {other!r:.60} says how the model is sharded, not this file", "give that file to --from")
    stage = reading.whole(f"{_DEEP}zero_stage", least=0)
    sharding(reading, 2 if stage is None else stage, f"{_DEEP}zero_stage")
    if (rounds := reading.whole(f"{_DEEP}gradient_accumulation_steps")) is not None:
        reading.take("accumulate", rounds, f"{_DEEP}gradient_accumulation_steps")
    clip = reading.number(f"{_DEEP}gradient_clipping")
    reading.take("clip", CLIP if clip is None else clip, f"{_DEEP}gradient_clipping", "" if clip is not None else "DeepSpeed clips at 1")
