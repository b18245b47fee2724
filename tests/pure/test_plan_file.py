"""Plans as files: read and written, what is wrong told in a line, and the schema."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.errors import FileFormatError, UserError
from foretell.plan import blocks, file, paths, schema
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
from foretell.trace.recipe import OPTIMIZERS
from tests.pure.plan_cases import RECOMPUTE, SEEDS, SELECTIVE, TWELVE, plan


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
    f'{{{LEAST}, "blocks": {{"blocks.0": 3}}}}':
        "blocks['blocks.0'] is 3; write one of keep, recompute, selective, host, disk, recompute-host or an object",
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
