"""Folding loses nothing: what is unfolded is the trace that was folded, to the last field and in the same order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.trace.fold.repeats import (
    FoldedTrace,
    find_runs,
    fold,
    fold_integers,
    join_path,
    split_path,
    unfold,
    unfold_integers,
)
from foretell.trace.types import Op, Program, Ref, Storage, TensorSpec, Trace

ROOT = Path(__file__).resolve().parents[2]
ACCUMULATE: dict[str, Any] = {"accumulate": 2, "clip": 1.0}
REAL = [
    ("gpt2", ACCUMULATE),
    ("gpt-tiny", {"recompute": "full"}),
    ("llama-tiny", {"precision": "fsdp-bf16"}),
    ("llama-tiny", {"mode": "infer"}),
    ("bert-tiny", {"optimizer": "adamw-loop"}),
    ("t5-tiny", ACCUMULATE),
    ("ssm-tiny", {"recompute": "full", **ACCUMULATE}),
    ("graphsage-tiny", {"precision": "fp32"}),
    ("vit-tiny", {"recompute": "selective"}),
    ("resnet-tiny", {"optimizer": "momentum"}),
    ("convnext-micro", ACCUMULATE),
    ("unet-tiny", {"mode": "infer"}),
    ("dit-tiny", {"recompute": "full"}),
    ("tnt-tiny", {}),
    ("raftmlp-tiny", {"optimizer": "adamw-foreach"}),
    ("fno-tiny", {}),
]


def traced(model: str, choices: dict[str, Any], **source: Any) -> Trace:
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture

    return capture(lambda: load(Source(model=model, **source)), Recipe(**choices))


def everything(trace: Trace) -> list[str]:
    """All of a trace as text: unlike ==, it tells 1 from True and sees the order of a mapping."""
    lines = [f"{key} {program.name} {op}" for key, program in trace.programs.items() for op in program.ops]
    lines += [f"{number} {storage}" for number, storage in trace.storages.items()]
    return [*lines, repr(trace.resident), repr(trace.schedule), repr(trace.meta), repr(list(trace.programs))]


def assert_comes_back(trace: Trace) -> FoldedTrace:
    folded = fold(trace)
    again = unfold(folded)
    assert again == trace
    assert everything(again) == everything(trace)
    return folded


def templates(folded: FoldedTrace, program: str) -> list[tuple[int, int]]:
    return [(len(block.template), block.count) for block in folded.programs[program].blocks]


def of(ops: list[Op], storages: dict[int, Storage] | None = None, resident: tuple[int, ...] = ()) -> Trace:
    return Trace({"p": Program("p", tuple(ops))}, {"step": (("p", 1),)}, storages or {}, resident, {"made": "up"})


# ---------------------------------------------------------------- models


ALIKE = pytest.mark.slow(reason="its ops and layers repeat as those of another model do")
RUN = ("gpt-tiny", "ssm-tiny", "graphsage-tiny", "unet-tiny")
LONG = [(model, kw) for model, kw in REAL if model not in RUN and (model, kw) != ("llama-tiny", {"mode": "infer"})]


@pytest.mark.parametrize(
    ("model", "choices"),
    [pytest.param(model, kw, id=f"{model}-{'-'.join(map(str, kw))}", marks=ALIKE if (model, kw) in LONG else ()) for model, kw in REAL],
)
def test_a_model_comes_back(model: str, choices: dict[str, Any]) -> None:
    assert_comes_back(traced(model, choices))


def test_the_layers_of_a_transformer_are_stored_once() -> None:
    folded = fold(traced("gpt-tiny", ACCUMULATE, overrides={"layers": 10}))
    for name in ("micro_first", "micro_next"):
        counts = [count for _, count in templates(folded, name) if count > 1]
        assert len(counts) == 2, "forward and backward"
        assert min(counts) >= 9
    assert len([each for each in templates(folded, "update_first") if each[1] >= 9]) == 1
    kept = sum(len(block.template) for block in folded.storages)
    assert kept < sum(len(block) for block in folded.storages) / 4


def test_more_layers_need_no_more_room() -> None:
    def room(layers: int) -> int:
        folded = fold(traced("llama-tiny", {"precision": "fsdp-bf16"}, overrides={"layers": layers}))
        blocks = [block for program in folded.programs.values() for block in program.blocks]
        return sum(len(block.template) for block in (*blocks, *folded.storages, *folded.resident))

    assert room(6) == room(12)


# ---------------------------------------------------------------- made-up ops

SPECS = [TensorSpec((2, 3), "float32"), TensorSpec((), "bfloat16"), TensorSpec((0, 5), "int64")]
PATHS = ["", "h.{}", "h.{}.norm1", "a*b.{}.c{}", "x07.{}", "层.{}", "n9999999999.{}"]
numbers = st.integers(0, 40)
scalars = st.one_of(st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, -0.0, 1.0, 0.5]), st.sampled_from("ab"))


@st.composite
def runs_of_ops(draw: st.DrawFn) -> list[Op]:
    """A few ops, several times over, with slots that mostly move in step."""
    count = draw(st.integers(1, 6))
    template = draw(
        st.lists(st.tuples(st.integers(0, 5), *[st.lists(numbers, max_size=2)] * 4), min_size=1, max_size=5)
    )
    base, steps = draw(st.integers(1000, 2000)), draw(st.lists(st.integers(-9, 9), min_size=3, max_size=3))
    attrs = tuple(draw(st.lists(scalars, max_size=2)))
    path, phase = draw(st.sampled_from(PATHS)), draw(st.sampled_from(["forward", "backward"]))
    first, direction = (9, -1) if draw(st.booleans()) else (0, 1)
    ops = []
    for turn in range(count):
        for kind, inputs, outputs, allocates, frees in template:
            module = path.format(first + direction * turn, turn)

            def moved(these: list[int], kind: int = kind, turn: int = turn) -> tuple[int, ...]:
                return tuple(base + number + steps[(kind + number) % 3] * turn for number in these)

            ops.append(
                Op(
                    f"aten.op{kind}", tuple(Ref(n, SPECS[n % 3 if kind else 0]) for n in moved(inputs)),
                    tuple(Ref(n, SPECS[kind % 3]) for n in moved(outputs)), module, phase,
                    None if kind == 1 else kind, moved(allocates), moved(frees), attrs,
                )
            )  # fmt: skip
    return ops


@st.composite
def op_lists(draw: st.DrawFn) -> list[Op]:
    ops = [op for run in draw(st.lists(runs_of_ops(), max_size=4)) for op in run]
    for place in draw(st.lists(st.integers(0, 200), max_size=3)):
        if place < len(ops):
            ops[place] = replace(
                ops[place], **draw(st.sampled_from([{"frees": (7,)}, {"flops": 9}, {"module": "z.3"}]))
            )
    return ops


@given(op_lists(), st.lists(numbers), st.lists(st.tuples(numbers, st.sampled_from(PATHS), st.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_made_up_ops_come_back(ops: list[Op], resident: list[int], memory: list[tuple[int, str, bool]]) -> None:
    made_up_comes_back(ops, resident, memory)


@pytest.mark.slow(reason="more of the same; some are drawn above")
@given(op_lists(), st.lists(numbers), st.lists(st.tuples(numbers, st.sampled_from(PATHS), st.booleans()), max_size=40))
@settings(max_examples=300, deadline=None)
def test_many_made_up_ops_come_back(ops: list[Op], resident: list[int], memory: list[tuple[int, str, bool]]) -> None:
    made_up_comes_back(ops, resident, memory)


def made_up_comes_back(ops: list[Op], resident: list[int], memory: list[tuple[int, str, bool]]) -> None:
    storages = {
        7 * place: Storage(size, "activation", path.format(place // 3, 1), saved, place % 5 == 0)
        for place, (size, path, saved) in enumerate(memory)
    }
    assert_comes_back(of(ops, storages, tuple(resident)))


@st.composite
def signs_and_slots(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    """Signs that repeat; an item has as many slots as its sign says, and a few slots are off."""
    signs: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        signs += draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)) * draw(st.integers(1, 12))
    off = draw(st.sets(st.integers(0, len(signs)), max_size=4))
    return signs, [tuple(place * slot + (place in off) for slot in range(sign)) for place, sign in enumerate(signs)]


@given(signs_and_slots())
@settings(max_examples=200, deadline=None)
def test_runs_are_disjoint_worth_it_and_affine(items: tuple[list[int], list[tuple[int, ...]]]) -> None:
    signs, slots = items
    done = 0
    for start, period, count in find_runs(signs, slots):
        assert start >= done
        done = start + period * count
        assert done <= len(signs)
        assert (count - 1) * period >= 4
        for place in range(start, done - period):
            assert signs[place] == signs[place + period]
        for place in range(start, done - 2 * period):
            one, two, three = slots[place], slots[place + period], slots[place + 2 * period]
            assert [b - a for a, b in zip(one, two, strict=True)] == [b - a for a, b in zip(two, three, strict=True)]


@given(st.lists(st.integers(0, 50), max_size=100), st.integers(0, 40), st.integers(-3, 3))
def test_integers_come_back(some: list[int], times: int, step: int) -> None:
    wanted = (*some, *(number + step * turn for turn in range(times) for number in some[:7]))
    assert unfold_integers(fold_integers(wanted)) == wanted


# ---------------------------------------------------------------- what is folded, and what is not


def layer(number: int, weight: int, activation: int) -> list[Op]:
    spec = TensorSpec((4, 4), "float32")
    return [
        Op("aten.mm", (Ref(activation, spec), Ref(weight, spec)), (Ref(activation + 1, spec),), f"h.{number}.mlp",
           "forward", 128, (activation + 1,)),
        Op("aten.relu", (Ref(activation + 1, spec),), (Ref(activation + 2, spec),), f"h.{number}", "forward", 16,
           (activation + 2,), (activation + 1,)),
        Op("aten.detach", (Ref(activation + 2, spec),), (Ref(activation + 2, spec),), f"h.{number}", "forward", 0),
    ]  # fmt: skip


def layers(count: int) -> list[Op]:
    return [op for number in range(count) for op in layer(number, number, 100 + 2 * number)]


def test_a_block_has_the_template_the_count_and_the_strides() -> None:
    (block,) = assert_comes_back(of(layers(8))).programs["p"].blocks
    assert block.template == tuple(layers(1))
    assert block.count == 8
    assert block.strides == ((2, 1, 2, 2, 1), (2, 2, 2, 2, 1), (2, 2, 1))
    assert len(block) == 24


def test_other_first_and_last_layers_are_left_out() -> None:
    ops = layers(8)
    ops[0] = replace(ops[0], inputs=(Ref(5, ops[0].inputs[0].spec), ops[0].inputs[1]))
    ops[-1] = replace(ops[-1], frees=(116,))
    assert templates(assert_comes_back(of(ops)), "p") == [(1, 1), (3, 7), (2, 1)]


def test_a_layer_that_moves_otherwise_splits_a_run() -> None:
    ops = layers(4) + [op for number in range(4, 10) for op in layer(number, number, 200 + 5 * number)]
    assert templates(assert_comes_back(of(ops)), "p") == [(3, 4), (3, 6)]


def test_every_second_layer_may_move_in_step() -> None:
    ops = [op for number in range(12) for op in layer(number, number, 200 + 4 * number + number % 2)]
    assert templates(assert_comes_back(of(ops)), "p") == [(6, 6)]


def test_layers_of_loops_are_stored_as_layers() -> None:
    ops = []
    for number in range(5):
        for turn in range(7):
            ops += layer(number, number, 1000 * number + 2 * turn)
        ops.append(Op("aten.add", (), (), f"h.{number}", "forward", 0))
    assert templates(assert_comes_back(of(ops)), "p") == [(22, 5)]


def test_equal_numbers_of_other_types_stay_apart() -> None:
    ops = [
        Op("x", (), (), "", "forward", 0, attrs=(value,))
        for value in (1, 1.0, True, 0.0, -0.0, False)
        for _ in "abcdef"
    ]
    assert templates(assert_comes_back(of(ops)), "p") == [(1, 6)] * 6


@pytest.mark.parametrize(
    "change",
    [
        {"name": "aten.mul"}, {"inputs": ()}, {"inputs": (Ref(117, TensorSpec((4, 4), "bfloat16")),)}, {"outputs": ()},
        {"module": "g.5"}, {"module": "h.6"}, {"module": "h.5.5"}, {"phase": "backward"}, {"flops": None}, {"flops": 17},
        {"allocates": ()}, {"allocates": (112, 113)}, {"allocates": (113,)}, {"frees": ()}, {"frees": (111, 110)},
        {"frees": (110,)}, {"attrs": (True,)},
    ],
)  # fmt: skip
def test_whatever_is_different_in_one_layer_stays_different(change: dict[str, Any]) -> None:
    ops = layers(12)
    ops[16] = replace(ops[16], **change)
    counts = [count for width, count in templates(assert_comes_back(of(ops)), "p") if width == 3]
    assert sum(counts) >= 10


@pytest.mark.parametrize(
    ("module", "path", "found"),
    [
        ("", ("",), ()),
        ("blocks.7.norm1", ("blocks.", ".norm", ""), (7, 1)),
        ("12", ("", ""), (12,)),
        ("a.007.b", ("a.007.b",), ()),
        ("a.*.0", ("a.*.", ""), (0,)),
        ("a.٣", ("a.٣",), ()),
        ("a.1234567890", ("a.1234567890",), ()),
    ],
)
def test_paths_are_split_at_integers(module: str, path: tuple[str, ...], found: tuple[int, ...]) -> None:
    assert split_path(module) == (path, found)
    assert join_path(path, found) == module


def test_nothing_is_nothing() -> None:
    assert assert_comes_back(of([])).programs["p"].blocks == ()
    assert_comes_back(Trace({}, {}, {}, ()))


def test_a_new_field_has_to_be_folded_too() -> None:
    """Storages carry whatever fields they have; for anything else that grows, change `fold` and `file` first."""
    assert [each.name for each in fields(Op)] == [
        "name", "inputs", "outputs", "module", "phase", "flops", "allocates", "frees", "attrs",
    ]  # fmt: skip
    assert (Ref._fields, TensorSpec._fields) == (("storage", "spec"), ("shape", "dtype"))
    assert [each.name for each in fields(Program)] == ["name", "ops"]
    assert [each.name for each in fields(Trace)] == ["programs", "schedule", "storages", "resident", "meta"]
    other = {"nbytes": 8, "role": "r", "module": "h.1", **dict.fromkeys(Storage._fields[3:], 1)}
    assert_comes_back(of([], {number: Storage(**other)._replace(module=f"h.{number}") for number in range(20)}))


# ---------------------------------------------------------------- speed


@pytest.mark.slow(reason="size alone; what folds is in the tests above")
def test_forty_thousand_ops_fold_and_unfold() -> None:
    ops = [replace(op, name=f"{op.name}{part}") for number in range(134) for part in range(100)
           for op in layer(number, 100 * number + part, 50_000 + 200 * number + 2 * part)]  # fmt: skip
    assert len(ops) > 40_000
    trace = of(ops, {number: Storage(64, "activation", f"h.{number // 300}") for number in range(40_000)})
    folded = fold(trace)
    assert list(unfold(folded).programs["p"].ops) == ops
    assert templates(folded, "p") == [(300, 134)]


def test_no_torch_is_imported() -> None:
    code = "import foretell.trace.fold.repeats, foretell.trace.store.file, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
