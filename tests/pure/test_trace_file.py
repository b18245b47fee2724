"""Trace files: what is written is read back, small and quickly, and what is no trace file is said in one line."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import FileFormatError, UserError
from foretell.trace.store import file
from foretell.trace.types import SCHEMA_VERSION, Op, Program, Ref, Storage, TensorSpec, Trace

SPEC = TensorSpec((4, 4), "bfloat16")
FIELDS = (
    "meta", "schedule", "texts", "paths", "specs", "patterns", "storage_patterns", "strides", "programs", "storages",
    "resident",
)  # fmt: skip


def op(layer: int, name: str = "aten.mm.default", **changes: Any) -> Op:
    made = Op(
        name, (Ref(layer, SPEC), Ref(200 + layer, SPEC)), (Ref(201 + layer, SPEC),), f"h.{layer}.mlp", "forward", 128,
        (201 + layer,), (200 + layer,),
    )  # fmt: skip
    return replace(made, **changes)


def small() -> Trace:
    """A trace with a bit of everything: repeats, a wide op, attributes of every type, no rule for flops."""
    layers = [op(layer, name) for layer in range(20) for name in ("aten.mm.default", "aten.add.Tensor")]
    wide = Op("aten._fused", tuple(Ref(3 * (n % 50) + n // 50, SPEC) for n in range(150)), (), "", "update", None)
    strange = op(3, module="", phase="", attrs=(1, 1.0, True, -0.0, "é\n", 2**70), frees=())
    return Trace(
        programs={
            "micro": Program("micro", (*layers, strange)),
            "update": Program("other", (wide,)),
            "no": Program("", ()),
        },
        schedule={"step": (("micro", 3), ("update", 1)), "empty": ()},
        storages={n: Storage(64, "activation", f"h.{n}", n % 2 == 0, n == 5, n % 2) for n in range(221)},
        resident=tuple(range(200)),
        meta={"parameters": 5, "blocks": ["h.0"], "nested": {"a": [1.5, None, True]}},
    )


def traced(model: str, recipe: dict[str, Any] | None = None, **source: Any) -> Trace:
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture

    return capture(lambda: load(Source(model=model, **source)), Recipe(**recipe or {}))


def assert_same(one: Trace, other: Trace) -> None:
    assert one == other
    assert repr(one) == repr(other), "types and order too"


# ---------------------------------------------------------------- writing and reading


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "no suffix"])
def test_a_trace_comes_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file.save(small(), path)
    assert_same(file.load(path), small())
    assert_same(file.load(str(path)), small())
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith("gz")


def test_an_empty_trace_comes_back() -> None:
    assert_same(file.loads(file.dumps(Trace({}, {}, {}, ()))), Trace({}, {}, {}, ()))


TRAINED: dict[str, Any] = {"accumulate": 2, "clip": 1.0, "optimizer": "adamw"}
FOLDED = pytest.mark.slow(reason="what a file holds of it is what test_fold.py folds and unfolds")


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        ("gpt-tiny", TRAINED), ("mixtral-tiny", TRAINED), ("unet-tiny", {"mode": "infer"}), ("t5-tiny", {"mode": "infer"}),
        *(pytest.param(model, TRAINED, marks=FOLDED) for model in ("resnet-tiny", "t5-tiny", "unet-tiny")),
        *(pytest.param(model, {"mode": "infer"}, marks=FOLDED) for model in ("gpt-tiny", "mixtral-tiny", "resnet-tiny")),
    ],
)  # fmt: skip
def test_a_model_comes_back(model: str, choices: dict[str, Any]) -> None:
    trace = traced(model, choices)
    assert_same(file.loads(file.dumps(trace)), trace)


def test_the_same_trace_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one.json.gz", "two.json.gz"):
        file.save(small(), tmp_path / name)
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()
    assert file.dumps(file.loads(file.dumps(small()))) == file.dumps(small())


def test_a_compressed_file_is_known_by_its_content(tmp_path: Path) -> None:
    file.save(small(), tmp_path / "trace.json.gz")
    (tmp_path / "trace.json.gz").rename(tmp_path / "trace.json")
    assert_same(file.load(tmp_path / "trace.json"), small())


@pytest.mark.slow(reason="more layers need no more room in test_fold.py, whose runs are what is stored")
def test_many_layers_are_a_small_file() -> None:
    few, many = (traced("llama-tiny", {"precision": "fsdp-bf16"}, overrides={"layers": n}) for n in (6, 20))
    text = file.dumps(many)
    assert len(text) < 1.25 * len(file.dumps(few)) < 60_000, "longer numbers, a longer list of blocks in meta"
    again = file.loads(text)
    assert_same(again, many)


def test_a_wide_op_is_a_small_file() -> None:
    refs = tuple(Ref(12 * (n % 1000) + n // 1000, TensorSpec((n % 5,), "float32")) for n in range(6000))
    trace = Trace({"p": Program("p", (Op("fused", refs, refs, "", "update", None),))}, {}, {}, ())
    assert len(file.dumps(trace)) < 2000
    assert_same(file.loads(file.dumps(trace)), trace)


# ---------------------------------------------------------------- all or nothing


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    file.save(small(), path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, full)
            with pytest.raises(OSError, match="No space"):
                file.save(replace(small(), resident=()), path)
        assert_same(file.load(path), small())
        assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    file.save(replace(small(), resident=()), path)
    assert file.load(path).resident == ()
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


# ---------------------------------------------------------------- what is wrong with a file


def complaint(text: str | bytes) -> str:
    with pytest.raises(FileFormatError) as caught:
        file.loads(text, "some.json")
    message = str(caught.value)
    assert message.startswith("some.json ")
    assert "\n" not in message
    assert len(message) < 250
    return message


@pytest.mark.parametrize("text", ["", "not JSON", b"\xff\xfe\x00\x80", '{"kind": NaN}', "[" * 100_000, '{"kind": 1e}'])
def test_no_json(text: str | bytes) -> None:
    assert "it is no JSON, or cut short" in complaint(text)


def test_a_text_that_is_cut_short() -> None:
    text = file.dumps(small())
    for end in range(0, len(text), 97):
        assert "cut short" in complaint(text[:end])


def test_a_compressed_file_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    whole = gzip.compress(file.dumps(small()).encode())
    for data in (whole[: len(whole) // 2], whole[:5], whole[:-1], whole[:40] + b"junk" + whole[44:]):
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match="cut short") as caught:
            file.load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3", "null", "[]", "{}", '{"kind": "foretell-plan", "schema": 1}'])
def test_another_kind_of_file(text: str) -> None:
    message = complaint(text)
    assert "another kind of file" in message
    assert ("'foretell-plan'" in message) == ("plan" in text)


@pytest.mark.parametrize("schema", [SCHEMA_VERSION + 1, 0, "1", None])
def test_another_schema_names_both_and_says_what_to_do(schema: object) -> None:
    message = complaint(json.dumps(json.loads(file.dumps(small())) | {"schema": schema}))
    assert f"schema {schema!r}, and this foretell reads {SCHEMA_VERSION}; trace the model again" in message


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str) -> None:
    data = json.loads(file.dumps(small()))
    del data[field]
    assert f"lacks the field '{field}'" in complaint(json.dumps(data))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 3, "x", [[]], [None], [["x"]], [[[9]]]])
def test_a_field_of_another_shape_is_damage(field: str, value: object) -> None:
    data = json.loads(file.dumps(small()))
    assert "is damaged" in complaint(json.dumps(data | {field: value}))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_damage_is_never_another_error(data: st.DataObject) -> None:
    text = file.dumps(small())
    place = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from('0123456789[]{},"x'))
    with contextlib.suppress(FileFormatError):
        file.loads(text[:place] + letter + text[place + 1 :])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        file.load(tmp_path / "none.json")


# ---------------------------------------------------------------- what a file cannot hold


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None, (1, 2), 1j])
def test_attributes_that_are_no_plain_numbers_are_refused(tmp_path: Path, value: Any) -> None:
    trace = replace(small(), programs={"p": Program("p", (op(1, attrs=(1, value)),))})
    with pytest.raises(FileFormatError, match=r"aten\.mm\.default has the attribute"):
        file.save(trace, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_meta_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(FileFormatError, match="cannot be stored"):
        file.dumps(replace(small(), meta={"x": value}))
