"""Precision follows the device: one rule over the whole catalogue, fp16 in plans as it is run, and why there is no plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from foretell import api
from foretell.api.plans import as_json
from foretell.cli.plan import plan as cli
from foretell.errors import UserError
from foretell.export import export
from foretell.export.read import read
from foretell.hardware import Cluster, parse
from foretell.hardware.catalog import devices
from foretell.lower.pipeline.rank import rank_traces
from foretell.lower.steps import repeated
from foretell.plan import file, legal, precision
from foretell.plan.facts import facts_of
from foretell.plan.mesh import rank_at
from foretell.plan.recipe import recipe_of
from foretell.plan.types import FP16, Mesh, Pipeline, Plan
from foretell.search.solve.choice import Choice, told
from foretell.search.solve.choose import as_choice
from foretell.search.solve.explain import told as explained
from foretell.search.space import layouts as space
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.constraints import check as check_wishes
from foretell.simulate.plan import predict_plan, sharded
from foretell.trace.recipe import COMPUTES, PRECISIONS, Recipe
from foretell.trace.types import Trace
from tests.pure import dry
from tests.pure.test_find import OPTIONS, search
from tests.pure.test_plan_cost import agrees, recorded, traced, workload

# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_computes_in_what_is_chosen_for_it(device: Any) -> None:
    for count in (1, 4):
        cluster = Cluster(device=device, devices_per_node=count)
        for sharded_ in (False, True):
            recipe = precision.default_recipe(cluster, sharded_)
            assert recipe in PRECISIONS
            precision.refuse_recipe(recipe, cluster, sharded_)
            if device.backend != "cpu":
                assert COMPUTES[recipe] in device.peak_flops_per_second
        for name in (*precision.worth_trying(cluster), precision.moving_states(cluster)):
            precision.refuse_plan(name, cluster)
            made = Plan(model={"model": "x"}, hardware="auto", precision=name, mesh=Mesh(dp_shard=count))
            assert legal.complaints(made, facts_of(made, cluster)) == ()
        check_wishes(SearchConstraints(precision=precision.default(cluster)), cluster)


def test_what_is_chosen() -> None:
    chosen = {device.name: precision.default(Cluster(device=device)) for device in devices()}
    fp16 = {"P100-PCIe-16GB", "V100-SXM-16GB", "V100-SXM-32GB", "T4", "RTX-2080-Ti"}
    assert {name for name, found in chosen.items() if found == FP16} == fp16
    assert {name for name, found in chosen.items() if found == "fp32"} == {"CPU", "GTX-1080-Ti"}
    assert precision.worth_trying(parse("P100")) == (FP16, "fp32"), "16 bits are no faster there"
    assert precision.worth_trying(parse("T4")) == (FP16,) and precision.worth_trying(parse("H100")) == ("bf16-mixed",)
    assert precision.default(parse("T4+A100")) == FP16, "every device must have it"
    assert precision.for_inference(parse("T4")) == "fp16" and precision.for_inference(parse("CPU")) == "bf16"


def test_names_of_recipes_and_plans_are_each_others() -> None:
    for recipe in PRECISIONS:
        name = precision.in_plan(recipe)
        assert (name is None) == (recipe in ("fp16", "tf32")), "one is for inference alone, the other of a script's own switch"
        if name is not None:
            assert precision.in_recipe(name, recipe.startswith("fsdp")) == recipe
            assert precision.computes_in(name) == COMPUTES[recipe]


@pytest.mark.parametrize(("on", "asked", "instead"), [("T4", "bf16-mixed", "fp16-mixed"), ("V100:8", "bf16-mixed", "fp16-mixed"),
                                                     ("T4", "bf16", "fp16-mixed"), ("GTX-1080-Ti", "fp16-mixed", "fp32")])  # fmt: skip
def test_fit_refuses_what_a_device_has_no_units_for(on: str, asked: str, instead: str) -> None:
    with pytest.raises(UserError, match=rf"--precision {asked}: .* has no (b?float16) units.* is not known") as error:
        api.fit("gpt-tiny", hardware=on, precision=asked)
    assert error.value.remedy.startswith(f"--precision {instead}")


def test_a_mixed_precision_has_one_name_and_the_old_ones_are_read() -> None:
    for name in precision.MIXED:
        for split, recipe in enumerate(precision.MIXED[name]):
            assert precision.read(name, bool(split)) == recipe == precision.read(recipe, bool(split)) and precision.shown(recipe) == name
    assert {precision.shown(recipe) for recipe in PRECISIONS} == set(precision.NAMES)
    with pytest.raises(UserError, match="unknown precision 'bf17'") as error:
        api.fit("gpt-tiny", hardware="A100", precision="bf17")
    assert error.value.remedy == "did you mean bf16, fp16? known: fp32, tf32, bf16-mixed, fp16-mixed, bf16, fp16"


def test_fp16_throughout_is_for_inference() -> None:
    with pytest.raises(UserError, match="fp16 weights cannot be trained"):
        Recipe(precision="fp16")
    assert Recipe(precision="fp16", mode="infer").precision == "fp16"


def test_devices_too_old_for_the_compiler() -> None:
    made = Plan(model={"model": "x"}, hardware="P100", precision=FP16, compile="model")
    assert [one.field for one in legal.complaints(made, facts_of(made, parse("P100")))] == ["compile"]
    assert legal.complaints(made, facts_of(made, parse("T4"))) == ()
    room = space.Room(cluster=parse("P100"), blocks=2, wishes=SearchConstraints())
    assert {layout.compile for one in space.every(room) for layout in space.compiles(room, one)} == {"none"}
    with pytest.raises(UserError, match=r"too old for torch\.compile"):
        api.fit("gpt-tiny", hardware="P100", compile=True)


# ---------------------------------------------------------------- legality


@pytest.mark.parametrize("more", [{"states": {"blocks.*": "host"}}, {"weights": {"blocks.*": "host"}, "states": {"blocks.*": "host"}}])
def test_scaled_gradients_do_not_move(more: dict[str, Any]) -> None:
    made = Plan(model={"model": "x"}, hardware="T4", precision=FP16, **more)
    wrong = legal.complaints(made)
    assert [one.field for one in wrong] == ["precision"] and "not moved" in wrong[0].problem
    assert legal.complaints(made.with_(precision="fp32")) == ()


def test_a_precision_that_hardware_lacks_is_refused_before_the_search() -> None:
    with pytest.raises(UserError, match="--precision bf16-mixed: T4 has no bfloat16 units") as error:
        check_wishes(SearchConstraints(precision="bf16-mixed"), parse("T4:4"))
    assert error.value.remedy == "--precision fp16-mixed, or fp32"


# ---------------------------------------------------------------- what is predicted is what runs


@pytest.mark.slow(reason="ranks in fp16 run in test_fp16.py; shards are fp32 and hold what those of bf16 do below")
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (Mesh(dp_shard=4), {"accumulate": 2}),
        pytest.param(Mesh(dp_replicate=2), {"clip": None}, marks=pytest.mark.slow(reason="another mesh of the same rule")),
    ],
)
def test_every_byte_and_message_of_fp16_on_ranks(mesh: Mesh, more: dict[str, Any]) -> None:
    asked = Plan(model={"model": "gpt-tiny"}, hardware="auto", micro_batch=2, mesh=mesh, precision=FP16, **more)
    build = workload("gpt-tiny", layers=3)
    agrees(dry.run(build, asked), sharded(repeated(traced(build, asked), asked.accumulate), asked))


@pytest.mark.slow(reason="a dry run of a pipeline; test_plan_torch has them in bf16")
def test_every_byte_and_message_of_fp16_in_a_pipeline() -> None:
    build = workload("gpt-tiny")
    asked = Plan(
        model={"model": "gpt-tiny"}, hardware="auto", micro_batch=2, mesh=Mesh(pp=2), precision=FP16, accumulate=4,
        pipeline=Pipeline(schedule="1f1b", cuts=("blocks.1",)),
    )  # fmt: skip
    trace = traced(build, asked)
    for rank in rank_traces(trace, asked):
        agrees(dry.run(build, asked, rank_at(asked.mesh, pp=rank.rank)), rank.trace)


def fp16_trace(plan: Plan, capability: tuple[int, int] = (7, 5)) -> Trace:
    return recorded(workload("gpt-tiny"), replace(recipe_of(plan), accumulate=1, shards=1), capability=capability)


@pytest.mark.parametrize("on", ["T4", "T4:2"])
def test_a_plan_costs_what_fit_says(on: str) -> None:
    """Memory to the byte, time but for the order of sums, on one device; sharded, gradients are summed in fp32 instead."""
    cluster = parse(on)
    recipe = Recipe(precision=precision.default_recipe(cluster, cluster.count > 1), clip=1.0, shards=cluster.count)
    asked = Plan(model={"model": "gpt-tiny"}, hardware=on, micro_batch=2, precision=FP16, mesh=Mesh(dp_shard=cluster.count))
    trace = fp16_trace(asked)
    said = api.predict(trace, recipe, cluster, {"micro_batch": 2})
    cost = predict_plan(trace, asked, cluster, OPTIONS)
    wide = predict_plan(fp16_trace(asked.with_(precision="fp32")), asked.with_(precision="fp32"), cluster, OPTIONS)
    if cluster.count == 1:
        assert cost.worst.memory.device_bytes == said.memory.device_bytes
        assert cost.time is not None and said.time is not None
        assert cost.time.step_seconds == pytest.approx(said.time.step_seconds, rel=1e-6)
    assert cost.worst.memory.allocated_bytes < wide.worst.memory.allocated_bytes
    assert any("fp16" in line and "scaler" in line for line in said.assumptions)
    assert any("T4 has float16 units and no bfloat16 ones" in line for line in said.assumptions)
    assert said.mfu is not None and said.mfu.peak_dtype == "float16"


def test_shards_are_fp32_and_hold_what_bf16_ones_do() -> None:
    """Parameters, gradients and states of a rank are the same bytes in fsdp-fp16 as in fsdp-bf16; the scaler is two numbers."""
    kept = []
    for name in (FP16, "bf16-mixed"):
        asked = Plan(model={"model": "gpt-tiny"}, hardware="auto", micro_batch=2, precision=name, mesh=Mesh(dp_shard=4))
        rank = sharded(fp16_trace(asked, (9, 0)), asked)
        kept.append(sorted(rank.storages[number].nbytes for number in rank.resident))
    assert kept[0] == sorted([*kept[1], *([4] * (len(kept[0]) - len(kept[1])))]) and len(kept[0]) - len(kept[1]) <= 2


# ---------------------------------------------------------------- files


def test_fp16_in_other_tools(tmp_path: Any) -> None:
    plan = Plan(model={"model": "llama3-8b"}, hardware="V100:8", mesh=Mesh(dp_shard=8), precision=FP16, micro_batch=2)
    said = json.loads(export(plan, "deepspeed").files["ds_config.json"])
    assert said["fp16"]["enabled"] is True and said["bf16"]["enabled"] is False and said["fp16"]["initial_scale_power"] == 16
    assert 'mixed_precision: "fp16"' in export(plan, "accelerate").files["accelerate.yaml"]
    with pytest.raises(UserError, match="torchtitan cannot express precision fp16-mixed"):
        export(plan, "torchtitan")
    (tmp_path / "ds.json").write_text(export(plan, "deepspeed").files["ds_config.json"])
    assert read(tmp_path / "ds.json").options["precision"] == "fp16-mixed"
    assert file.from_json(file.to_json(plan)) == plan and FP16 in told(plan)


# ---------------------------------------------------------------- no plan, and why


def told_of(choice: Choice, on: str) -> tuple[str, dict[str, Any]]:
    """The screen as one line, and the JSON."""
    return " ".join(cli.screen(choice, "gpt-tiny", on, "plan.json").split()), as_json(choice, "plan.json", None)


def test_a_device_without_bfloat16_is_searched_in_fp16() -> None:
    found = search("T4", micro_batch=4, exact=False)
    assert found.best is not None and found.best.plan.precision == FP16
    assert {one.plan.precision for one in found.front} == {FP16} and FP16 in explained(found.best.point.layout)
    both = search("P100", micro_batch=4, exact=False)
    assert both.there == 2 * found.there and both.best is not None, "where fp16 is no faster, fp32 is searched too"
    assert both.best.plan.compile == "none"
    assert legal.complaints(found.best.plan, facts_of(found.best.plan, parse("T4"))) == ()


def test_the_screen_counts_what_does_not_fit() -> None:
    found = search("T4,memory=480MiB", global_batch=4, exact=False)
    first, content = told_of(as_choice(found), "T4,memory=480MiB")
    (reason,) = content["reasons"]
    assert first.startswith("No plan for gpt-tiny on T4,memory=480MiB: ")
    assert f"{reason['count']} do not fit (the smallest needs 0." in first and "of 0.47 GiB)" in first
    assert reason["count"] == found.there > found.costed, "what holds more was not costed, and counts"


@pytest.mark.slow(reason="a search without an answer; another that has none is above")
def test_the_screen_says_why_else_there_is_no_plan() -> None:
    """Layouts that fit and are not legal: the reason, by count, and no bytes that are short."""
    found = search("H100:2", exact=False, micro_batch=4, meshes=(Mesh(dp_shard=4), Mesh(dp_replicate=4)))
    assert found.best is None and found.dropped
    first, content = told_of(as_choice(found), "H100:2")
    assert "ruled out (mesh: dp_shard 4 makes 4 ranks and there are 2 devices)" in first
    assert sum(one["count"] for one in content["reasons"]) == len(found.dropped)
    assert "short" not in cli.screen(as_choice(found), "gpt-tiny", "H100:2", "plan.json")


@pytest.mark.slow(reason="limits that nothing keeps are in test_find, and counts of reasons above")
def test_limits_that_no_plan_keeps_are_counted() -> None:
    found = search("H100", exact=False, global_batch=2, tokens=1e15, deadline_seconds=60.0)
    first, content = told_of(as_choice(found), "H100")
    assert found.best is None and content["reasons"][0]["count"] > 1
    assert "ruled out (takes " in first and "more than allowed)" in first
