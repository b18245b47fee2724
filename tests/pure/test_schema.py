"""The JSON contract: what `--json` prints keeps to the schema, and the schema notices every lost or changed name."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from typing import Any

import jsonschema
import pytest

from foretell.quantities import (
    CATEGORIES,
    FITS,
    NO,
    SCHEMA_VERSION,
    Cost,
    Energy,
    Holder,
    Memory,
    Mfu,
    Phase,
    Prediction,
    Remedy,
    Run,
    Throughput,
    Time,
)
from foretell.report import schema

MEMORY = Memory(
    allocated_bytes=60, reserved_bytes=70, device_bytes=80, capacity_bytes=75, margin_bytes=-5, host_bytes=3,
    bands={"device_bytes": (78, 84)}, categories=dict.fromkeys(CATEGORIES, 7),
    holders=(Holder(name="blocks.*.mlp", category="activations", bytes=20),),
    phases=(
        Phase(
            name="first_step", allocated_bytes=60, reserved_bytes=70, device_bytes=80, host_bytes=3, timeline=((50, 60), (60, 70))
        ),
    ),
    provenance={"device_bytes": "measured"},
)  # fmt: skip
TIME = Time(
    step_seconds=0.5, low_seconds=0.25, high_seconds=0.75, breakdown={"gemm": 0.25, "memory": 0.125, "waiting_for_host": 0.125},
    phases={"forward": 0.125, "backward": 0.25}, binds="compute", provenance="measured", device_seconds=0.375,
    host_seconds=0.25, waiting_for_host_seconds=0.125,
)  # fmt: skip
PARTS: dict[str, Any] = {
    "time": TIME,
    "throughput": Throughput(unit="tokens", per_step=1024, per_second=2048.0, per_second_per_device=1024.0),
    "mfu": Mfu(
        value=0.25, hfu=0.5, flops_per_step=10**15, peak_flops_per_second=9.89e14, peak_dtype="bfloat16", convention="2 each"
    ),
    "energy": Energy(
        joules_per_step=300.0, low_joules=250.0, high_joules=350.0, watts_per_device=600.0, provenance="measured",
        carbon_grams_per_step=0.0, carbon_source="the world's mean",
    ),
    "cost": Cost(per_hour=8.0, per_step=0.001, per_billion=1085.0, unit="tokens", currency="USD", source="a list price"),
    "run": Run(
        amount=1e9, unit="tokens", steps=976563, seconds=488281.5, low_seconds=244140.75, high_seconds=732422.25, joules=2.9e8,
        money=1085.0, carbon_kilograms=38.5, device_years=0.03, embodied_carbon_kilograms=1.5,
    ),
}  # fmt: skip
ANSWER = Prediction(
    verdict=NO, model={"source": "gpt2", "blocks": ("blocks.*",)}, hardware={"nodes": 1}, parameters=124, memory=MEMORY, **PARTS,
    remedies=(Remedy(change="less", flag="--micro-batch 1", saves_bytes=10, fits=True),),
    assumptions=("eager",), versions={"foretell": "0.1.0"},
)  # fmt: skip
FAILURE = schema.failure("UnknownName", "unknown model 'x'", versions={"foretell": "0.1.0"})

TOP = (
    "schema_version", "versions", "assumptions", "verdict", "fits", "model", "hardware", "parameters", "memory",
    "time", "throughput", "mfu", "energy", "cost", "run", "remedies",
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
    *((name, item.name) for name, part in PARTS.items() for item in fields(part)),
]
"""Every name a reader may rely on."""


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
    parent = parent_of(broken, path)
    is_number = isinstance(parent[path[-1]], float)
    parent[path[-1]] = "1.5" if is_number else 0 if path[-1] == "schema_version" else 1.5
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
        (("time", "step_seconds"), 0),
        (("time", "breakdown", "gemm"), -0.1),
        (("time", "phases", "forward"), "0.1"),
        (("time", "provenance"), ""),
        (("throughput", "unit"), "words"),
        (("mfu", "flops_per_step"), -1),
        (("energy", "joules_per_step"), None),
        (("run", "steps"), 0),
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
    kinds = ((Prediction, "answer"), (Memory, "memory"), (Holder, "holder"), (Phase, "phase"), (Remedy, "remedy"))
    for kind, name in (*kinds, *((type(part), name) for name, part in PARTS.items())):
        described = definitions[name]
        names = {item.name for item in fields(kind)} | ({"fits"} if kind is Prediction else set())
        assert names == set(described["properties"]) == set(described["required"]), name
    assert definitions["answer"]["properties"]["schema_version"]["const"] == SCHEMA_VERSION


@pytest.mark.parametrize("name", PARTS)
def test_what_is_not_known_is_null(name: str) -> None:
    found = json.loads(json.dumps(schema.answer(replace(ANSWER, **{name: None}))))
    assert found[name] is None
    validate(found)


def test_single_figures_may_be_unknown() -> None:
    bare = replace(
        ANSWER,
        energy=replace(PARTS["energy"], carbon_grams_per_step=None),
        cost=replace(PARTS["cost"], per_billion=None),
        run=replace(PARTS["run"], joules=None, money=None, carbon_kilograms=None, embodied_carbon_kilograms=None),
    )
    validate(json.loads(json.dumps(schema.answer(bare))))


def test_a_number_that_is_none_does_not_break_the_json() -> None:
    odd = schema.answer(replace(ANSWER, mfu=replace(PARTS["mfu"], value=float("nan"), hfu=float("inf"))))
    found = json.loads(json.dumps(odd, allow_nan=False))
    assert found["mfu"]["value"] is None and found["mfu"]["hfu"] is None


# ---------------------------------------------------------------- reading it back


def test_an_answer_read_back_is_the_same() -> None:
    back = Prediction.from_json(answer())
    assert back == replace(ANSWER, model={"source": "gpt2", "blocks": ["blocks.*"]})
    assert json.loads(json.dumps(schema.answer(back))) == answer()


def test_an_answer_from_before_there_was_time_still_reads() -> None:
    old = {name: value for name, value in answer().items() if name not in PARTS}
    back = Prediction.from_json(old)
    assert back.memory == ANSWER.memory and back.remedies == ANSWER.remedies
    assert all(getattr(back, name) is None for name in PARTS)


def test_names_added_later_are_passed_over() -> None:
    more = answer() | {"later": 1}
    for part in ("memory", *PARTS):
        more[part]["later"] = 1
    for part in (more["memory"]["holders"][0], more["memory"]["phases"][0], more["remedies"][0]):
        part["later"] = 1
    assert Prediction.from_json(more) == Prediction.from_json(answer())


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
