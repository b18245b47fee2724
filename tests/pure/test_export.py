"""Plans for other tools: held against the tools' own loaders where they are installed, and against their documented keys."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.export import TOOLS, export
from foretell.export.text import yaml as yaml_text
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Pipeline, Plan, Residency

yaml = pytest.importorskip("yaml")

LLAMA = {"model": "llama3-8b", "seq": 8192, "blocks": ["blocks.0-31"]}
RECOMPUTED = {"blocks.*": Residency(mode="recompute")}
PIPELINE = Pipeline(schedule="1f1b", cuts=("blocks.16",))


def plan_of(model: dict[str, Any] | None = None, on: str = "2x8xH100", **changes: Any) -> Plan:
    return Plan(model=model or LLAMA, hardware=on, **{"micro_batch": 2, "accumulate": 2, **changes})


PLANS = {
    "fsdp": plan_of(mesh=Mesh(dp_shard=16), blocks=RECOMPUTED, compile="blocks"),
    "hybrid": plan_of(mesh=Mesh(dp_replicate=2, dp_shard=8), blocks={"blocks.0-9": Residency(mode="selective")}),
    "tensor": plan_of({"model": "hf:llama"}, mesh=Mesh(dp_shard=8, tp=2)),
    "pipeline": plan_of(mesh=Mesh(pp=2, dp_shard=8), accumulate=4, pipeline=PIPELINE),
    "replicas": plan_of(mesh=Mesh(dp_replicate=8), on="H100:8", clip=None, precision="fp32"),
    "one": plan_of(on="H100", accumulate=1, reshard=False),
    "cpu": plan_of({"model": "gpt-tiny"}, on="CPU", mesh=Mesh(dp_shard=2), precision="fp32"),
}

# Keys of the versions named in docs/export.md, as their own sources have them.
CLUSTER_KEYS = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank", "num_machines",
    "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity",
    "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16",
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
}  # fmt: skip
FSDP_KEYS = {
    "fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy", "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch", "fsdp_state_dict_type",
    "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
    "fsdp_activation_checkpointing",
}  # fmt: skip
TITAN_KEYS = {
    "training": {"local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "dtype", "mixed_precision_param", "mixed_precision_reduce"},
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward", "tensor_parallel_degree",
        "pipeline_parallel_degree", "module_fqns_per_model_part", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
        "context_parallel_degree", "expert_parallel_degree",
    },
    "compile": {"enable", "components", "backend"},
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "optimizer": {"name", "lr", "eps", "weight_decay", "implementation"},
    "model": {"name", "flavor", "hf_assets_path"},
    "job": {"description", "dump_folder", "print_config"},
}  # fmt: skip


def files(name: str, tool: str) -> dict[str, str]:
    return dict(export(PLANS[name], tool).files)


# ---------------------------------------------------------------- each tool


@pytest.mark.parametrize("name", [name for name in PLANS if name != "pipeline"])
def test_accelerate(name: str) -> None:
    plan, text = PLANS[name], files(name, "accelerate")["accelerate.yaml"]
    found = yaml.safe_load(text)
    assert found.keys() <= CLUSTER_KEYS
    assert found.get("fsdp_config", {}).keys() <= FSDP_KEYS
    sizes = found.get("parallelism_config", {})
    if sizes:
        product = 1
        for value in sizes.values():
            product *= value
        assert product == found["num_processes"] == plan.mesh.world
        assert sizes["parallelism_config_tp_size"] == plan.mesh.tp
    assert (found["distributed_type"] == "FSDP") == (plan.mesh.dp_shard > 1)
    assert found["mixed_precision"] == ("no" if plan.precision == "fp32" else "bf16")


@pytest.mark.parametrize("name", [name for name in PLANS if name != "pipeline"])
def test_deepspeed(name: str) -> None:
    plan, found = PLANS[name], json.loads(files(name, "deepspeed")["ds_config.json"])
    assert found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * plan.mesh.data == plan.global_batch
    assert found.get("train_batch_size", plan.global_batch) == plan.global_batch
    assert found["gradient_clipping"] == (plan.clip or 0.0), "left out, DeepSpeed clips at 1"
    assert found["zero_optimization"]["stage"] == (3 if plan.mesh.dp_shard > 1 else 0)
    assert found["zero_optimization"].get("zero_hpz_partition_size") == (8 if name == "hybrid" else None)
    assert found.get("tensor_parallel") == ({"autotp_size": 2} if name == "tensor" else None)


@pytest.mark.parametrize("name", ["fsdp", "hybrid", "pipeline", "replicas", "one"])
def test_torchtitan(name: str) -> None:
    plan, made = PLANS[name], files(name, "torchtitan")
    found = tomllib.loads(made["train.toml"])
    for table, values in found.items():
        assert values.keys() <= TITAN_KEYS[table]
    degrees = found["parallelism"]
    product = 1
    for key, value in degrees.items():
        product *= value if key.endswith("_degree") else 1
    assert product == plan.mesh.world
    rounds = plan.accumulate if plan.mesh.pp == 1 else 1
    assert found["training"]["local_batch_size"] * rounds * plan.mesh.data == found["training"]["global_batch_size"] == plan.global_batch
    if name == "pipeline":
        parts = degrees["module_fqns_per_model_part"]
        assert [len(part) for part in parts] == [17, 18] and parts[1][0] == "layers.16" and parts[1][-2:] == ["norm", "output"]
    set_there = {ast.unparse(node.targets[0]) for node in ast.walk(ast.parse(made["foretell_plan.py"])) if isinstance(node, ast.Assign)}
    for word in set_there - {"config", "config.activation_checkpoint"}:
        _, table, key = word.split(".")
        assert key in TITAN_KEYS[table]


@pytest.mark.parametrize("name", PLANS)
def test_slurm_is_a_script_that_starts_every_rank(name: str, tmp_path: Path) -> None:
    plan, made = PLANS[name], files(name, "slurm")
    (tmp_path / "a.sh").write_text(made["train.sbatch"])
    assert subprocess.run(["bash", "-n", tmp_path / "a.sh"], check=False).returncode == 0
    lines = [line for line in made["train.sbatch"].splitlines() if line.startswith("#SBATCH") and "=" in line]
    asked = dict(line.removeprefix("#SBATCH --").split("=") for line in lines)
    command = made["train.sbatch"].splitlines()[-1].split()
    each = int(command[command.index("--nproc-per-node") + 1]) if plan.mesh.world > 1 else 1
    assert int(asked["nodes"]) * each == plan.mesh.world
    assert asked.get("gpus-per-node") == (str(each) if name != "cpu" else None)
    assert plans.from_json(json.loads(made["plan.json"])) == plan


@pytest.mark.parametrize("name", PLANS)
def test_kubernetes(name: str) -> None:
    plan = PLANS[name]
    config, service, job = yaml.safe_load_all(files(name, "k8s")["job.yaml"])
    assert plans.from_json(json.loads(config["data"]["plan.json"])) == plan
    assert (config["kind"], service["kind"], job["kind"]) == ("ConfigMap", "Service", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    limits = pod["containers"][0].get("resources", {}).get("limits", {})
    assert limits == ({} if name == "cpu" else {"nvidia.com/gpu": plan.mesh.world // spec["completions"]})


@pytest.mark.parametrize("name", PLANS)
def test_skypilot(name: str) -> None:
    plan, found = PLANS[name], yaml.safe_load(files(name, "skypilot")["task.yaml"])
    assert found.keys() <= {"name", "workdir", "num_nodes", "resources", "setup", "run", "envs", "file_mounts"}
    if name == "cpu":
        assert found["resources"] == {"cpus": "2+"}
    else:
        device, count = found["resources"]["accelerators"].split(":")
        assert device == "H100" and int(count) * found["num_nodes"] == plan.mesh.world
    assert ("SKYPILOT_NODE_IPS" in found["run"]) == (found["num_nodes"] > 1)


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "k8s", "skypilot"])
def test_the_tool_itself_takes_the_files(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed."""
    package = {"deepspeed": "deepspeed.runtime.config", "k8s": "kubernetes_validate", "skypilot": "sky"}.get(
        tool, "accelerate.commands.config.config_args"
    )
    module = pytest.importorskip(package)
    for name, plan in PLANS.items():
        if name == "pipeline" and tool in ("accelerate", "deepspeed"):
            continue
        text = next(iter(files(name, tool).values()))
        path = tmp_path / f"{tool}.yaml"
        path.write_text(text)
        if tool == "accelerate":
            assert module.load_config_from_file(str(path)).num_processes == plan.mesh.world
        elif tool == "deepspeed":
            monkeypatch.setattr(module.dist, "get_rank", lambda *_: 0)
            monkeypatch.setattr(module.dist, "get_world_size", lambda *_, size=plan.mesh.world: size)
            assert module.DeepSpeedConfig(json.loads(text)).gradient_clipping == (plan.clip or 0.0)
        elif tool == "k8s":
            for part in yaml.safe_load_all(text):
                module.validate(part, module.latest_version(), strict=True)
        else:
            assert module.Task.from_yaml(str(path)).num_nodes == (1 if plan.hardware in ("H100", "H100:8", "CPU") else 2)


def test_what_is_lost_is_told_in_the_file_and_besides() -> None:
    made = export(PLANS["hybrid"], "accelerate")
    text = made.files["accelerate.yaml"]
    for part in ("micro_batch", "clip", "optimizer", "selective"):
        assert any(part in line for line in made.lost)
        assert part in "".join(line for line in text.splitlines(True) if line.startswith("#"))
    told = json.loads(export(PLANS["fsdp"], "deepspeed").files["ds_config.json"])["_not_said_here"]
    assert any("recompute" in line for line in told)
    assert not any("recompute" in line for line in export(PLANS["fsdp"], "accelerate").lost), "accelerate can say that"


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("plan", "tool", "why"),
    [
        (PLANS["pipeline"], "accelerate", "accelerate cannot express pp 2"),
        (PLANS["pipeline"], "deepspeed", "deepspeed cannot express pp 2"),
        (plan_of(mesh=Mesh(tp=2)), "deepspeed", "deepspeed cannot express tp 2"),
        (plan_of(mesh=Mesh(tp=2)), "accelerate", "accelerate cannot express tp 2"),
        (PLANS["tensor"], "torchtitan", "torchtitan cannot express hf:llama"),
        (plan_of({**LLAMA, "overrides": {"layers": 2}}), "torchtitan", "llama3-8b with other settings"),
        (plan_of(optimizer="sgd"), "torchtitan", "the optimizer sgd"),
        (plan_of(on="8xMI300X", mesh=Mesh(dp_shard=8)), "skypilot", "the hardware MI300X"),
        (plan_of(on="8xH100+8xA100", mesh=Mesh(dp_shard=8)), "slurm", "joins unlike devices"),
        (plan_of(mesh=Mesh(pp=2)), "slurm", "the plan cannot be run"),
        (PLANS["one"], "ray", "unknown tool 'ray'.*accelerate, deepspeed, torchtitan, slurm, k8s, skypilot"),
    ],
)
def test_a_tool_that_cannot_express_the_plan_says_what_and_why(plan: Plan, tool: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        export(plan, tool)


def test_the_command_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plans.text_of(PLANS["fsdp"]))
    assert main(["export", "plan.json", "--to", "accelerate"]) == 0
    assert "micro_batch: your script" in capsys.readouterr().out
    target = Path("llama3-8b-accelerate/accelerate.yaml")
    target.write_text("mine")
    assert main(["export", "plan.json", "--to", "accelerate"]) == 2
    assert f"{target} is there already" in capsys.readouterr().err and target.read_text() == "mine"
    assert main(["export", "plan.json", "--to", "accelerate", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["export"]["files"] == [str(target)]
    assert main(["export", "plan.json", "--to", "slurm", "--out", "plan.json"]) == 2
    assert main(["export", "plan.json", "--to", "ray"]) == 2
    told = capsys.readouterr().err
    assert all(tool in told for tool in TOOLS)


def test_our_yaml_is_yaml() -> None:
    value = {"a": [1, {"b": "x: y", "c": []}, "two\nlines\n"], "d": {}, "e": {"f": None, "g": True, "h": 1.5}, "i": "# no", "j": "l\n  m\n"}
    assert yaml.safe_load(yaml_text(value)) == value
