"""Configurations of other tools: every setting of a file is accounted for, bad files give one line, and `fit` answers for what a file says or not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import FileFormatError, MissingPackage, UserError
from foretell.export.read import TABLES, layout, read, words
from foretell.export.read.load import leaves
from foretell.export.read.reading import ToolConfig
from foretell.export.text import toml
from foretell.export.text import yaml as yaml_text
from foretell.plan.types import Mesh

pytest.importorskip("yaml")

TITAN = {
    "job": {"description": "a run", "dump_folder": "./outputs"},
    "profiling": {"enable_profiling": True, "profile_freq": 100},
    "model": {"name": "llama3", "flavor": "8B", "converters": ["float8"], "hf_assets_path": "./assets", "norm": "rms"},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "implementation": "foreach"},
    "training": {"local_batch_size": 4, "global_batch_size": 64, "seq_len": 4096, "max_norm": 0.5, "steps": 10, "mixed_precision_param": "bfloat16"},
    "parallelism": {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": -1, "tensor_parallel_degree": 2, "enable_async_tensor_parallel": True,
        "pipeline_parallel_schedule": "1F1B", "made_up": 3,
    },
    "activation_checkpoint": {"mode": "full", "selective_ac_option": "2"},
    "compile": {"enable": True, "components": ["model", "loss"]},
    "checkpoint": {"enable": False},
}  # fmt: skip
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "num_machines": 1, "extra": 1,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_activation_checkpointing": True, "fsdp_offload_params": True,
                    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_new": "?"},
    "dynamo_config": {"dynamo_backend": "INDUCTOR"},
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}}, "scheduler": {"type": "WarmupLR"}, "odd": {"er": 1},
}  # fmt: skip
TRAINER = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True, "fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"], "version": 2},
    "learning_rate": 1e-4, "logging_steps": 5, "use_liger_kernel": True, "whatever": 1,
}  # fmt: skip
BARE = {"fsdp_transformer_layer_cls_to_wrap": ["Block"], "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}
LIGHTNING = {
    "seed_everything": 1, "model": {"class_path": "mine.Net", "init_args": {"width": 3}}, "data": {"batch_size": 3}, "spare": True,
    "trainer": {
        "devices": 8, "num_nodes": 2, "precision": "bf16-mixed", "accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "max_epochs": 3,
        "strategy": {"class_path": "lightning.pytorch.strategies.FSDPStrategy", "init_args": {"sharding_strategy": "HYBRID_SHARD",
         "cpu_offload": True}},
    },
}  # fmt: skip
FILES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "torchtitan": ("train.toml", TITAN), "accelerate": ("accelerate.yaml", ACCELERATE), "deepspeed": ("ds.json", DEEPSPEED),
    "trainer": ("args.json", TRAINER), "fsdp": ("fsdp.json", BARE), "lightning": ("config.yaml", LIGHTNING),
}  # fmt: skip


def written(at: Path, name: str, data: Mapping[str, Any]) -> Path:
    path = at / name
    text = toml(data) if name.endswith(".toml") else yaml_text(data) if name.endswith(".yaml") else json.dumps(data)
    path.write_text(text)
    return path


def found_in(at: Path, name: str, data: Mapping[str, Any]) -> ToolConfig:
    return read(written(at, name, data))


# ---------------------------------------------------------------- every setting


@pytest.mark.parametrize("tool", FILES)
def test_every_setting_ends_under_one_heading(tool: str, tmp_path: Path) -> None:
    found = found_in(tmp_path, *FILES[tool])
    headings = (list(found.taken), list(found.ignored), list(found.cannot), found.unknown)
    assert sorted(path for heading in headings for path in heading) == sorted(leaves(FILES[tool][1])), "each once, none dropped"
    assert all(why for heading in (found.ignored, found.cannot) for why in heading.values()), "with a reason"


@pytest.mark.parametrize(
    ("tool", "options", "mesh", "cannot", "unknown"),
    [
        ("torchtitan",
         {"model": "llama3-8b", "seq": 4096, "micro_batch": 4, "global_batch": 64, "clip": 0.5, "precision": "bf16-mixed",
          "optimizer": "adamw-foreach", "recompute": "full", "compile": "blocks", "reshard": True},
         {"dp_replicate": 2, "dp_shard": -1, "tp": 2},
         ["model.converters", "model.norm", "parallelism.enable_async_tensor_parallel"], ["parallelism.made_up"]),
        ("accelerate", {"precision": "bf16-mixed", "recompute": "full", "compile": "model", "reshard": True}, {"dp_shard": -1},
         ["fsdp_config.fsdp_offload_params"], ["extra", "fsdp_config.fsdp_new"]),
        ("deepspeed", {"global_batch": 32, "micro_batch": 2, "accumulate": 2, "clip": 1.0, "precision": "bf16-mixed", "optimizer": "adamw-fused",
                       "reshard": True}, {"dp_shard": -1},
         ["zero_optimization.reduce_bucket_size", "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.pin_memory"],
         ["odd.er"]),
        ("trainer", {"micro_batch": 4, "accumulate": 2, "clip": 1.0, "precision": "bf16-mixed", "optimizer": "adamw-foreach", "recompute": "full",
                     "compile": "none", "reshard": True}, {"dp_shard": -1}, ["use_liger_kernel"], ["whatever"]),
        ("fsdp", {"reshard": False}, {"dp_shard": -1}, ["fsdp_offload_params"], []),
        ("lightning", {"precision": "bf16-mixed", "accumulate": 4, "clip": 0.5, "reshard": True}, {"dp_shard": -1, "dp_replicate": 2},
         ["model.class_path", "model.init_args.width", "data.batch_size", "trainer.strategy.init_args.cpu_offload"], ["spare"]),
    ],
)  # fmt: skip
def test_what_a_file_says(tool: str, options: dict[str, Any], mesh: dict[str, int], cannot: list[str], unknown: list[str], tmp_path: Path) -> None:
    found = found_in(tmp_path, *FILES[tool])
    ours = {name: value for name, value in found.options.items() if name != "mixed_needs_shards"}
    assert (ours, found.mesh) == (options, mesh)
    assert (sorted(found.cannot), sorted(found.unknown)) == (sorted(cannot), sorted(unknown))


@pytest.mark.parametrize("tool", TABLES)
def test_tables_name_a_setting_once(tool: str) -> None:
    tables = TABLES[tool]
    for kind in (tables.ignored, tables.cannot):
        assert not set(kind) & set(tables.taken)
    assert not set(tables.ignored) & set(tables.cannot)


VALUES = (1, 2, 2048, True, "float32", "full", "1F1B", "AdamW", "fused", "op", "always", "FULL_SHARD", "bf16", "32-true", "adamw_torch",
           "ddp", "norm", "", "8B", "llama3",
          ["model"], ["layers.2"], [["a"], ["layers.2"]], [1, 1], "no", "MULTI_GPU", "FSDPStrategy", "ModelParallelStrategy",
           "DeepSpeedStrategy")  # fmt: skip
BESIDE: dict[str, tuple[dict[str, Any], ...]] = {
    "torchtitan": ({"parallelism": {"pipeline_parallel_degree": 2}, "training": {}},),
    "accelerate": ({"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}), "deepspeed": ({"zero_optimization": {"stage": 3}},
    {"optimizer": {"type": "SGD"}, "bf16": {}}),
    "trainer": ({"output_dir": "a", "per_device_train_batch_size": 1, "fsdp": True}, {"output_dir": "a", "optim": "sgd"},
    {"transformer_layer_cls_to_wrap": "B"}),
    "lightning": ({"trainer": {"devices": 2, "strategy": {"class_path": "FSDPStrategy", "init_args": {}}}},
                  {"trainer": {"devices": 2, "strategy": {"class_path": "ModelParallelStrategy", "init_args": {}}}},
                  {"trainer": {"devices": 2, "strategy": {"class_path": "DeepSpeedStrategy", "init_args": {}}}}, {"trainer": {"devices": 2}}),
}  # fmt: skip


def with_key(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    head, dot, rest = key.partition(".")
    inner = data.get(head)
    return {**data, head: with_key(inner if isinstance(inner, Mapping) else {}, rest, value) if dot else value}


@pytest.mark.parametrize("tool", TABLES)
def test_what_a_table_says_is_taken_is_asked_for(tool: str, tmp_path: Path) -> None:
    """Every such setting alone, with values of which one has to suit it: it is then taken, or refused by its name."""
    for key in TABLES[tool].taken:
        asked = (asks(tmp_path, tool, key, with_key(beside, key, value)) for beside in BESIDE[tool] for value in VALUES)
        assert any(asked), key


def asks(at: Path, tool: str, key: str, data: Mapping[str, Any]) -> bool:
    try:
        found = found_in(at, "a.json", data)
    except UserError as error:
        return key.rpartition(".")[2] in str(error) and "refused" in TABLES[tool].taken[key]
    return found.tool == tool and key in found.taken


def test_the_screen_is_short_and_json_has_all(tmp_path: Path) -> None:
    path = written(tmp_path, *FILES["torchtitan"])
    found = read(path)
    told = words.content(found, path, {"seq": 128})
    assert "--seq 128: typed, and the file says 4096" in told["typed"]
    assert sum(len(told[kind]) for kind in ("taken", "ignored", "cannot", "unknown")) == len(leaves(TITAN))
    shown = "\n".join(words.lines(found, told))
    assert "not predicted  model.converters: float8" in shown and "unknown        parallelism.made_up" in shown


def test_the_page_has_the_tables_of_the_readers() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    for tool, tables in TABLES.items():
        section = page.partition(f"### {tool}\n")[2].partition("\n### ")[0]
        lines = words.table(tables)
        assert lines and "\n".join(lines) in section, f"docs/export.md, {tool}: python -c 'from foretell.export.read import words, TABLES; " \
            f"print(*words.table(TABLES[{tool!r}]), sep=chr(10))'"  # fmt: skip


# ---------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    ("tables", "mesh"),
    [
        ({"training": {"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2, "batch_size": 3}}, {"dp_shard": 4, "tp": 2}),
        ({"training": {"data_parallel_degree": 4, "batch_size": 3}, "experimental": {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}},
         {"dp_shard": 4, "pp": 2, "cp": 2}),
        ({"training": {"batch_size": 3}, "parallelism": {"expert_parallel_degree": 4}}, {"dp_shard": -1, "ep": 4}),
    ],
)  # fmt: skip
def test_older_spellings_of_torchtitan(tables: dict[str, Any], mesh: dict[str, int], tmp_path: Path) -> None:
    found = found_in(tmp_path, "train.toml", {"model": {"name": "llama3", "flavor": "70B"}, **tables})
    assert found.mesh == mesh and found.options["micro_batch"] == 3 and found.options["model"] == "llama3-70b" and not found.unknown


def test_token_budgets_of_torchtitan(tmp_path: Path) -> None:
    training = {"num_tokens_per_microbatch_per_dp_rank": 8192, "num_tokens_per_train_step": 131072, "max_context_length": 4096}
    found = found_in(tmp_path, "a.json", {"training": training, "parallelism": {"pipeline_parallel_degree": 2, "num_pp_microbatches": 4}})
    plan = layout.described(found, {}, 4)
    assert (plan.micro_batch, plan.accumulate, plan.mesh) == (2, 8, Mesh(pp=2, dp_shard=2))


@pytest.mark.parametrize(
    ("strategy", "kind", "mesh", "reshard"),
    [
        ("FULL_SHARD", "fsdp_sharding_strategy", Mesh(dp_shard=8), True), ("2", "fsdp_sharding_strategy", Mesh(dp_shard=8), False),
        ("NO_SHARD", "fsdp_reshard_after_forward", Mesh(dp_replicate=8), True),
        ("HYBRID_SHARD", "fsdp_sharding_strategy", Mesh(dp_replicate=2, dp_shard=4), True),
        (5, "fsdp_sharding_strategy", Mesh(dp_replicate=2, dp_shard=4), False),
        (False, "fsdp_reshard_after_forward", Mesh(dp_shard=8), False),
    ],
)  # fmt: skip
def test_strategies_of_fsdp(strategy: Any, kind: str, mesh: Mesh, reshard: bool, tmp_path: Path) -> None:
    data = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 2, "fsdp_config": {kind: strategy}}
    plan = layout.described(found_in(tmp_path, "a.yaml", data), {}, 8)
    assert (plan.mesh, plan.reshard) == (mesh, reshard)


@pytest.mark.parametrize(
    ("zero", "mesh", "reshard"),
    [
        ({"stage": 0}, Mesh(dp_replicate=8), True), ({"stage": 1}, Mesh(dp_replicate=8), True), ({"stage": 2}, Mesh(dp_shard=8), False),
        ({"stage": 3}, Mesh(dp_shard=8), True), ({"stage": 3, "zero_hpz_partition_size": 4}, Mesh(dp_replicate=2, dp_shard=4), True),
        ({"stage": 3, "mics_shard_size": 2}, Mesh(dp_replicate=4, dp_shard=2), True), ({}, Mesh(dp_replicate=8), True),
    ],
)  # fmt: skip
def test_stages_of_zero(zero: dict[str, Any], mesh: Mesh, reshard: bool, tmp_path: Path) -> None:
    found = found_in(tmp_path, "a.json", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    plan = layout.described(found, {}, 8)
    assert (plan.mesh, plan.reshard) == (mesh, reshard)
    assert ("zero_optimization.stage" in found.cannot) == (zero.get("stage") == 1), "said where states are counted whole"


# ---------------------------------------------------------------- bad files


BAD: list[tuple[str, str, str]] = [
    ("a.json", "{", "a.json is not JSON"),
    ("a.toml", "a = = 1", "a.toml is not TOML"),
    ("a.yaml", "a: [1\nb: }", "a.yaml is not YAML: line 2"),
    ("a.yaml", "- 1\n- 2\n", "a.yaml is no configuration: it holds list"),
    ("a.yaml", "", "it holds NoneType"),
    ("a.json", '{"layers": 3}', "a file of no tool that is known here: it has 'layers'"),
    ("a.json", '{"bf16": {}, "bf16": {}}', "'bf16' is given twice"),
    ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n", "line 2, column 1: 'distributed_type' is given twice"),
    ("a.json", '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}', "7 is no multiple of 2"),
    ("a.json", '{"zero_optimization": 3}', "zero_optimization is 3, and should hold settings"),
    ("a.json", '{"train_micro_batch_size_per_gpu": NaN}', "train_micro_batch_size_per_gpu is nan, not a whole number"),
    ("a.json", '{"bf16": {}, "gradient_clipping": Infinity}', "gradient_clipping is inf, not a number of at least 0"),
    ("a.json", '{"bf16": {"enabled": "maybe"}}', "bf16.enabled is 'maybe', not true or false"),
    ("a.yaml", "distributed_type: FSDP\nnum_processes: many\n", "num_processes is 'many'"),
    ("a.yaml", "distributed_type: FSDP\nnum_processes: {a: 1}\n", "num_processes holds settings, and should be a value"),
    ("a.yaml", "distributed_type: MEGATRON_LM\n", "distributed_type MEGATRON_LM is not predicted"),
    ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n", "give that file to --from"),
    ("a.json", '{"distributed_type": "A\\nB", "num_processes": 1}', "distributed_type A.*B is not predicted"),
    ("a.toml", "[training]\nseq_len = 1.5\n[parallelism]\n", "training.seq_len is 1.5, not a whole number"),
    ("a.toml", "[training]\n[parallelism]\ntensor_parallel_degree = 0\n", "tensor_parallel_degree is 0, not a whole number"),
    ("a.toml", '[training]\n[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Mine"\n', "schedule 'Mine' is not predicted"),
    ("a.toml", "[training]\ntensor_parallel_degree = 2\n[parallelism]\ntensor_parallel_degree = 4\n", "contradict each other"),
    ("a.json", '{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply|nested more than 32 deep"),
    ("a.yaml", "bf16: &b0 {x: 1}\n" + "".join(f"k{n}: &b{n} {{p: *b{n - 1}, q: *b{n - 1}}}\n" for n in range(1, 25)),
     "more than 20,000 settings"),
    ("a.yaml", "bf16: &a\n  enabled: *a\n", "nested more than 32 deep"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "why"), BAD)
def test_a_broken_file_gives_one_clear_line(name: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=why) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_what_is_no_text_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "binary.toml").write_bytes(os.urandom(64) + b"\xff")
    with (tmp_path / "huge.json").open("wb") as stream:
        stream.truncate(100 << 20)
    os.mkfifo(tmp_path / "pipe.json")
    for name, why in (
        ("loop.toml", "cannot be read: Too many levels of symbolic links"), ("binary.toml", "cannot be read: it is no text"),
        ("huge.json", "has 100 MiB"), ("pipe.json", "is no regular file"), (".", "is no regular file"), ("nowhere.json", "No such file"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_list_that_holds_itself_is_shown_short(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: &a [*a, *a]\n")
    with pytest.raises(FileFormatError, match=r"distributed_type is .*not a word"):
        read(tmp_path / "a.yaml")


def test_without_pyyaml_json_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("distributed_type: NO\n")
    (tmp_path / "a.json").write_text('{"distributed_type": "NO"}')
    with pytest.raises(MissingPackage, match=r"needs the package 'PyYAML'.*foretell\[yaml\]"):
        read(tmp_path / "a.yaml")
    assert read(tmp_path / "a.json").world == 1


# ---------------------------------------------------------------- ranks and batches


@pytest.mark.parametrize(
    ("parallelism", "devices", "why"),
    [
        ({"tensor_parallel_degree": 3}, 8, "groups of 3 ranks, and 8 devices are no multiple"),
        ({"data_parallel_shard_degree": 4}, 8, r"the file has 4 ranks \(dp_shard 4\) and there are 8 devices"),
        ({"expert_parallel_degree": 3}, 8, "ep 3 is no part of dp_shard 8"),
    ],
)  # fmt: skip
def test_degrees_that_the_devices_do_not_make(parallelism: dict[str, int], devices: int, why: str, tmp_path: Path) -> None:
    found = found_in(tmp_path, "a.toml", {"training": {"seq_len": 64}, "parallelism": parallelism})
    with pytest.raises(UserError, match=why):
        layout.described(found, {}, devices)


def test_batches_and_typed_sizes(tmp_path: Path) -> None:
    found = found_in(tmp_path, "ds.json", DEEPSPEED)
    assert layout.ranks(found, {}) == 8
    plan = layout.described(found, {}, 8)
    assert (plan.micro_batch, plan.accumulate) == (2, 2)
    typed = layout.described(found, {"micro_batch": 4}, 8)
    assert (typed.micro_batch, typed.accumulate) == (4, 1), "32 samples are kept"
    assert layout.described(found, {"global_batch": 64}, 8).accumulate == 4
    with pytest.raises(UserError, match="no multiple of 8 data ranks × 3"):
        layout.described(found, {"micro_batch": 3}, 8)
    del found.options["micro_batch"]
    assert layout.described(found, {}, 8).micro_batch == 2, "what is left of 32 samples, 8 ranks and 2 rounds"


def test_torchtitan_without_shards_computes_in_fp32_beside_tp(tmp_path: Path) -> None:
    """Its autocast is for one device and DDP, and fully_shard does it where there are shards."""
    for parallelism, devices, precision in (
        ({"tensor_parallel_degree": 8}, 8, "fp32"), ({"tensor_parallel_degree": 4}, 8, "bf16-mixed"), ({"data_parallel_shard_degree": 1},
         1, "bf16-mixed"),
        ({"tensor_parallel_degree": 4, "context_parallel_degree": 2}, 8, "bf16-mixed"),
    ):  # fmt: skip
        found = found_in(tmp_path, "a.toml", {"training": {"seq_len": 64}, "parallelism": parallelism})
        assert layout.described(found, {}, devices).precision == precision, parallelism
    assert layout.described(found, {"precision": "fp32"}, 8).precision == "fp32"


def test_an_optimizer_without_figures_has_to_be_typed(tmp_path: Path) -> None:
    found = found_in(tmp_path, "a.json", {"optimizer": {"type": "Shampoo"}, "bf16": {"enabled": True}})
    with pytest.raises(UserError, match=r"optimizer.type 'shampoo' is not predicted; type --optimizer"):
        layout.described(found, {}, 1)
    assert layout.described(found, {"optimizer": "adamw"}, 1).optimizer == "adamw"


def test_blocks_of_stages_and_of_recompute(tmp_path: Path) -> None:
    training = {"training": {"local_batch_size": 8}}
    found = found_in(tmp_path, "a.toml", {**training, "parallelism": {"pipeline_parallel_degree": 4}})
    plan = layout.described(found, {}, 4)
    blocks = [f"blocks.{number}" for number in range(32)]
    pipeline, residency = plan.pipeline(blocks), plan.residency(blocks)
    assert pipeline is not None and pipeline.cuts == ("blocks.8", "blocks.17", "blocks.25"), "34 layers with both ends: 9, 9, 8, 8"
    assert residency is not None and [block for block in blocks if residency[block].mode == "recompute"] == blocks[1::2], "every second one"
    assert (plan.micro_batch, plan.accumulate, plan.reshard) == (1, 8, False)
    found = found_in(tmp_path, "a.toml", {**training, "parallelism": {"pipeline_parallel_degree": 4,
     "pipeline_parallel_schedule": "Interleaved1F1B"}})
    looped = layout.described(found, {}, 4).pipeline(blocks)
    assert looped is not None and looped.stages == 8 and looped.schedule == "interleaved-1f1b"


# ---------------------------------------------------------------- fit


def test_fit_takes_theirs_and_what_is_typed_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True}, "gradient_clipping": 0.5}  # fmt: skip
    path = written(tmp_path, "ds.json", zero)
    words_ = ["fit", "gpt-tiny", "--on", "H100", "--from", str(path), "--json"]
    assert main(words_) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["from"]["tool"] == "deepspeed" and any("--on H100:4" in line for line in answer["from"]["taken"])
    assert main(["fit", "gpt-tiny", "--on", "H100:4", "--micro-batch", "2", "--accumulate", "2", "--clip", "0.5", "--json"]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert answer["memory"] == typed["memory"]
    assert main([*words_, "--micro-batch", "4"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["from"]["typed"] == ["--micro-batch 4: typed, and the file says 2"] and other["memory"] != typed["memory"]
    assert main([*words_, "--infer"]) == 2


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.toml", {"training": {"seq_len": 64}, "parallelism": {"tensor_parallel_degree": 2}}, "dp_shard 4 × tp 2, one of 2 blocks recomputed"),
        ("a.toml", {"training": {"seq_len": 64}, "parallelism": {"pipeline_parallel_degree": 2}, "activation_checkpoint": {"mode": "full"}},
         "pp 2 × dp_shard 4, reshard_after_forward=False"),
        ("a.toml", {"training": {"seq_len": 64}, "parallelism": {"fsdp_reshard_after_forward": "never"}, "activation_checkpoint": {"mode": "none"}},
         "dp_shard 8, reshard_after_forward=False"),
        ("a.toml", {"training": {"seq_len": 64}, "parallelism": {}}, "dp_shard 8, one of 2 blocks recomputed"),
        ("a.json", {"distributed_type": "MULTI_GPU", "num_processes": 8}, "dp_replicate 8"),
        ("a.json", {"zero_optimization": {"stage": 1}}, "dp_replicate 8"),
        ("a.json", {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "dp_replicate 2 × dp_shard 4"),
    ],
)  # fmt: skip
def test_fit_does_not_answer_for_another_layout(
    name: str, data: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text("[training]\nseq_len = 64\n[parallelism]\n" if data.get("parallelism") == {} else "")
    path = path if data.get("parallelism") == {} else written(tmp_path, name, data)
    assert main(["fit", "gpt-tiny", "--on", "8xH100", "--from", str(path)]) == 2
    told = capsys.readouterr()
    assert f"{path} has {why}, which `fit` does not predict" in told.err and f"foretell plan --on 8xH100 --from {path}" in told.err
    assert "FITS" not in told.out


def test_fit_on_fewer_devices_than_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "a.yaml", ACCELERATE)
    assert main(["fit", "gpt-tiny", "--on", "4xH100", "--from", str(path)]) == 2
    assert "the file has 8 ranks" in capsys.readouterr().err
    assert main(["fit", "gpt-tiny", "--on", "CPU", "--from", str(path)]) == 2
