"""torchtitan: a job file (TOML, or the same as JSON) of 0.1 and 0.2, with older spellings and the token budgets of 0.3.

Where the file is silent, torchtitan's own defaults hold: they are said as such. The number of ranks is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.export.read.reading import Reading, Tables, ToolConfig
from foretell.export.torchtitan import FLAVORS, SCHEDULES

_OWN = {"job", "model", "training", "parallelism", "activation_checkpoint", "optimizer", "experimental"}
_P, _T = "parallelism.", "training."
_SCHEDULES = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
_WAYS = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
AXES = {
    "dp_replicate": ("data_parallel_replicate_degree",), "dp_shard": ("data_parallel_shard_degree", "data_parallel_degree"),
    "tp": ("tensor_parallel_degree",), "cp": ("context_parallel_degree",), "pp": ("pipeline_parallel_degree",), "ep": ("expert_parallel_degree",),
}  # fmt: skip


def _spellings(*names: str) -> tuple[str, ...]:
    """Where a degree may stand: today under parallelism, once under training or experimental."""
    return tuple(f"{table}{name}" for name in names for table in (_P, _T, "experimental."))


_PIPELINE = {
    "pipeline_parallel_schedule": "--schedule", "pipeline_parallel_schedule_csv": "empty alone; a schedule of your own is refused",
    "pipeline_parallel_microbatch_size": "--micro-batch of a pipeline", "pipeline_parallel_microbatches": "how many a pipeline has",
    "num_pp_microbatches": "how many a pipeline has", "pipeline_parallel_split_points": "cuts of the pipeline",
    "pipeline_parallel_layers_per_stage": "stages of the pipeline", "pipeline_parallel_first_stage_less_layers": "cuts of the pipeline",
    "pipeline_parallel_last_stage_less_layers": "cuts of the pipeline",
}  # fmt: skip
_LOGS = "logging changes no step"

TABLES = Tables(
    taken={
        "model.name": "MODEL, with model.flavor", "model.flavor": "MODEL: llama3 8B, 70B and 405B", "model_spec.name": "MODEL",
        "model_spec.flavor": "MODEL",
        f"{_T}local_batch_size": "--micro-batch; of a pipeline, all its micro-batches", f"{_T}batch_size": "as local_batch_size",
        f"{_T}global_batch_size": "--global-batch", f"{_T}seq_len": "--seq", f"{_T}max_context_length": "--seq",
        f"{_T}num_tokens_per_microbatch_per_dp_rank": "--micro-batch", f"{_T}num_tokens_per_train_step": "--global-batch",
        f"{_T}max_norm": "--clip", f"{_T}dtype": "--precision", f"{_T}mixed_precision_param": "--precision", f"{_T}compile": "--compile blocks",
        f"{_T}mixed_precision_reduce": "float32 alone", "optimizer.name": "--optimizer", "optimizer.implementation": "--optimizer",
        "optimizer.fused": "--optimizer",
        **{path: axis for axis, names in AXES.items() for path in _spellings(*names)},
        **{path: said for name, said in _PIPELINE.items() for path in _spellings(name)},
        **dict.fromkeys(_spellings("expert_tensor_parallel_degree"), "1 alone; more is refused"),
        f"{_P}module_fqns_per_model_part": "cuts of the pipeline", f"{_P}fsdp_reshard_after_forward": "reshard_after_forward",
        f"{_P}disable_loss_parallel": "whether the loss is split with tp", f"{_T}disable_loss_parallel": "whether the loss is split with tp",
        f"{_P}enable_sequence_parallel": "true alone", "activation_checkpoint.mode": "--recompute",
        "activation_checkpoint.selective_ac_option": "selective, or every how many blocks one is recomputed",
        "compile.enable": "--compile blocks", "compile.components": "whether the model is among them",
    },
    ignored={
        **dict.fromkeys(("job.*", "profiling.*", "profiler.*", "metrics.*", "comm.*", "debug.*", "memory_estimation.*", "dump_folder",
                         "logging.*"), _LOGS),
        **dict.fromkeys(("checkpoint.*", "hf_assets_path", "tokenizer.*", "model.tokenizer_path", "model.hf_assets_path"), "changes no step"),
        **dict.fromkeys(("validation.*", "validator.*"), "evaluation is not predicted"),
        **dict.fromkeys(("lr_scheduler.*", "optimizer.lr", "optimizer.beta*", "optimizer.eps", "optimizer.weight_decay", f"{_T}warmup_steps"),
                        "numbers of the update, not its cost"),
        **dict.fromkeys((f"{_T}dataset*", f"{_T}dataloader.*", "dataloader.*", f"{_T}steps", f"{_T}seed", f"{_T}deterministic", f"{_T}gc_*",
                         f"{_T}enable_gc*"), "data and length change no step"),
        **dict.fromkeys(("activation_checkpoint.preserve_rng_state", "activation_checkpoint.determinism_check", "activation_checkpoint.debug",
                         "activation_checkpoint.early_stop", "activation_checkpoint.visualize*"), "changes no predicted step"),
        "activation_checkpoint.memory_budget": "for mode memory_budget alone",
        "activation_checkpoint.per_op_sac_force_recompute*": "for routers of experts alone", "compile.backend": "inductor is predicted",
        "model.print_after_conversion": _LOGS, f"{_P}context_parallel_*": "how positions are exchanged: foretell predicts one way",
        f"{_P}expert_parallel_comm_backend": "how experts exchange tokens: foretell predicts one way", f"{_P}spmd_backend": "the same messages",
        f"{_P}pipeline_parallel_expert_parallel_overlap": "for DualPipeV alone",
        **dict.fromkeys(("quantize.*", "float8.*", "mx.*"), "nothing without the converter in model.converters"),
    },
    cannot={
        "model.converters": "float8, MX and other converters are not predicted: the products are priced in --precision",
        "model_spec.*": "which model is in its name and flavor", "model.*": "changes of the model are not read: give them by --set",
        f"{_T}enable_cpu_offload": "offloading by FSDP is not predicted: the real run needs less of the device, and more time",
        f"{_T}disable_cuda_graphs": "CUDA graphs are not predicted here",
        "optimizer.early_step_in_backward": "not predicted: the real run needs less",
        **dict.fromkeys((f"{_P}enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel", "compile.enable_async_tensor_parallel"),
                        "messages of tp are predicted before and after the products, not inside: the real run is faster"),
        **dict.fromkeys((f"{_P}enable_compiled_autograd", "experimental.enable_compiled_autograd"), "a compiled backward graph is not predicted"),
        f"{_P}enable_fsdp_symm_mem": "not predicted", "fault_tolerance.*": "not predicted", "experimental.*": "code of your own is not read",
        "override.*": "code of your own is not read",
    },
    missing={"number of ranks": "`torchrun`: --on says it here"},
)  # fmt: skip


def suits(data: Mapping[str, Any]) -> bool:
    return len(_OWN & {key for key, value in data.items() if isinstance(value, Mapping)}) > 1 or isinstance(data.get("parallelism"), Mapping)


def read(data: Mapping[str, Any]) -> ToolConfig:
    reading = Reading("torchtitan", data, TABLES)
    _model(reading)
    for axis, names in AXES.items():
        path = reading.first(*_spellings(*names))
        least = -1 if axis == "dp_shard" else 1
        degree = reading.whole(path, least)
        if degree == 0:
            raise FileFormatError(f"{path} is 0", "a degree is 1 or more, that of shards also -1")
        if axis == "dp_shard" or degree is not None:
            reading.axis(axis, -1 if degree is None else degree, path, "" if degree is not None else "torchtitan shards over the other ranks")
    if (reading.whole(reading.first(*_spellings("expert_tensor_parallel_degree"))) or 1) > 1:
        raise FileFormatError("expert_tensor_parallel_degree above 1 is not predicted", "1")
    pipelined = reading.found.mesh.get("pp", 1) > 1
    _batch(reading)
    _precision(reading)
    _optimizer(reading)
    _activations(reading)
    _compile(reading)
    _pipeline(reading, pipelined)
    word = (reading.word(f"{_P}fsdp_reshard_after_forward") or "default").lower()
    if word not in ("default", "always", "never"):
        raise FileFormatError(f"{_P}fsdp_reshard_after_forward is {word!r:.60}", "default, always or never")
    kept = word == "never" or (word == "default" and pipelined)
    reading.take("reshard", not kept, f"{_P}fsdp_reshard_after_forward", "torchtitan's default" if word == "default" else "")
    if reading.flag(reading.first(f"{_P}disable_loss_parallel", f"{_T}disable_loss_parallel")):
        reading.found.options["split_loss"] = False
    if reading.flag(f"{_P}enable_sequence_parallel") is False:
        reading.cannot(f"{_P}enable_sequence_parallel", "tp is predicted with activations split along the sequence: the real run needs more")
        reading.found.demands["tp"] = "enable_sequence_parallel false is not predicted"
    return reading.done()


def _model(reading: Reading) -> None:
    name, flavor = (reading.first(f"model.{part}", f"model_spec.{part}") for part in ("name", "flavor"))
    said, size = reading.word(name), reading.word(flavor)
    known = {("llama3", flavor.lower()): ours for ours, flavor in FLAVORS.items()}
    found = known.get(((said or "llama3").lower(), (size or "").lower()))
    if found is not None:
        reading.take("model", found, flavor)
    elif said or size:
        told = f"{said or 'llama3'} {size or 'debugmodel'} is no model of the zoo: name MODEL"
        reading.cannot(name, told)
        reading.cannot(flavor, told)
        reading.found.missing["model"] = told


def _batch(reading: Reading) -> None:
    clip = reading.number(f"{_T}max_norm")
    reading.take("clip", 1.0 if clip is None else clip, f"{_T}max_norm", "" if clip is not None else "torchtitan's default")
    length = reading.first(f"{_T}seq_len", f"{_T}max_context_length")
    seq = reading.whole(length) or 2048
    reading.take("seq", seq, length, "" if length in reading.leaves else "torchtitan's default")
    slots, step = reading.whole(f"{_T}num_tokens_per_microbatch_per_dp_rank"), reading.whole(f"{_T}num_tokens_per_train_step", -1)
    if slots is not None:
        if slots % seq or (step is not None and step > 0 and step % seq):
            raise FileFormatError(f"{slots} tokens a micro-batch are no whole samples of {seq} tokens", "give MODEL and the options themselves")
        reading.take("micro_batch", slots // seq, f"{_T}num_tokens_per_microbatch_per_dp_rank")
        if step and step > 0:
            reading.take("global_batch", step // seq, f"{_T}num_tokens_per_train_step")
        return
    path = reading.first(f"{_T}local_batch_size", f"{_T}batch_size")
    local = reading.whole(path)
    reading.take("micro_batch", local or 8, path, "" if local else "torchtitan's default")
    total = reading.whole(f"{_T}global_batch_size", -1)
    if total == 0:
        raise FileFormatError(f"{_T}global_batch_size is 0", "-1 or a number above zero")
    if total is not None and total > 0:
        reading.take("global_batch", total, f"{_T}global_batch_size")


def _precision(reading: Reading) -> None:
    dtype, mixed = reading.word(f"{_T}dtype") or "float32", reading.word(f"{_T}mixed_precision_param") or "bfloat16"
    for key, value in (("dtype", dtype), ("mixed_precision_param", mixed)):
        if value not in ("float32", "bfloat16"):
            raise FileFormatError(f"{_T}{key} is {value!r:.60}", "float32 or bfloat16")
    path = f"{_T}dtype" if dtype == "bfloat16" else f"{_T}mixed_precision_param"
    ours = "bf16" if dtype == "bfloat16" else "bf16-mixed" if mixed == "bfloat16" else "fp32"
    reading.take("precision", ours, path, "" if path in reading.leaves else "torchtitan's default")
    reading.found.options["mixed_needs_shards"] = True
    if (reading.word(f"{_T}mixed_precision_reduce") or "float32") != "float32":
        reading.cannot(f"{_T}mixed_precision_reduce", "gradients are predicted to be reduced in float32: the real run sends less")
    if reading.flag(f"{_T}compile"):
        reading.take("compile", "blocks", f"{_T}compile")


def _optimizer(reading: Reading) -> None:
    name, way = reading.word("optimizer.name") or "AdamW", (reading.word("optimizer.implementation") or "fused").lower()
    if reading.flag("optimizer.fused") is False and "optimizer.implementation" not in reading.leaves:
        way = "foreach"
    if way not in _WAYS:
        raise FileFormatError(f"optimizer.implementation is {way!r:.60}", f"one of {', '.join(_WAYS)}")
    if name.lower() in ("adam", "adamw"):
        told = "" if "optimizer.name" in reading.leaves else "torchtitan's default"
        reading.take("optimizer", f"{name.lower()}-{_WAYS[way]}", "optimizer.name", told)
    else:
        reading.cannot("optimizer.name", "its states are not known")
        reading.found.demands["optimizer"] = f"optimizer.name {name!r:.40} is not predicted"


def _activations(reading: Reading) -> None:
    path, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode, kind = reading.word(path), reading.word(option) or "2"
    by = path if mode is not None else ""
    mode = (mode or "selective").lower()
    told = "" if by else "torchtitan's default"
    if mode in ("none", "full"):
        reading.take("recompute", mode, by, told)
        reading.ignore(option, f"for mode selective alone, and it is {mode}")
    elif mode == "memory_budget":
        reading.take("recompute", "none", by)
        reading.cannot(path, "a memory budget is not predicted: nothing is recomputed here, the real run needs less and takes longer")
        reading.ignore(option, "for mode selective alone")
    elif mode != "selective":
        raise FileFormatError(f"{path} is {mode!r:.60}", "none, full, selective or memory_budget")
    elif kind == "op":
        reading.take("recompute", "selective", by, "every second product is recomputed there, none here: the real run needs less")
    elif kind.isdigit():
        every = max(1, int(kind))
        reading.take("recompute", "full" if every == 1 else every, option if option in reading.leaves else by, told or "one of so many blocks")
    else:
        raise FileFormatError(f"{option} is {kind!r:.60}", "op or a number")


def _compile(reading: Reading) -> None:
    on, parts = reading.flag("compile.enable"), reading.names("compile.components")
    if on is None and "compile" in reading.found.options:
        return
    model = "model" in parts if parts else True
    reading.take("compile", "blocks" if on and model else "none", "compile.enable", "" if on is not None else "torchtitan's default")


def _pipeline(reading: Reading, pipelined: bool) -> None:
    found, paths = reading.found, {name: reading.first(*_spellings(name)) for name in _PIPELINE}
    schedule = reading.word(paths["pipeline_parallel_schedule"]) or "1F1B"
    csv = reading.word(paths["pipeline_parallel_schedule_csv"])
    sizes = {name: reading.whole(paths[f"pipeline_parallel_{name}"], 0) for name in
             ("microbatch_size", "microbatches", "layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")}  # fmt: skip
    rounds = reading.whole(paths["num_pp_microbatches"])
    parts, points = reading.names(f"{_P}module_fqns_per_model_part"), reading.names(paths["pipeline_parallel_split_points"])
    if not pipelined:
        for path in (*paths.values(), f"{_P}module_fqns_per_model_part"):
            reading.ignore(path, "nothing without a pipeline")
        return
    if csv:
        raise FileFormatError("pipeline_parallel_schedule_csv: a schedule of your own is not predicted", f"one of {', '.join(SCHEDULES.values())}")
    if schedule.lower() not in _SCHEDULES:
        raise FileFormatError(f"pipeline_parallel_schedule {schedule!r:.60} is not predicted", f"one of {', '.join(SCHEDULES.values())}")
    reading.take("schedule", _SCHEDULES[schedule.lower()], paths["pipeline_parallel_schedule"], "")
    if rounds is not None:
        found.options |= {"pipeline_micro_batch": found.options["micro_batch"], "local_batch": found.options["micro_batch"] * rounds}
    elif sizes["microbatches"]:
        if found.options["micro_batch"] % sizes["microbatches"]:
            raise FileFormatError(f"{found.options['micro_batch']} samples are no {sizes['microbatches']} micro-batches", "correct the file")
        found.options["pipeline_micro_batch"] = found.options["micro_batch"] // sizes["microbatches"]
    else:
        found.options["pipeline_micro_batch"] = sizes["microbatch_size"] or 1
    ends = (sizes["first_stage_less_layers"], sizes["last_stage_less_layers"])
    found.options["ends"] = tuple(1 if size is None else size for size in ends)
    found.options["per_stage"] = sizes["layers_per_stage"] or None
    cuts = _cuts(parts) if parts else [str(point) for point in points]
    if cuts:
        found.options["cuts"] = tuple(_ours(cut) for cut in cuts)


def _cuts(parts: list[Any]) -> list[str]:
    """The first block of every part but the first."""
    found = []
    for part in parts[1:]:
        first = next((str(name) for name in part if str(name).startswith("layers.")), "") if isinstance(part, list) else ""
        if not first:
            raise FileFormatError("module_fqns_per_model_part has a stage without a layer, which is not predicted", "a layer for each")
        found.append(first)
    return found


def _ours(path: str) -> str:
    """A block by foretell's name."""
    kind, _, number = path.partition(".")
    if kind != "layers" or not number.isdigit():
        raise FileFormatError(f"a stage begins with {path!r:.60}, which is no layer", "such as layers.16")
    return f"blocks.{int(number)}"
