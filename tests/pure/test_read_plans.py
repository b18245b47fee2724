"""A plan that is exported and read again is the same plan, in the same bytes and seconds: to the last digit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.export import export, torchtitan
from foretell.export.read import layout, read
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan import file as plans
from foretell.plan.blocks import expand
from foretell.plan.recipe import known_blocks
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.search.solve.choose import SearchConstraints, choose
from foretell.search.traces.needed import Traces
from foretell.simulate.plan import KEEP, Options, predict_plan
from foretell.trace.load.model import Source

pytest.importorskip("yaml")

LLAMA = {"model": "llama-tiny", "seq": 64, "overrides": {}, "blocks": ["blocks.0-3"]}
AGAIN, SOME = ({"blocks.*": Residency(mode=mode)} for mode in ("recompute", "selective"))
FILES = {"torchtitan": "train.toml", "accelerate": "accelerate.yaml", "deepspeed": "ds_config.json"}


def plan_of(mesh: Mesh, **changes: Any) -> Plan:
    return Plan(model=LLAMA, hardware=changes.pop("on", "8xH100"), mesh=mesh, **{"micro_batch": 2, "accumulate": 2, **changes})


def piped(schedule: str, *cuts: int, **changes: Any) -> Plan:
    pipeline = Pipeline(schedule=schedule, cuts=tuple(f"blocks.{cut}" for cut in cuts))
    return plan_of(Mesh(pp=2, dp_shard=4), pipeline=pipeline, **{"accumulate": 4, "reshard": False, **changes})


PLANS = {
    "fsdp": plan_of(Mesh(dp_shard=8), blocks=AGAIN), "hybrid": plan_of(Mesh(dp_replicate=2, dp_shard=4), blocks=SOME),
    "kept": plan_of(Mesh(dp_shard=8), reshard=False), "replicas": plan_of(Mesh(dp_replicate=8)), "one": plan_of(Mesh(), on="H100", accumulate=1),
    "single": plan_of(Mesh(dp_shard=8), precision="fp32", micro_batch=1), "half": plan_of(Mesh(dp_shard=8), precision="bf16", clip=0.5),
    "compiled": plan_of(Mesh(dp_shard=8), compile="blocks"), "foreach": plan_of(Mesh(dp_shard=8), optimizer="adam-foreach", accumulate=3),
    "tensor": plan_of(Mesh(dp_shard=4, tp=2)), "context": plan_of(Mesh(dp_shard=4, cp=2)),
    "tensor3d": plan_of(Mesh(dp_replicate=2, dp_shard=2, tp=2)),
    "stages": piped("1f1b", 2), "uneven": piped("1f1b", 1, blocks=AGAIN), "gpipe": piped("gpipe", 2, reshard=True),
    "looped": piped("interleaved-1f1b", 1, 2, 3), "nodes": plan_of(Mesh(dp_replicate=2, dp_shard=8), on="2x8xH100"),
    "momentum": plan_of(Mesh(dp_shard=8), optimizer="momentum", clip=None),
}  # fmt: skip
TITAN = [name for name in PLANS if name != "momentum"]
ACCELERATE = ["fsdp", "kept", "replicas", "one", "single", "compiled", "context", "nodes"]
DEEPSPEED = ["kept", "replicas", "one", "single", "nodes", "momentum"]
FURTHER = {
    "foreach": "another way to update; momentum has an optimizer of its own", "tensor3d": "tensor has tp, hybrid replicas beside shards",
    "uneven": "fsdp has recompute, stages the cut", "gpipe": "stages has a schedule", "looped": "stages has a schedule and a cut",
}  # fmt: skip
"""Why a plan is slow: what is like it."""
ELSEWHERE = "the same plan is read from the file of another tool, and other plans from this one's"
AGAIN = {
    **{("torchtitan", name): ELSEWHERE for name in ("one", "replicas", "kept", "single", "nodes", "context", "compiled")},
    **{("accelerate", name): ELSEWHERE for name in ("kept", "one", "nodes", "fsdp")},
    **{("deepspeed", name): ELSEWHERE for name in ("replicas", "single")},
}
CASES = [(tool, name) for tool, names in (("torchtitan", TITAN), ("accelerate", ACCELERATE), ("deepspeed", DEEPSPEED)) for name in names]


@pytest.fixture(scope="module", autouse=True)
def tiny_of_torchtitan() -> Iterator[None]:
    """One model more that both have, small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torchtitan.FLAVORS, "llama-tiny", "tiny")
        yield


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(capability=(9, 0))


def modes_of(plan: Plan) -> dict[str, str]:
    return {block: residency.mode for block, residency in expand(plan.blocks, known_blocks(plan) or ()).items()}


def unsaid(tool: str, plan: Plan) -> dict[str, Any]:
    """What the tool leaves to the script, typed."""
    if tool != "accelerate":
        return {}
    return {"micro_batch": plan.micro_batch, "global_batch": plan.global_batch, "optimizer": plan.optimizer, "clip": plan.clip}


def read_back(tool: str, plan: Plan, at: Path, traces: Traces) -> Plan:
    """As `plan --from` does."""
    (at / FILES[tool]).write_text(export(plan, tool).files[FILES[tool]])
    config, typed, cluster = read(at / FILES[tool]), unsaid(tool, plan), parse(plan.hardware)
    given = layout.described(config, typed, cluster.count)
    wishes = SearchConstraints(
        described=given, precision=given.precision, optimizer=given.optimizer or "adamw-fused", clip=given.clip or None,
        compile=(given.compile,) if given.compile else (),
    )  # fmt: skip
    source = Source(model=config.options.get("model", "llama-tiny"), seq=config.options.get("seq", 64))
    found = choose(source, cluster, plan.hardware, wishes, options=Options(profile_of=find_profile), traces=traces)
    assert found.costed == 1, "one plan, as the file has it"
    return found.plan


@pytest.mark.parametrize(("tool", "name"), [
    pytest.param(*case, marks=[pytest.mark.slow(reason=why)] if (why := FURTHER.get(case[1]) or AGAIN.get(case)) else []) for case in CASES
])  # fmt: skip
def test_export_and_read_give_the_same_plan_and_numbers(tool: str, name: str, tmp_path: Path, traces: Traces) -> None:
    plan = PLANS[name]
    modes = set(modes_of(plan).values())
    want = predict_plan(traces.of(plan, modes), plan, parse(plan.hardware), Options(profile_of=find_profile)).predicted()
    found = read_back(tool, plan, tmp_path, traces)
    for part in ("mesh", "micro_batch", "accumulate", "precision", "optimizer", "clip", "reshard", "compile", "pipeline"):
        if part != "reshard" or plan.mesh.dp_shard * plan.mesh.cp > 1:  # which without shards says nothing
            assert getattr(found, part) == getattr(plan, part), part
    assert modes_of(found) == modes_of(plan) and found.model["model"] == "llama-tiny"
    assert found.predicted == want, "bytes and seconds, to the last digit"
    assert found.predicted["memory_bytes"] > 0 and found.predicted["step_seconds"] > 0


def test_at_least_twelve_plans_and_all_of_them_differ() -> None:
    assert len(CASES) >= 12 and len({repr(PLANS[name]) for _, name in CASES}) >= 12


@pytest.mark.slow(reason="many plans are costed; a file that leaves nothing open is costed below")
def test_what_is_left_open_is_tried_until_it_fits(traces: Traces) -> None:
    """A file without micro-batch and recompute: larger and larger ones, and the fastest is taken."""
    given = layout.described(read_of({"distributed_type": "MULTI_GPU", "num_processes": 8}), {}, 8)
    assert (given.micro_batch, given.recompute) == (None, None)
    wishes = SearchConstraints(described=given, precision="bf16-mixed")
    found = choose(Source(model="llama-tiny", seq=64), parse("8xH100"), "8xH100", wishes, options=Options(profile_of=find_profile), traces=traces)
    assert found.costed > 3 and found.best is not None and found.best.cost is not None
    assert found.best.plan.micro_batch > 1 and found.best.plan.mesh == Mesh(dp_replicate=8)
    assert all((one.cost.per_second or 0) <= (found.best.cost.per_second or 0) for one in found.runners_up if one.cost)


def test_a_plan_that_does_not_fit_is_not_replaced_by_one_that_does(traces: Traces) -> None:
    given = layout.described(read_of({"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_activation_checkpointing": False}}),
                             {"micro_batch": 1 << 20}, 8)  # fmt: skip
    wishes = SearchConstraints(described=given, precision="bf16-mixed")
    found = choose(Source(model="llama-tiny", seq=64), parse("8xH100"), "8xH100", wishes, options=Options(profile_of=find_profile), traces=traces)
    assert found.best is None and found.costed == 1 and found.infeasible is not None and found.infeasible.bytes_short > 0


def read_of(data: dict[str, Any]) -> Any:
    from foretell.export.read import accelerate

    return accelerate.read(data)


# ---------------------------------------------------------------- the command


def test_the_command_costs_the_files_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], traces: Traces) -> None:
    plan, path, out = PLANS["tensor"], tmp_path / "train.toml", tmp_path / "plan.json"
    path.write_text(export(plan, "torchtitan").files["train.toml"])
    assert main(["plan", "--on", "8xH100", "--from", str(path), "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    written = plans.read(out)
    assert (written.mesh, written.micro_batch, written.accumulate) == (plan.mesh, plan.micro_batch, plan.accumulate)
    direct = predict_plan(traces.of(plan, [KEEP]), plan, parse("8xH100"), Options(profile_of=find_profile)).predicted()
    assert all(written.predicted[name] == direct[name] for name in ("memory_bytes", "step_seconds"))
    assert answer["from"]["tool"] == "torchtitan" and not answer["from"]["unknown"]
    assert main(["plan", "--on", "8xH100", "--from", str(path), "--tp", "1", "--dp-shard", "8", "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert plans.read(out).mesh == Mesh(dp_shard=8) and "--tp 1: typed, and the file says 2" in told.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--on", "6xH100"], "the file has 8 ranks"), (["--on", "8xH100", "--margin", "0.1"], "--margin beside --from"),
        (["--on", "8xH100", "--tp", "3"], "the file has 12 ranks"), (["--on", "8xH100", "--infer"], "--infer beside --from"),
        (["--on", "8xH100", "--", "python", "a.py"], "--from and a script are given"),
    ],
)  # fmt: skip
def test_what_contradicts_the_file_is_one_line(words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(export(PLANS["tensor"], "torchtitan").files["train.toml"])
    assert main(["plan", "--from", str(path), "--out", str(tmp_path / "plan.json"), *words]) == 2
    told = capsys.readouterr().err.strip()
    assert why in told and "\n" not in told


def test_a_file_without_a_model_wants_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert main(["plan", "--on", "8xH100", "--from", str(tmp_path / "a.json")]) == 2
    assert "names no model" in capsys.readouterr().err


def test_torchtitan_is_told_where_its_mixed_precision_ends(tmp_path: Path) -> None:
    plan = plan_of(Mesh(tp=8), accumulate=1)
    assert any("fp32" in line for line in export(plan, "torchtitan").lost)
    with pytest.raises(UserError, match="torchtitan cannot express the optimizer"):
        export(PLANS["momentum"], "torchtitan")
