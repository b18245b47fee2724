"""The host's share of a step: learned from steps that wait for it, held against steps with known weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretell.hardware.profile import OpRow
from foretell.price import host
from foretell.price.host import COUNTS, START, HostModel, call_seconds, counts, learn, turn_seconds, turns_of
from foretell.trace.types import NO_GRAD, PARAMETER, Op, Program, Ref, Storage, TensorSpec, Trace

SPEC = TensorSpec((4, 4), "float32")
CALLS = {"": 8e-6, "add": 5e-6, "mm": 15e-6}
TRUE = {
    "call": 1.6, "forward": 25e-6, "backward": 20e-6, "recompute": 15e-6, "update": 8e-6, "view": 14e-6, "backward_view": 6e-6, "module": 45e-6,
    "listed": 1e-6, "parameter": 10e-6, "program": 150e-6, "plain": 9e-6, "plain_view": 5e-6,
}  # fmt: skip


def op(name: str, phase: str, module: str = "", *attrs: str) -> Op:
    return Op(f"aten.{name}", (Ref(0, SPEC),), (Ref(1, SPEC),), module, phase, 1, attrs=attrs)


def step(rng: random.Random) -> Trace:
    names = [("add.Tensor", "forward"), ("mm.default", "forward"), ("view.default", "forward"), ("mm.default", "backward"),
             ("t.default", "backward"), ("_fused_adamw_.default", "update")]  # fmt: skip
    ops = [op(*pair, rng.choice("abc")) for pair in names for _ in range(rng.randint(5, 200))]
    ops += [op(*pair, rng.choice("abc"), NO_GRAD) for pair in names[:3] for _ in range(rng.randint(5, 100))]
    parameters = rng.randint(5, 100)
    return Trace(
        programs={"micro": Program("micro", tuple(ops))}, schedule={"steady_step": (("micro", rng.randint(1, 3)),)},
        storages={n: Storage(64, PARAMETER, "") for n in range(parameters)}, resident=tuple(range(parameters)),
    )  # fmt: skip


def seconds(trace: Trace, weights: dict[str, float]) -> float:
    found = counts(trace, CALLS)
    return sum(weights[name] * found[name] for name in COUNTS)


def test_weights_of_a_known_host_predict_steps_it_never_saw() -> None:
    rng = random.Random(3)
    seen = [step(rng) for _ in range(40)]
    model = learn([(trace, seconds(trace, TRUE)) for trace in seen], CALLS)
    learned, started = [], []
    for trace in (step(rng) for _ in range(20)):
        found, true = counts(trace, CALLS), seconds(trace, TRUE)
        learned.append(abs(sum(model.weights[name] * found[name] for name in COUNTS) / true - 1))
        started.append(abs(sum(START[name] * found[name] for name in COUNTS) / true - 1))
    assert sum(learned) < 0.4 * sum(started)  # held near its start on purpose, so not exact
    assert model.references == 40


def test_a_slower_host_is_learned_as_slower() -> None:
    rng = random.Random(4)
    seen = [step(rng) for _ in range(20)]
    slow = learn([(trace, 3 * seconds(trace, TRUE)) for trace in seen], CALLS)
    fast = learn([(trace, seconds(trace, TRUE)) for trace in seen], CALLS)
    trace = step(rng)
    ratio = [sum(m.weights[name] * counts(trace, CALLS)[name] for name in COUNTS) for m in (slow, fast)]
    assert ratio[0] / ratio[1] == pytest.approx(3, rel=0.25)


def test_issue_and_around_add_up_to_the_counts() -> None:
    trace = step(random.Random(5))
    model = HostModel(TRUE, CALLS)
    times = trace.schedule["steady_step"][0][1]
    issued = times * sum(model.issues(trace.programs["micro"].ops))
    assert issued + model.around(trace, times) == pytest.approx(seconds(trace, TRUE))


def test_a_compiled_model_is_entered_in_forward_and_in_backward_and_once_more_at_each_break() -> None:
    plain, model = step(random.Random(6)), HostModel(dict(START), CALLS)

    def entering(**about: object) -> float:
        return model.entering(replace(plain, meta={"compiled": about}), "micro")

    assert model.entering(plain, "micro") == entering(blocks=True) == 0.0
    assert entering() == pytest.approx(2 * host.COMPILED["piece"]) and entering(breaks=3) == pytest.approx(8 * host.COMPILED["piece"])
    assert entering(cuda_graphs=True) == 0.0 and entering(cuda_graphs=True, breaks=3) == pytest.approx(6 * host.GRAPH["replay"])
    only = Program("forward", tuple(op for op in plain.programs["micro"].ops if op.phase == "forward"))
    assert model.entering(replace(plain, programs={"forward": only}, meta={"compiled": {}}), "forward") == pytest.approx(host.COMPILED["piece"])


def test_without_references_the_start_is_used() -> None:
    assert learn([], CALLS).references == 0 and learn([], CALLS).weights["forward"] > 0


def test_a_name_in_place_costs_what_the_name_costs_and_unknown_names_the_middle() -> None:
    model = HostModel(TRUE, CALLS)
    assert model.call("add_") == CALLS["add"] and model.call("never_seen") == CALLS[""]


def test_call_seconds_takes_the_quicker_quarter() -> None:
    found = call_seconds([("aten.add.Tensor", s) for s in (4e-6, 5e-6, 6e-6, 50e-6)] + [("aten.mm.default", 9e-6)])
    assert found["add"] == 5e-6 and found["mm"] == 9e-6 and found[""] in (5e-6, 9e-6)


def test_round_trip() -> None:
    model = HostModel(TRUE, CALLS, 7, 0.08)
    assert HostModel.from_dict(model.to_dict()) == model


def test_a_recurrent_op_costs_its_host_every_step_of_every_layer() -> None:
    """Rows of 2 layers: 25 µs a turn on the forward. The longest waited for room in the queue and does not count."""
    sequence, state = TensorSpec((30, 4, 8), "bfloat16"), TensorSpec((2, 4, 8), "bfloat16")
    rows = [
        OpRow("aten._cudnn_rnn.default", (TensorSpec((steps, 4, 8), "bfloat16"),), (sequence, state), (), 1e-3, 0.0, host)
        for steps, host in ((10, 20 * 25e-6), (20, 40 * 25e-6), (15, 30 * 25e-6), (500, 1.0))
    ]
    turns = turn_seconds(rows)
    assert turns == {"_cudnn_rnn": pytest.approx(25e-6)}
    one = Op("aten._cudnn_rnn.default", (Ref(0, sequence),), (Ref(1, sequence), Ref(2, state)), "", "forward", 1)
    model = HostModel(TRUE, CALLS, turns=turns)
    assert model.issue(one) == pytest.approx(60 * 25e-6 + TRUE["forward"] + TRUE["call"] * CALLS[""])


def test_a_layer_of_a_cpu_takes_as_many_turns_as_the_sequence_has_steps() -> None:
    """Its state has no layers: batch and width alone; forward and backward."""
    data, weight, state = (TensorSpec(shape, "float32") for shape in ((16, 256, 32), (128, 32), (256, 32)))
    assert turns_of((data, weight, weight, state, state), (data, state, state)) == 16
    assert turns_of((data, weight, weight, state, state, data, state, state), (data, weight, weight, state, state)) == 16
    stacked = TensorSpec((2, 256, 32), "float32")
    assert turns_of((data, weight, stacked, stacked), (data, stacked, stacked)) == 32
