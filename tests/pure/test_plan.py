"""Plans as data: names folded and unfolded, the mesh, stages cut, and which model a plan is for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from foretell.errors import UserError
from foretell.plan import blocks, default, file, mesh, paths, recipe
from foretell.plan.types import AXES, KEEP, MODES, Mesh, Pipeline, Residency
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from tests.pure.plan_cases import RECOMPUTE, SEEDS, SELECTIVE, TWELVE, plan

# ---------------------------------------------------------------- names, many as one


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ((), ()),
        (TWELVE, ("blocks.0-11",)),
        (("a.0", "a.1", "a.3", "b.4"), ("a.0-1", "a.3", "b.4")),
        (("norm", "a.0.x", "a.0.y", "a.1.x", "a.1.y"), ("norm", "a.0-1.x", "a.0-1.y")),
        (("e.0.w.0", "e.0.w.1", "e.1.w.0", "e.1.w.1"), ("e.0-1.w.0-1",)),
        (("e.0.w.0", "e.0.w.1", "e.1.w.0"), ("e.0.w.0-1", "e.1.w.0")),
        (("a.10", "a.9", "a.8"), ("a.8-10",)),
        (("a.00", "a.01"), ("a.00", "a.01")),
        (("a.0-3", "a.*", "a.\\x"), ("a.\\0-3", "a.\\*", "a.\\\\x")),
    ],
)
def test_names_fold(names: tuple[str, ...], folded: tuple[str, ...]) -> None:
    assert paths.fold_names(names) == folded


@pytest.mark.parametrize("seed", SEEDS)
def test_folded_names_unfold_to_the_same(seed: int) -> None:
    draw = random.Random(seed)
    words = ["a", "b", "0", "1", "2", "3", "10", "00", "1-2", "*", "\\y"]
    names = {".".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(draw.randint(0, 60))}
    values = {name: draw.choice("xyz") for name in names}
    folded = paths.fold(values)
    back = [(name, value) for pattern, value in folded.items() for name in paths.unfold(pattern)]
    assert dict(back) == values and len(back) == len(values)
    for pattern, value in folded.items():
        assert {name for name in names if paths.matches(pattern, name)} == set(paths.unfold(pattern))
        assert all(values[name] == value for name in paths.unfold(pattern))


def test_an_uneven_order_keeps_the_first_name_first() -> None:
    assert list(paths.fold({"z": 1, "a.1": 2, "m": 1, "a.0": 2})) == ["z", "a.0-1", "m"]


@pytest.mark.parametrize("pattern", ["blocks.*", "blocks.5-3", "blocks.0-99999999", "a.0-9999.b.0-9999"])
def test_a_pattern_of_no_sensible_names_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=re.escape(pattern)):
        paths.unfold(pattern)


def test_what_a_pattern_matches() -> None:
    assert paths.matches("blocks.*", "blocks.7") and not paths.matches("blocks.*", "blocks.a")
    assert not paths.matches("blocks.*", "blocks.1.mlp") and not paths.matches("blocks.1-3", "blocks.4")
    assert paths.matches("s.0-1.b.*", "s.1.b.30") and not paths.matches("s.0-1.b.*", "s.2.b.30")


# ---------------------------------------------------------------- the mesh


@pytest.mark.parametrize("seed", range(10))
def test_ranks_and_coordinates_are_one_numbering(seed: int) -> None:
    draw = random.Random(seed)
    shape = Mesh(**{axis: draw.randint(1, 3) for axis in AXES if axis != "ep"}, ep=2)
    places = [mesh.coordinates(shape, rank) for rank in range(shape.world)]
    assert [mesh.rank_at(shape, **place) for place in places] == list(range(shape.world))
    for axis in mesh.OWN_RANKS:
        found = mesh.groups(shape, axis)
        assert sorted(rank for group in found for rank in group) == list(range(shape.world))
        for group in found:
            assert [places[rank][axis] for rank in group] == list(range(getattr(shape, axis)))
            assert len({tuple(place for name, place in places[rank].items() if name != axis) for rank in group}) == 1


def test_tensor_ranks_are_side_by_side_and_stages_far_apart() -> None:
    shape = Mesh(pp=2, dp_shard=2, tp=2)
    assert mesh.groups(shape, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(shape, "dp_shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(shape, "pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


# ---------------------------------------------------------------- blocks and residency


def test_the_narrowest_pattern_counts() -> None:
    wanted = {"blocks.4": KEEP, "blocks.*": RECOMPUTE, "blocks.3-5": SELECTIVE}
    found = blocks.expand(wanted, TWELVE)
    assert list(found) == list(TWELVE)
    assert [found[name].mode for name in TWELVE[2:7]] == ["recompute", "selective", "keep", "selective", "recompute"]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_compressed_expands_to_the_same(seed: int) -> None:
    draw = random.Random(seed)
    stack = [f"e.{i}" for i in range(draw.randint(1, 9))] + [
        f"s.{i}.b.{j}" for i in range(3) for j in range(draw.randint(1, 5))
    ]
    wanted = {name: Residency(mode=draw.choice(MODES)) for name in stack}
    assert blocks.expand(blocks.compress(wanted), stack) == wanted


def test_what_keeps_is_left_out() -> None:
    assert blocks.compress(dict.fromkeys(TWELVE, KEEP)) == {}
    assert blocks.compress({**dict.fromkeys(TWELVE, RECOMPUTE), "blocks.3": KEEP}) == {
        "blocks.0-2": RECOMPUTE, "blocks.4-11": RECOMPUTE,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ({"layers.*": RECOMPUTE}, "layers.*"),
        ({"blocks.9-12": RECOMPUTE}, "blocks.12"),
        ({"blocks.12": KEEP}, "blocks.12"),
    ],
)
def test_a_pattern_for_no_block_is_named(patterns: dict[str, Residency], named: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"'{named}'")):
        blocks.expand(patterns, TWELVE)


def test_patterns_that_contradict_each_other_are_named() -> None:
    with pytest.raises(UserError, match=r"blocks\.0-3 and blocks\.2-5"):
        blocks.expand({"blocks.0-3": RECOMPUTE, "blocks.2-5": SELECTIVE}, TWELVE)
    assert blocks.expand({"blocks.0-3": RECOMPUTE, "blocks.2-5": RECOMPUTE}, TWELVE)["blocks.5"] == RECOMPUTE


# ---------------------------------------------------------------- stages


def test_stages_hold_the_blocks_between_cuts() -> None:
    piped = plan(mesh=Mesh(pp=3), pipeline=Pipeline(cuts=("blocks.2", "blocks.9")))
    assert blocks.stages_of(piped, TWELVE) == (TWELVE[:2], TWELVE[2:9], TWELVE[9:])
    assert blocks.stages_of(plan(), TWELVE) == (TWELVE,)


@pytest.mark.parametrize("cuts", [("blocks.9", "blocks.2"), ("blocks.2", "blocks.2"), ("blocks.12",)])
def test_cuts_that_are_none_are_refused(cuts: tuple[str, ...]) -> None:
    with pytest.raises(UserError):
        blocks.stages_of(plan(pipeline=Pipeline(cuts=cuts)), TWELVE)


def test_stages_go_around_or_down_and_back() -> None:
    looped = plan(mesh=Mesh(pp=3), pipeline=Pipeline(schedule="interleaved-1f1b", cuts=TWELVE[1:6]))
    assert [blocks.rank_of_stage(looped, stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [blocks.stages_of_rank(looped, rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    back = looped.with_(pipeline=Pipeline(schedule="zero-bubble-v", cuts=TWELVE[1:6]))
    assert [blocks.rank_of_stage(back, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert blocks.stages_of_rank(plan(), 0) == (0,)


@pytest.mark.parametrize("stages", range(1, 13))
def test_even_cuts_differ_by_one_block_at_most(stages: int) -> None:
    cuts = blocks.even_cuts(TWELVE, stages)
    sizes = [len(part) for part in blocks.stages_of(plan(pipeline=Pipeline(cuts=cuts)), TWELVE)]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the last stage, which has the loss, is not the longest"


def every_cut(costs: list[float], stages: int, before: float, after: float) -> Iterator[tuple[float, float]]:
    """The dearest stage, and the sum of squares, of every way to cut."""
    for places in combinations(range(1, len(costs)), stages - 1):
        edges = [0, *places, len(costs)]
        sums = [sum(costs[start:end]) for start, end in pairwise(edges)]
        sums[0] += before
        sums[-1] += after
        yield max(sums), sum(value * value for value in sums)


@pytest.mark.parametrize("seed", SEEDS)
def test_cuts_by_cost_are_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 10)
    stages = draw.randint(1, count)
    costs = [float(draw.choice((0, 1, 2, 3, 5, 8, 13))) for _ in range(count)]  # whole numbers: sums are exact
    before, after = float(draw.randint(0, 9)), float(draw.randint(0, 9))
    names = [f"b.{number}" for number in range(count)]
    cuts = blocks.cuts_by_cost(dict(zip(names, costs, strict=True)), stages, before=before, after=after)
    parts = blocks.stages_of(plan(pipeline=Pipeline(cuts=cuts)), names)
    sums = [sum(costs[names.index(name)] for name in part) for part in parts]
    sums[0] += before
    sums[-1] += after
    assert len(parts) == stages and all(parts)
    assert (max(sums), sum(value * value for value in sums)) == min(every_cut(costs, stages, before, after))


@pytest.mark.parametrize("stages", [0, 13])
def test_more_stages_than_blocks_are_refused(stages: int) -> None:
    for cut in (
        lambda: blocks.even_cuts(TWELVE, stages),
        lambda: blocks.cuts_by_cost(dict.fromkeys(TWELVE, 1.0), stages),
    ):
        with pytest.raises(UserError, match="12 blocks"):
            cut()


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(cost: float) -> None:
    with pytest.raises(UserError, match="costs"):
        blocks.cuts_by_cost({**dict.fromkeys(TWELVE, 1.0), "blocks.3": cost}, 2)


# ---------------------------------------------------------------- source, recipe, and which model


SHAPES = {
    "tokens.weight": ((50257, 768), "float32"),
    **{f"blocks.{number}.up.weight": ((3072, 768), "float32") for number in range(12)},
    **{f"blocks.{number}.up.bias": ((3072,), "bfloat16") for number in range(12)},
    "scale": ((), "float32"),
}


def test_a_plan_gives_the_source_and_recipe_it_was_made_from() -> None:
    source = Source(model="gpt2", overrides={"layers": 12}, micro_batch=4, seq=512)
    wanted = Recipe(
        recompute="full", accumulate=2, clip=0.5, precision="fsdp-bf16", shards=8, optimizer="sgd", compile="model"
    )
    about = recipe.model_of(source, blocks=TWELVE, shapes=SHAPES)
    made = default.default_plan(wanted, about, "8xH100", micro_batch=source.micro_batch, blocks=TWELVE)
    assert made.blocks == {"blocks.0-11": RECOMPUTE} and made.mesh == Mesh(dp_shard=8) and made.compile == "model"
    assert recipe.source_of(made) == source and recipe.recipe_of(made) == wanted
    again = file.from_json(json.loads(json.dumps(file.to_json(made))))
    assert recipe.source_of(again) == source and recipe.recipe_of(again) == wanted
    assert made.model["shapes"] == {
        "tokens.weight": "50257x768", "blocks.0-11.up.weight": "3072x768", "blocks.0-11.up.bias": "3072 bfloat16", "scale": "scalar",
    }  # fmt: skip
    assert made.model["parameters"] == 50257 * 768 + 12 * (3072 * 768 + 3072) + 1


def test_blocks_keep_the_order_they_run_in() -> None:
    for order in (TWELVE, TWELVE[::-1], ("e.0", "d.0", "e.1", "d.1"), ("a.0-3", "a.*")):
        made = plan(model=recipe.model_of(Source(model="x"), blocks=order))
        assert recipe.known_blocks(file.from_json(file.to_json(made))) == order
    assert recipe.known_blocks(plan(model={"model": "x"})) is None


@pytest.mark.parametrize(("data", "precision"), [(1, "bf16-autocast"), (2, "fsdp-bf16")])
def test_mixed_precision_is_that_of_fsdp_where_parameters_are_sharded(data: int, precision: str) -> None:
    assert recipe.recipe_of(plan(mesh=Mesh(dp_replicate=data))).precision == precision
    assert recipe.recipe_of(plan(mesh=Mesh(dp_replicate=data), precision="bf16")).precision == "bf16"


def test_blocks_that_differ_have_no_one_recipe() -> None:
    mixed = plan(blocks={"blocks.0-5": RECOMPUTE})
    with pytest.raises(UserError, match="keep, recompute"):
        recipe.recipe_of(mixed)
    assert (
        recipe.recipe_of(mixed, "keep").recompute == "none" and recipe.recipe_of(mixed, "recompute").recompute == "full"
    )
    assert recipe.recipe_of(plan(blocks={"blocks.0-11": SELECTIVE})).recompute == "selective"


def test_fp16_recipes_are_plans_with_scaled_gradients() -> None:
    for asked in (Recipe(precision="fp16-autocast"), Recipe(precision="fsdp-fp16", shards=4)):
        made = default.default_plan(asked, {"model": "gpt2"}, "T4:4")
        assert not default.in_no_plan(asked)
        assert made.precision == "fp16-mixed" and recipe.recipe_of(made).precision == asked.precision


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (Recipe(mode="infer"), "inference"), (Recipe(lora=8), ""), (Recipe(freeze=("tokens",)), "frozen parameters"),
        (Recipe(precision="bf16-autocast", shards=2), "bf16-autocast"), (Recipe(precision="fsdp-bf16"), "fsdp-bf16"), (Recipe(), ""),
    ],
)  # fmt: skip
def test_what_no_plan_can_say_is_known(asked: Recipe, what: str) -> None:
    assert default.in_no_plan(asked) == what


def test_the_same_model_has_no_differences() -> None:
    made = plan(model=recipe.model_of(Source(model="gpt2"), shapes=SHAPES))
    assert recipe.differences(made, SHAPES) == () and recipe.differences(made, dict(reversed(SHAPES.items()))) == ()
    assert (
        recipe.differences(made, {name: (list(shape), f"torch.{dtype}") for name, (shape, dtype) in SHAPES.items()})
        == ()
    )
    assert recipe.differences(plan(), SHAPES) == (), "the plan does not say"
    recipe.refuse_other_model(made, SHAPES)


def test_another_model_is_told_by_its_shapes() -> None:
    made = plan(model=recipe.model_of(Source(model="gpt2"), shapes=SHAPES))
    wider = {
        name: ((4 * 1024, 1024), dtype) if name.endswith("up.weight") else (shape, dtype)
        for name, (shape, dtype) in SHAPES.items()
    }
    deeper = {
        **SHAPES,
        "blocks.12.up.weight": ((3072, 768), "float32"),
        "blocks.13.up.weight": ((3072, 768), "float32"),
    }
    flatter = {name: shape for name, shape in SHAPES.items() if not name.startswith("blocks.1")}
    assert recipe.differences(made, wider) == (
        "blocks.0-11.up.weight is 3072x768 in the plan and 4096x1024 in the model",
    )
    assert recipe.differences(made, deeper) == ("blocks.12-13.up.weight (3072x768) is not in the plan",)
    assert recipe.differences(made, flatter) == (
        "blocks.1.up.weight (3072x768) is not in the model", "blocks.10-11.up.weight (3072x768) is not in the model",
        "blocks.1.up.bias (3072 bfloat16) is not in the model", "blocks.10-11.up.bias (3072 bfloat16) is not in the model",
    )  # fmt: skip
    with pytest.raises(
        UserError, match=r"another model: blocks\.0-11\.up\.weight is 3072x768 in the plan and 4096x1024"
    ):
        recipe.refuse_other_model(made, wider)
    with pytest.raises(UserError, match="and 21 more") as raised:
        recipe.refuse_other_model(made, {f"other{chr(97 + i)}": ((1,), "float32") for i in range(23)})
    assert raised.value.detail.count("\n") == 26


def test_a_digest_alone_says_that_they_differ() -> None:
    made = plan(model={"model": "gpt2", "digest": recipe.digest(SHAPES)})
    assert recipe.differences(made, SHAPES) == ()
    for name, shape in {
        "scale": ((1,), "float32"),
        "tokens.weight": ((50257, 768), "float16"),
        "scala": ((), "float32"),
    }.items():
        assert recipe.digest({**SHAPES, name: shape}) != recipe.digest(SHAPES)
    assert "digest" in recipe.differences(made, {"scale": ((), "float32")})[0]
