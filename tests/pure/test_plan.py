"""Plans as data: names folded and unfolded, stages cut, files read and written, legality, and which model a plan is for."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.errors import FileFormatError, UserError
from foretell.hardware import parse
from foretell.plan import blocks, file, legal, mesh, paths, recipe, schema
from foretell.plan.types import (
    AXES,
    COMPILES,
    FLOAT8,
    FORMATS,
    KEEP,
    MASTER,
    MODES,
    PRECISIONS,
    SCHEDULES,
    SCHEMA_VERSION,
    TIERS,
    Mesh,
    Pipeline,
    Plan,
    Residency,
    Split,
)
from foretell.trace.load import Source
from foretell.trace.recipe import OPTIMIZERS, Recipe

RECOMPUTE, SELECTIVE = Residency(mode="recompute"), Residency(mode="selective")
TWELVE = tuple(f"blocks.{number}" for number in range(12))
GPT = {"model": "gpt2", "seq": 1024, "blocks": ["blocks.0-11"]}
SEEDS = range(60)


def plan(**changes: Any) -> Plan:
    return Plan(**{"model": GPT, "hardware": "8xH100", **changes})


def random_plan(seed: int) -> Plan:
    """Any plan a file can hold, sensible or not."""
    draw = random.Random(seed)
    pick = draw.choice
    depth = draw.randint(1, 40)
    stack = [f"{pick(('blocks', 'model.layers', 'a.0.b'))}.{number}" for number in range(depth)]
    modes = {path: Residency(mode=pick(MODES)) for path in stack if draw.random() < 0.7}
    patterns = pick((modes, blocks.compress(modes), {"blocks.*": SELECTIVE, "blocks.3-5": KEEP, "blocks.4": RECOMPUTE}))
    model: dict[str, Any] = {"model": pick(("gpt2", "hf:llama", "file.py:build", "mø del"))}
    for name, value in (("seq", 512), ("image", 224), ("loss", "l.py:f"), ("overrides", {"dim": 8, "deep": {"x": [1, None]}}),
                        ("parameters", 10**9), ("digest", "0123456789abcdef"), ("blocks", [f"blocks.0-{depth}"]),
                        ("shapes", {"w.0-3.b": "3x4", "s": "scalar bfloat16"})):  # fmt: skip
        if draw.random() < 0.5:
            model[name] = value
    cuts = tuple(draw.sample(stack, draw.randint(0, depth)))
    return Plan(
        model=model, hardware=pick(("H100", "2x8xH100@IB400", "auto", "c.toml")),
        mesh=Mesh(**{axis: pick((1, 1, 2, 3, 8)) for axis in AXES}),
        pipeline=pick((None, Pipeline(schedule=pick(SCHEDULES), cuts=cuts))),
        split=pick((None, Split(), Split(rules={"blocks.*.up": "column", "head": "vocab"}, sequence=pick((True, False)), loss=False))),
        micro_batch=draw.randint(1, 64), accumulate=draw.randint(1, 64), precision=pick(PRECISIONS), optimizer=pick(OPTIMIZERS),
        clip=pick((None, 1.0, 0.3, 5e-4)), blocks=patterns, reshard=pick((True, False, 2, 8)), compile=pick(COMPILES),
        kernels=pick(({}, {"rms_norm": "triton-1"})),
        predicted=pick(({}, {"step_seconds": 0.1, "memory_bytes": 10**10, "collectives": [{"axis": "tp", "nbytes": 4}], "mine": [1]})),
        notes=pick(((), ("one", "zwei – drei"))),
    )  # fmt: skip


def says(value: Plan) -> Plan:
    """The plan with every block named one by one: two plans that say the same are equal so."""
    named = {}
    for pattern, residency in value.blocks.items():
        for name in [pattern] if "*" in pattern else paths.unfold(pattern):
            named[name] = residency
    overlap = any("*" in pattern for pattern in value.blocks)
    return value if overlap else replace(value, blocks=dict(sorted(named.items())))


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


# ---------------------------------------------------------------- files


def valid(value: Any) -> bool:
    return not list(jsonschema.Draft202012Validator(schema.load()).iter_errors(value))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_read_back_says_the_same(seed: int, tmp_path: Path) -> None:
    wanted = random_plan(seed)
    file.write(wanted, tmp_path / "plan.json")
    found = file.read(tmp_path / "plan.json")
    assert says(found) == says(wanted)
    assert file.to_json(found) == file.to_json(wanted) == json.loads((tmp_path / "plan.json").read_text())
    assert valid(file.to_json(wanted))
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_file_is_small_and_readable() -> None:
    small = plan(
        mesh=Mesh(pp=2, dp_shard=2), pipeline=Pipeline(cuts=("blocks.6",)), accumulate=4,
        blocks=dict.fromkeys(TWELVE[:6], RECOMPUTE), predicted={"step_seconds": 0.25, "low_seconds": float("nan")},
    )  # fmt: skip
    assert file.text_of(small) == (
        "{\n"
        '  "$schema": "foretell/plan/plan.schema.json",\n'
        '  "version": 1,\n'
        '  "model": {"model": "gpt2", "seq": 1024, "blocks": ["blocks.0-11"]},\n'
        '  "hardware": "8xH100",\n'
        '  "mesh": {"pp": 2, "dp_shard": 2},\n'
        '  "pipeline": {"schedule": "1f1b", "cuts": ["blocks.6"]},\n'
        '  "micro_batch": 1,\n'
        '  "accumulate": 4,\n'
        '  "precision": "bf16-mixed",\n'
        '  "optimizer": "adamw-fused",\n'
        '  "clip": 1.0,\n'
        '  "blocks": {"blocks.0-5": "recompute"},\n'
        '  "compile": "none",\n'
        '  "predicted": {"step_seconds": 0.25, "low_seconds": null}\n'
        "}\n"
    )


def test_a_residency_may_be_an_object() -> None:
    data = {"version": 1, "model": {"model": "x"}, "hardware": "H100", "blocks": {"blocks.*": {"mode": "selective"}}}
    assert file.from_json(data).blocks == {"blocks.*": SELECTIVE}


def test_a_plan_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        file.write(plan(), tmp_path / "nowhere" / "plan.json")
    (tmp_path / "plan.json").write_text("before")
    with pytest.raises(TypeError):
        file.write(plan(kernels={"op": object()}), tmp_path / "plan.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder"):
        file.write(plan(), tmp_path / "folder")
    assert (tmp_path / "plan.json").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["folder", "plan.json"]


LEAST = '"version": 1, "model": {"model": "gpt2"}, "hardware": "H100"'
BAD_FILES = {
    "": "is empty",
    "{": "line 1, column 2",
    "[]": "it is []",
    "null": "it is null",
    f'{{{LEAST}, "hardware": "A100"}}': "'hardware' stands twice",
    f'{{{LEAST}, "clip": NaN}}': "NaN",
    f'{{{LEAST}, "clip": -Infinity}}': "-Infinity",
    "[" * 100_000: "too deep",
    "{}": "version is missing",
    '{"version": 1, "model": {"model": "x"}}': "hardware is missing",
    '{"version": 1, "model": {}, "hardware": "H100"}': "model.model is missing",
    '{"version": 2, "model": {"model": "x"}, "hardware": "H100", "later": 1}': "version 2 and this foretell reads version 1",
    '{"version": "1", "model": {"model": "x"}, "hardware": "H100"}': 'version is "1"; write 1',
    '{"version": true, "model": {"model": "x"}, "hardware": "H100"}': "version is true",
    f'{{{LEAST}, "mircobatch": 2}}': "mircobatch is not known; did you mean micro_batch",
    f'{{{LEAST}, "micro_batch": "4"}}': 'micro_batch is "4"; write a whole number',
    f'{{{LEAST}, "micro_batch": 4.0}}': "micro_batch is 4.0; write a whole number",
    f'{{{LEAST}, "micro_batch": true}}': "micro_batch is true",
    f'{{{LEAST}, "accumulate": 0}}': "accumulate is 0; write a number of at least 1",
    f'{{{LEAST}, "clip": 0}}': "clip is 0; write a number above 0",
    f'{{{LEAST}, "mesh": {{"tp": 0}}}}': "mesh.tp is 0",
    f'{{{LEAST}, "mesh": {{"dp": 2}}}}': "mesh.dp is not known; did you mean",
    f'{{{LEAST}, "mesh": 8}}': "mesh is 8; write an object",
    f'{{{LEAST}, "precision": "bf61"}}': 'precision is "bf61"; did you mean bf16',
    f'{{{LEAST}, "pipeline": {{"schedule": "1F1B"}}}}': 'pipeline.schedule is "1F1B"; did you mean 1f1b',
    f'{{{LEAST}, "pipeline": {{"cuts": "blocks.6"}}}}': 'pipeline.cuts is "blocks.6"; write a list',
    f'{{{LEAST}, "pipeline": {{"cuts": ["blocks.6", 7]}}}}': "pipeline.cuts[1] is 7; write text",
    f'{{{LEAST}, "pipeline": 4}}': "pipeline is 4; write null or an object",
    f'{{{LEAST}, "split": {{"rules": {{"head": 1}}}}}}': "split.rules.head is 1",
    f'{{{LEAST}, "blocks": {{"blocks.0-3": "recomptue"}}}}': "blocks['blocks.0-3'] is \"recomptue\"; did you mean recompute",
    f'{{{LEAST}, "blocks": {{"blocks.0": 3}}}}': "blocks['blocks.0'] is 3; write one of keep, recompute, selective or an object",
    f'{{{LEAST}, "blocks": {{"blocks.0": {{"mode": "keep", "tier": "host"}}}}}}': "blocks['blocks.0'].tier is not known",
    f'{{{LEAST}, "reshard": "yes"}}': 'reshard is "yes"; write true or false or a whole number',
    f'{{{LEAST}, "notes": [1]}}': "notes[0] is 1",
    f'{{{LEAST}, "predicted": {{"step_seconds": -1}}}}': "predicted.step_seconds is -1",
    f"{{{LEAST.replace('gpt2', '')}}}": "model.model is empty",
    '{"version": 1, "model": {"model": "x", "shapes": {"w": "3 by 4"}}, "hardware": "H100"}': "write it like 3072x768",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=[re.sub(r"\W+", "-", words) for words in BAD_FILES.values()])
def test_a_bad_file_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    where = tmp_path / "plan.json"
    where.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError) as raised:
        file.read(where)
    assert BAD_FILES[text] in str(raised.value)
    assert str(where) in raised.value.problem and raised.value.remedy and "\n" not in str(raised.value)


def test_no_file_a_folder_and_bytes_are_told(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\x80\x81")
    for name, words in (("none.json", "there is no plan file"), (".", "cannot be read"), ("bytes.json", "not text")):
        with pytest.raises(UserError, match=words):
            file.read(tmp_path / name)


# ---------------------------------------------------------------- the schema


def spots(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from spots(item, (*here, name))


@pytest.mark.parametrize("seed", range(15))
def test_what_reads_the_schema_here_agrees_with_jsonschema(seed: int) -> None:
    """Plans with one thing changed, taken out or put in: both say yes, or both say no."""
    draw = random.Random(seed)
    whole = file.to_json(random_plan(seed))
    values = (
        None,
        True,
        False,
        0,
        1,
        -1,
        2.5,
        "",
        "keep",
        "1f1b",
        "none",
        [],
        ["a"],
        [1],
        {},
        {"mode": "keep"},
        {"x": 1},
    )
    verdicts = set()
    validator = jsonschema.Draft202012Validator(schema.load())
    for _ in range(150):
        changed = copy.deepcopy(whole)
        *above, last = draw.choice([spot for spot in spots(whole) if spot])
        parent: Any = changed
        for step in above:
            parent = parent[step]
        change = draw.random()
        if change < 0.2:
            del parent[last]
        elif change < 0.4 and isinstance(parent, dict):
            parent[draw.choice(("more", "mode", "tp", "cuts", "seq", "blocks"))] = draw.choice(values)
        else:
            parent[last] = copy.deepcopy(draw.choice(values))
        verdict = validator.is_valid(changed)
        assert (schema.fault(changed) is None) == verdict, changed
        verdicts.add(verdict)
    assert verdicts == {True, False}


def test_the_schema_is_a_schema_and_describes_every_field() -> None:
    whole = schema.load()
    jsonschema.Draft202012Validator.check_schema(whole)
    described = {
        Plan: whole["properties"], Mesh: whole["$defs"]["mesh"]["properties"], Pipeline: whole["$defs"]["pipeline"]["properties"],
        Split: whole["$defs"]["split"]["properties"], Residency: whole["$defs"]["residency"]["anyOf"][1]["properties"],
    }  # fmt: skip
    for kind, known in described.items():
        assert {item.name for item in fields(kind)} == set(known) - {"$schema"}, kind
    for rule in (whole, *whole["$defs"].values()):
        for name, inner in rule.get("properties", {}).items():
            assert schema.resolve(inner).get("description"), f"{name} is not described"
    assert whole["properties"]["version"]["const"] == SCHEMA_VERSION
    assert whole["$defs"]["pipeline"]["properties"]["schedule"]["enum"] == list(SCHEDULES)
    assert whole["$defs"]["mode"]["enum"] == list(MODES)
    assert whole["properties"]["precision"]["enum"] == [*PRECISIONS, FLOAT8, MASTER]
    assert whole["properties"]["state_format"]["enum"] == list(FORMATS)
    assert whole["properties"]["states"]["additionalProperties"]["enum"] == list(TIERS)
    assert whole["properties"]["compile"]["enum"] == list(COMPILES)


def test_the_defaults_of_the_schema_are_those_of_the_plan() -> None:
    usual = file.from_json({"version": 1, "model": {"model": "gpt2"}, "hardware": "H100"})
    assert usual == Plan(model={"model": "gpt2"}, hardware="H100")
    rules = schema.load()
    stated = {
        name: schema.resolve(rule)["default"]
        for name, rule in rules["properties"].items()
        if "default" in schema.resolve(rule)
    }
    assert set(stated) == {item.name for item in fields(Plan)} - {"version", "model", "hardware"}
    assert file.from_json({"version": 1, "model": {"model": "gpt2"}, "hardware": "H100", **stated}) == usual
    for part, kind in (("mesh", Mesh), ("pipeline", Pipeline), ("split", Split)):
        for name, rule in rules["$defs"][part]["properties"].items():
            assert json.loads(json.dumps(getattr(kind(), name))) == schema.resolve(rule)["default"], name


# ---------------------------------------------------------------- legality


def cut(schedule: str, *cuts: str) -> Pipeline:
    return Pipeline(schedule=schedule, cuts=cuts)


PIPED = plan(mesh=Mesh(pp=4), pipeline=cut("1f1b", "blocks.3", "blocks.6", "blocks.9"), accumulate=8)
ZERO = PIPED.with_(pipeline=cut("zero-bubble", "blocks.3", "blocks.6", "blocks.9"))
KNOWN = legal.Facts(
    blocks=TWELVE,
    heads=12,
    kv_heads=4,
    seq=1024,
    devices=8,
    devices_per_node=8,
    dtypes=frozenset({"float32", "bfloat16"}),
)

GOOD = {
    "one rank": plan(),
    "sharded": plan(mesh=Mesh(dp_replicate=2, dp_shard=4), reshard=2),
    "positions shared": plan(mesh=Mesh(dp_shard=2, cp=2, tp=2), reshard=4),
    "experts shared": plan(mesh=Mesh(dp_replicate=2, dp_shard=4, ep=2)),
    "three axes": plan(mesh=Mesh(pp=2, dp_shard=2, tp=2), pipeline=cut("1f1b", "blocks.5"), accumulate=2),
    "gpipe with few micro-batches": PIPED.with_(pipeline=cut("gpipe", "blocks.3", "blocks.6", "blocks.9"), accumulate=1),
    "looped": PIPED.with_(pipeline=cut("interleaved-1f1b", *TWELVE[1:8]), accumulate=10),
    "back and forth": PIPED.with_(pipeline=cut("zero-bubble-v", *TWELVE[1:8]), accumulate=3),
    "zero-bubble sharded": ZERO.with_(mesh=Mesh(pp=4, dp_shard=2), reshard=False),
    "blocks compiled": plan(compile="blocks", blocks={"blocks.0-3": SELECTIVE, "blocks.2": KEEP}),
    "odd vocabulary and sequence": plan(model={**GPT, "seq": 1023}, mesh=Mesh(tp=2), split=Split(sequence=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_is_legal_has_no_complaint(name: str) -> None:
    assert legal.complaints(GOOD[name], KNOWN if name != "odd vocabulary and sequence" else None) == ()
    legal.check(GOOD[name], KNOWN if name != "odd vocabulary and sequence" else None)


@pytest.mark.parametrize(
    ("wrong", "field", "problem", "remedy"),
    [
        (plan(mesh=Mesh(tp=0)), "mesh.tp", "is 0", "1"),
        (plan(mesh=Mesh(dp_shard=True)), "mesh.dp_shard", "is True", "1"),
        (plan(micro_batch=-2), "micro_batch", "is -2", "1"),
        (plan(accumulate=1.5), "accumulate", "is 1.5", "1"),
        (plan(clip=0.0), "clip", "is 0.0", "null"),
        (plan(clip=float("nan")), "clip", "is nan", "null"),
        (plan(reshard=0), "reshard", "is 0", "1"),
        (plan(precision="fp16-mixed"), "precision", "scaled", "bf16-mixed"),
        (plan(precision="bf15"), "precision", "'bf15' is not known", "bf16"),
        (plan(optimizer="adamw-fussed"), "optimizer", "not known", "adamw-fused"),
        (plan(compile="block"), "compile", "'block' is not known", "blocks"),
        (plan(blocks={"blocks.0": Residency(mode="offload")}), "blocks['blocks.0']", "'offload' is not known", "keep"),
        (PIPED.with_(pipeline=cut("1f1", *PIPED.pipeline.cuts)), "pipeline.schedule", "'1f1'", "1f1b"),
        (plan(mesh=Mesh(cp=3)), "mesh.cp", "1024 tokens cannot be shared evenly by 3 ranks", "1023 tokens"),
        (plan(mesh=Mesh(cp=2), compile="blocks"), "compile", "mesh.cp is 2", "compile none"),
        (plan(mesh=Mesh(cp=2, dp_shard=2), reshard=3), "reshard", "no divisor of dp_shard × cp, which is 4", "divisor"),
        (plan(mesh=Mesh(ep=4, dp_shard=6)), "mesh.ep", "dp_shard, of which it is a part, is 6", "that 4 divides"),
        (plan(mesh=Mesh(ep=2, dp_shard=2, tp=2)), "mesh.ep", "split over tp 2", "tp 1"),
        (plan(mesh=Mesh(ep=2, dp_shard=2), compile="blocks"), "compile", "mesh.ep is 2", "compile none"),
        (plan(precision="float8"), "precision", "the device has no products in float8", "bf16-mixed"),
        (plan(mesh=Mesh(dp_replicate=2, dp_shard=8)), "mesh", "dp_replicate 2 × dp_shard 8 makes 16 ranks and there are 8", "8 instead of 16"),
        (PIPED.with_(mesh=Mesh(pp=4, tp=4)), "mesh", "makes 16 ranks", "smaller pp or tp"),
        (plan(mesh=Mesh(pp=3)), "pipeline", "no cut says", "cuts blocks.4, blocks.8"),
        (plan(mesh=Mesh(pp=3), pipeline=Pipeline()), "pipeline", "no cut says", "cuts blocks.4, blocks.8"),
        (plan(pipeline=cut("1f1b", "blocks.3")), "pipeline", "2 stages and mesh.pp is 1", "larger pp"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "blocks.6")), "pipeline.cuts", "1f1b on 4 ranks wants one a rank", "cuts blocks.3"),
        (PIPED.with_(pipeline=cut("gpipe", *TWELVE[1:8])), "pipeline.cuts", "8 stages", "cuts blocks.3"),
        (ZERO.with_(pipeline=cut("zero-bubble", *TWELVE[1:6])), "pipeline.cuts", "zero-bubble on 4 ranks wants a multiple of 4", "cuts"),
        (ZERO.with_(pipeline=cut("zero-bubble-v", *PIPED.pipeline.cuts)), "pipeline.cuts", "wants two a rank, 8", "cuts blocks.2, blocks.4"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "blocks.3", "blocks.9")), "pipeline.cuts", "blocks.3 is cut twice", "another block"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.3", "block.6", "blocks.9")), "pipeline.cuts", "'block.6' is no block", "blocks.6"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.6", "blocks.3", "blocks.9")), "pipeline.cuts", "order", "blocks.3, blocks.6, blocks.9"),
        (PIPED.with_(pipeline=cut("1f1b", "blocks.0", "blocks.3", "blocks.9")), "pipeline.cuts", "would have none", "cuts blocks.3, blocks.6"),
        (PIPED.with_(accumulate=3), "accumulate", "at least 4 micro-batches and gets 3", "accumulate 4"),
        (ZERO.with_(accumulate=11), "accumulate", "2 rounds, and 11", "accumulate 10 or 12"),
        (ZERO.with_(compile="model"), "compile", "backward twice", "compile none"),
        (ZERO.with_(blocks={"blocks.0-3": SELECTIVE}), "blocks['blocks.0-3']", "selective recompute does not allow", "interleaved-1f1b"),
        (ZERO.with_(blocks={"blocks.*": RECOMPUTE}), "blocks['blocks.*']", "computes the whole block again for every part", "interleaved-1f1b"),
        (plan(mesh=Mesh(dp_shard=2), placement=(0, 0)), "placement", "each of the 2 devices 0 to 1 once", "no placement"),
        (plan(mesh=Mesh(dp_shard=2), placement=(1, 2)), "placement", "each of the 2 devices", "one device for each rank"),
        (ZERO.with_(mesh=Mesh(pp=4, dp_shard=2)), "reshard", "get no gradients", "reshard false"),
        (ZERO.with_(mesh=Mesh(pp=4, dp_replicate=2)), "reshard", "get no gradients", "reshard false"),
        (plan(mesh=Mesh(tp=8)), "mesh.tp", "12 attention heads cannot be split over 8 ranks", "tp 4"),
        (plan(mesh=Mesh(tp=6)), "mesh.tp", "4 key-value heads cannot be split over 6 ranks", "tp 4"),
        (plan(mesh=Mesh(dp_shard=8), reshard=3), "reshard", "3 is no divisor of dp_shard", "divisor"),
        (plan(blocks={"layers.*": RECOMPUTE}), "blocks['layers.*']", "layers.* is no block", "blocks.0-11"),
        (plan(blocks={"blocks.8-15": RECOMPUTE}), "blocks['blocks.8-15']", "blocks.12-15 is no block", "blocks.0-11"),
        (plan(blocks={"blocks.0-3": RECOMPUTE, "blocks.2-5": SELECTIVE}), "blocks['blocks.2-5']", "otherwise than blocks.0-3", "one residency"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_something_to_try(wrong: Plan, field: str, problem: str, remedy: str) -> None:
    found = [one for one in legal.complaints(wrong, KNOWN) if one.field == field and problem in one.problem]
    assert len(found) == 1, legal.complaints(wrong, KNOWN)
    assert remedy in found[0].remedy
    assert "\n" not in str(found[0]) and str(found[0]).count("; try: ") == 1
    with pytest.raises(UserError, match="the plan cannot be run"):
        legal.check(wrong, KNOWN)


def test_following_a_remedy_helps() -> None:
    """Cuts, micro-batches and degrees that are suggested are legal themselves."""
    seen = 0
    for schedule in SCHEDULES:
        for ranks in (2, 3, 4):
            for micro in range(1, 20):
                wrong = plan(mesh=Mesh(pp=ranks), pipeline=cut(schedule, "blocks.7"), accumulate=micro)
                for one in legal.complaints(wrong, KNOWN):
                    seen += 1
                    if one.field == "pipeline.cuts":
                        cuts = tuple(one.remedy.removeprefix("cuts ").split(", "))
                        mended = wrong.with_(pipeline=Pipeline(schedule=schedule, cuts=cuts))
                        assert not any(other.field == "pipeline.cuts" for other in legal.complaints(mended, KNOWN))
                    else:
                        for number in map(int, re.findall(r"\d+", one.remedy.split(", or")[0])):
                            mended = wrong.with_(accumulate=number)
                            assert not any(other.field == "accumulate" for other in legal.complaints(mended, KNOWN))
    assert seen > 100


def test_a_tensor_that_one_stage_uses_twice() -> None:
    inside = replace(KNOWN, tied=(("blocks.4.w", "blocks.5.w"),))
    assert [one.field for one in legal.complaints(ZERO, inside)] == ["pipeline.schedule"]
    assert legal.complaints(PIPED, inside) == ()
    for names in (("blocks.0.w", "blocks.1.w"), ("blocks.2.w", "blocks.5.w"), ("tokens.weight", "blocks.5.w")):
        assert legal.complaints(ZERO, replace(KNOWN, tied=(names,))) == (), "the first stage, or two stages"


def test_processes_that_were_started() -> None:
    wide = plan(mesh=Mesh(dp_shard=16), hardware="2x8xH100")
    facts = legal.Facts(devices=16, devices_per_node=8, world=4)
    (one,) = legal.complaints(wide, facts)
    assert "makes 16 processes and 4 processes started" in one.problem
    assert one.remedy == "torchrun --nnodes 2 --nproc-per-node 8 -m foretell run PLAN"
    assert legal.launch(wide) == "torchrun --nproc-per-node 16 -m foretell run PLAN"
    assert legal.launch(plan()) == "foretell run PLAN"
    assert (
        legal.launch(plan(mesh=Mesh(dp_shard=12)), 8) == "torchrun --nnodes 2 --nproc-per-node 6 -m foretell run PLAN"
    )


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [(96, "accumulate 12"), (36, "micro_batch 3 and accumulate 6"), (97, "that 2 data ranks divide")],
)
def test_a_global_batch_that_was_asked_for(wanted: int, remedy: str) -> None:
    made = plan(mesh=Mesh(dp_shard=2), micro_batch=4, accumulate=8)
    assert legal.complaints(made, legal.Facts(global_batch=64)) == ()
    (one,) = legal.complaints(made, legal.Facts(global_batch=wanted))
    assert f"makes 64 samples a step, not {wanted}" in one.problem and remedy in one.remedy


def test_hardware_gives_facts() -> None:
    facts = legal.facts_of(plan(), parse("2x8xH100"))
    assert (facts.devices, facts.devices_per_node, facts.blocks, facts.seq) == (16, 8, TWELVE, 1024)
    assert legal.complaints(plan(), facts) == ()
    (one,) = legal.complaints(plan(), legal.facts_of(plan(), parse("V100")))
    assert one.field == "precision" and one.remedy == "fp32"
    shared = replace(parse("V100"), device=replace(parse("V100").device, backend="cpu"))
    assert legal.complaints(plan(mesh=Mesh(dp_shard=2)), legal.facts_of(plan(), shared)) == (), "ranks may share a CPU"


def test_what_is_not_known_is_not_complained_of() -> None:
    strange = plan(model={"model": "x"}, mesh=Mesh(tp=7, dp_shard=99), blocks={"layers.*": RECOMPUTE}, hardware="auto")
    assert legal.complaints(strange, legal.Facts()) == ()


def test_a_model_without_blocks() -> None:
    bare = plan(model={"model": "x", "blocks": []}, mesh=Mesh(pp=2), compile="blocks", blocks={"blocks.*": RECOMPUTE})
    told = {one.field: one.remedy for one in legal.complaints(bare)}
    assert "no repeated blocks" in told["pipeline"] and told["compile"] == "compile model"
    assert "no repeated blocks" in told["blocks['blocks.*']"]


def test_all_complaints_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"\(and 2 more\)") as raised:
        legal.check(plan(mesh=Mesh(cp=2, ep=2), optimizer="wholly"), KNOWN)
    assert raised.value.detail.count("; try: ") == 3


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
    made = recipe.plan_of(source, wanted, hardware="8xH100", blocks=TWELVE, shapes=SHAPES)
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


@pytest.mark.parametrize(
    "asked", [Recipe(mode="infer"), Recipe(lora=8), Recipe(freeze=("tokens",)), Recipe(precision="fp16-autocast")]
)
def test_what_no_plan_can_say_is_refused(asked: Recipe) -> None:
    with pytest.raises(UserError, match="cannot say"):
        recipe.plan_of(Source(model="gpt2"), asked, hardware="H100")
    with pytest.raises(UserError, match="blocks"):
        recipe.plan_of(Source(model="gpt2"), Recipe(recompute="full"), hardware="H100")


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
