"""The JSON contract: what `--json` prints keeps to the schema, and the schema notices every lost or changed name."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from typing import Any

import jsonschema
import pytest

from foretell.cost.prediction import CATEGORIES, FITS, NO, SCHEMA_VERSION, Holder, Memory, Phase, Prediction, Remedy
from foretell.report import schema

MEMORY = Memory(
    allocated_bytes=60, reserved_bytes=70, device_bytes=80, capacity_bytes=75, margin_bytes=-5, host_bytes=3,
    bands={"device_bytes": (78, 84)}, categories=dict.fromkeys(CATEGORIES, 7),
    holders=(Holder(name="blocks.*.mlp", category="activations", bytes=20),),
    phases=(Phase(name="first_step", allocated_bytes=60, reserved_bytes=70, device_bytes=80, host_bytes=3),),
    provenance={"device_bytes": "measured"},
)  # fmt: skip
ANSWER = Prediction(
    verdict=NO, model={"source": "gpt2", "blocks": ("blocks.*",)}, hardware={"nodes": 1}, parameters=124, memory=MEMORY,
    remedies=(Remedy(change="less", flag="--micro-batch 1", saves_bytes=10, fits=True),),
    assumptions=("eager",), versions={"foretell": "0.1.0"},
)  # fmt: skip
FAILURE = schema.failure("UnknownName", "unknown model 'x'", versions={"foretell": "0.1.0"})

TOP = (
    "schema_version", "versions", "assumptions", "verdict", "fits", "model", "hardware", "parameters", "memory", "remedies",
)  # fmt: skip
IN_MEMORY = (
    "allocated_bytes", "reserved_bytes", "device_bytes", "capacity_bytes", "margin_bytes", "host_bytes", "bands",
    "categories", "holders", "phases", "provenance",
)  # fmt: skip
PATHS: list[tuple[str | int, ...]] = [
    *((name,) for name in TOP),
    *(("memory", name) for name in IN_MEMORY),
    *(("memory", "holders", 0, item.name) for item in fields(Holder)),
    *(("memory", "phases", 0, item.name) for item in fields(Phase)),
    *(("remedies", 0, item.name) for item in fields(Remedy)),
]


def validate(value: Any) -> None:
    jsonschema.Draft202012Validator(schema.load()).validate(value)


def answer() -> dict[str, Any]:
    """As a reader gets it: through text."""
    found: dict[str, Any] = json.loads(json.dumps(schema.answer(ANSWER)))
    return found


def parent_of(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path[:-1]:
        value = value[step]
    return value


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema.load())
    assert schema.load()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_an_answer_keeps_to_it_and_has_every_name() -> None:
    found = answer()
    validate(found)
    assert set(TOP) <= set(found) and set(IN_MEMORY) <= set(found["memory"])
    assert isinstance(found["memory"]["phases"], list) and found["memory"]["phases"][0]["name"] == "first_step"
    assert found["model"]["blocks"] == ["blocks.*"]
    assert "error" not in found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_name_that_is_gone_or_renamed_is_noticed(path: tuple[str | int, ...]) -> None:
    for new_name in (None, f"{path[-1]}_new"):
        broken = copy.deepcopy(answer())
        parent = parent_of(broken, path)
        value = parent.pop(path[-1])
        if new_name is not None:
            parent[new_name] = value
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_another_type_is_noticed(path: tuple[str | int, ...]) -> None:
    broken = copy.deepcopy(answer())
    parent_of(broken, path)[path[-1]] = 1.5 if path[-1] != "schema_version" else 0
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("verdict",), "maybe"),
        (("fits",), True),
        (("memory", "device_bytes"), -1),
        (("memory", "bands", "device_bytes"), [1]),
        (("memory", "bands", "device_bytes"), [1, 2, 3]),
        (("memory", "categories", "parameters"), -1),
        (("memory", "phases"), {"first_step": {}}),
        (("versions",), {"python": "3.11"}),
        (("assumptions",), [1]),
        (("error",), {"kind": "x", "message": "y", "remedy": "", "detail": ""}),
    ],
)
def test_a_wrong_value_is_noticed(path: tuple[str, ...], value: Any) -> None:
    broken = copy.deepcopy(answer())
    parent_of(broken, path)[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)


def test_names_may_be_added() -> None:
    more = answer() | {"seconds": 1.5}
    more["memory"]["categories"]["kv_cache"] = 5
    validate(more)


def test_fits_follows_the_verdict() -> None:
    validate(answer() | {"verdict": FITS, "fits": True})
    with pytest.raises(jsonschema.ValidationError):
        validate(answer() | {"verdict": FITS, "fits": False})


def test_every_field_of_the_answer_is_described() -> None:
    definitions = schema.load()["$defs"]
    for kind, name in ((Prediction, "answer"), (Memory, "memory"), (Holder, "holder"), (Phase, "phase"), (Remedy, "remedy")):
        described = definitions[name]
        names = {item.name for item in fields(kind)} | ({"fits"} if kind is Prediction else set())
        assert names == set(described["properties"]) == set(described["required"]), name
    assert definitions["answer"]["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def test_a_failure_keeps_to_it() -> None:
    validate(FAILURE)
    assert FAILURE["assumptions"] == [] and FAILURE["error"]["kind"] == "UnknownName"


@pytest.mark.parametrize("path", [("schema_version",), ("versions",), ("assumptions",), ("error",),
                                  ("error", "kind"), ("error", "message"), ("error", "remedy"), ("error", "detail")])  # fmt: skip
def test_a_failure_that_lacks_a_name_is_noticed(path: tuple[str, ...]) -> None:
    broken = copy.deepcopy(FAILURE)
    parent_of(broken, path).pop(path[-1])
    with pytest.raises(jsonschema.ValidationError):
        validate(broken)
