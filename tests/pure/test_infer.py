"""Inference split over unlike devices: against every split in every order, and against what the model is."""

from __future__ import annotations

import functools
import json
import random
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest

from foretell.cli.plan.infer import infer_command
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.search.inference.split import InferenceSplit, InferenceUnit, Place, split_front
from foretell.search.inference.units import (
    InferPlan,
    _runs,
    infer_plan,
    inference_trace,
    plan_from,
    unit_seconds,
    units_of,
)
from foretell.trace.load.model import Source
from foretell.trace.types import PARAMETER, Trace

EDGE = Path(__file__).resolve().parents[2] / "examples" / "edge.json"
SMALL = Source(model="gpt-tiny", seq=64)

Point = tuple[float, float, float]


def link(source: int, target: int, nbytes: int) -> float:
    return 0.1 * abs(source - target) + nbytes * (1 + source) * 1e-3


def drawn(seed: int, count: int, devices: int) -> tuple[list[InferenceUnit], list[Place]]:
    draw = random.Random(seed)
    units = [
        InferenceUnit(
            name=str(index), seconds=tuple(draw.choice([0.5, 1.0, 3.0]) * draw.uniform(0.9, 1.1) for _ in range(devices)),
            weights=((index, draw.randint(1, 9)), (draw.randint(90, 92), 5)), live_bytes=draw.randint(0, 6),
            sends_bytes=draw.choice([10, 100, 1000]),
        )
        for index in range(count)
    ]  # fmt: skip
    places = [Place(name=str(device), memory_bytes=draw.choice([25, 40, 90]), like=device) for device in range(devices)]
    return units, places


def brute(units: list[InferenceUnit], places: list[Place], given: int) -> set[Point]:
    """Every contiguous split over every order of every set of devices; those that no other beats."""
    points: list[Point] = []
    for used in range(1, len(places) + 1):
        for order in permutations(range(len(places)), used):
            for inner in combinations(range(1, len(units)), used - 1):
                points += measured(units, places, order, (0, *inner, len(units)), given)
    return {p for p in points if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)}


def measured(units: list[InferenceUnit], places: list[Place], order: tuple[int, ...], ends: tuple[int, ...], given: int) -> list[Point]:
    latency = slowest = fullest = 0.0
    last = 0
    for device, (first, end) in zip(order, pairwise(ends), strict=True):
        inside = units[first:end]
        weights = dict(pair for unit in inside for pair in unit.weights)
        size = sum(weights.values()) + max(unit.live_bytes for unit in inside) + places[device].beside_bytes
        if size > places[device].memory_bytes:
            return []
        nbytes = given if first == 0 else units[first - 1].sends_bytes
        message = link(last, device, nbytes) if device != last else 0.0
        seconds = sum(unit.seconds[device] for unit in inside)
        latency += message + seconds
        slowest, fullest = max(slowest, message, seconds), max(fullest, size / places[device].memory_bytes)
        last = device
    return [(latency, slowest, fullest)]


def rounded(points: set[Point]) -> set[Point]:
    return {tuple(float(f"{value:.9g}") for value in point) for point in points}  # type: ignore[misc]


def point(split: InferenceSplit) -> Point:
    return split.latency_seconds, split.slowest_seconds, split.fullest


@pytest.mark.parametrize(("count", "devices"), [(9, 2), (7, 3), (5, 4)])
@pytest.mark.parametrize("seed", range(8))
def test_the_front_equals_every_split_in_every_order(seed: int, count: int, devices: int) -> None:
    units, places = drawn(seed, count, devices)
    found = split_front(units, places, link, input_bytes=50)
    assert rounded({point(split) for split in found}) == rounded(brute(units, places, 50))
    for split in found:
        ends = (0, *(part.last for part in split.parts))
        assert ends[-1] == count and [part.first for part in split.parts] == list(ends[:-1])
        again = measured(units, places, tuple(part.device for part in split.parts), ends, 50)
        assert rounded(set(again)) == rounded({point(split)})


def test_some_of_those_fronts_are_empty_and_some_are_long() -> None:
    sizes = [len(brute(*drawn(seed, 7, 3), 50)) for seed in range(8)]
    assert 0 in [len(split_front(*drawn(seed, 9, 1), link)) for seed in range(8)] and max(sizes) > 4


def test_devices_that_are_alike_give_the_same_front_with_less_work() -> None:
    units, _ = drawn(3, 8, 3)
    same = [unit.__class__(**{**vars(unit), "seconds": (unit.seconds[0], unit.seconds[1], unit.seconds[1])}) for unit in units]
    flat = lambda source, target, nbytes: 0.3 + nbytes * 1e-3  # noqa: E731
    alike = [Place(name="a", memory_bytes=60, like=0), Place(name="b", memory_bytes=60, like=1), Place(name="b", memory_bytes=60, like=1)]
    unlike = [Place(name=place.name, memory_bytes=60, like=index) for index, place in enumerate(alike)]
    assert {point(s) for s in split_front(same, alike, flat)} == {point(s) for s in split_front(same, unlike, flat)}


@pytest.mark.parametrize("seed", range(3))
def test_more_devices_than_are_ordered_freely_and_all_alike(seed: int) -> None:
    """Which of them comes next makes no difference: the front is that of any order."""
    units, _ = drawn(seed, 10, 1)
    same = [unit.__class__(**{**vars(unit), "seconds": unit.seconds * 8}) for unit in units]
    flat = lambda source, target, nbytes: 0.3 + nbytes * 1e-3  # noqa: E731
    places = [Place(name="a", memory_bytes=60, like=index > 0) for index in range(8)]
    apart = [Place(name="a", memory_bytes=60, like=index) for index in range(8)]
    found = {point(s) for s in split_front(same, places, flat)}
    assert found and rounded(found) == rounded({point(s) for s in split_front(same, apart, flat)})


# ---------------------------------------------------------------- from a model


@functools.cache
def traced() -> Trace:
    return inference_trace(SMALL, "bf16", (9, 0))


def test_units_are_the_models_blocks_and_nothing_is_lost() -> None:
    trace = traced()
    runs = _runs(trace)
    blocks = list(trace.meta["blocks"])  # type: ignore[call-overload]
    assert [name for name, _ in runs] == ["before", *blocks, "after"]
    ops = [op for _, run in runs for op in run]
    assert ops == [op for name, times in trace.schedule["evaluation"] for _ in range(times) for op in trace.programs[name].ops]
    units = units_of(trace, runs, [[1.0] * len(runs)])
    held = dict(pair for unit in units for pair in unit.weights)
    parameters = [number for number, storage in trace.storages.items() if storage.role == PARAMETER]
    assert set(parameters) <= held.keys()
    width = 64 * next(ref.spec.shape[-1] for ref in runs[1][1][0].inputs if len(ref.spec.shape) == 3) * 2
    assert all(unit.sends_bytes == width for unit in units[1:-2]), "one bf16 row of activations for each token"


def test_an_edge_file_gives_a_front_with_a_best_of_each_kind() -> None:
    found = infer_plan(SMALL, parse(str(EDGE)), profile_of=find_profile)
    assert isinstance(found, InferPlan) and found.front and found.provenance == "assumed"
    assert found.quickest and found.busiest and found.leanest
    assert found.quickest.latency_seconds == min(split.latency_seconds for split in found.front)
    assert found.busiest.per_second == max(split.per_second for split in found.front)
    for split in found.front:
        total = sum(part.seconds + part.receives_seconds for part in split.parts)
        assert split.latency_seconds == pytest.approx(total)


def test_a_slower_network_keeps_the_model_on_one_device() -> None:
    trace = traced()
    wires = [parse(f"RTX-4090+RTX-4070,join={name}") for name in ("Eth1", "Eth100")]
    slow, quick = (plan_from({"gpu": trace}, wire, find_profile, 1) for wire in wires)
    assert slow.quickest and len(slow.quickest.parts) == 1
    best = [max(split.per_second for split in found.front) for found in (slow, quick)]
    assert best[1] >= best[0]


def test_seconds_of_units_are_those_of_their_ops() -> None:
    from foretell.hardware import find
    from foretell.price.machine import machine
    from foretell.price.speeds import alone
    from foretell.price.time import op_prices

    trace = traced()
    known = machine(find("H200"), find_profile("H200-SXM-141GB"))
    assert known is not None
    runs = [ops for _, ops in _runs(trace)]
    found = unit_seconds(trace, runs, alone(known))
    assert sum(found) >= sum(seconds for _, seconds in op_prices(trace, known).values()) and min(found) > 0


def test_stages_on_one_cpu_share_its_cores_and_talk_over_what_was_asked_for() -> None:
    """Each has its part of the threads, so that a stage takes longer than on a CPU that is all its own, by no more than there are stages;
    two machines share nothing."""
    from foretell.price.speeds import between_processes

    trace = inference_trace(Source(model="gpt-tiny", seq=128, micro_batch=8), "fp32", None)

    def found(on: str, over: str = "tcp") -> InferPlan:
        return plan_from({"cpu": trace}, parse(on), find_profile, 1, over)

    def whole(plan: InferPlan) -> float:
        return min(split.latency_seconds for split in plan.front if len(split.parts) == 1)

    one, two = whole(found("CPU")), whole(found("1x2xCPU"))
    assert 1.2 * one < two <= 2 * one
    assert whole(found("CPU+CPU,join=Eth10")) == pytest.approx(one)
    for over in ("tcp", "gloo"):
        for split in found("1x2xCPU", over).front:
            for part in split.parts[1:]:
                assert part.receives_seconds == between_processes(over, part.receives_bytes)


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert infer_command(SMALL, str(EDGE)) == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    assert "best latency" in text and "RTX-4090: before" in text and "Eth1" not in shown.splitlines()[0]
    assert max(map(len, shown.splitlines())) <= 80, "it is folded to the screen"
    assert infer_command(SMALL, str(EDGE), json=True) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] and data["infer"]["front"][0]["parts"][0]["units"][0] == "before"
    assert {"latency", "throughput", "memory"} <= {word for split in data["infer"]["front"] for word in split["best"]}


def test_what_cannot_be_split_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="'bf15' is not known"):
        infer_command(SMALL, str(EDGE), precision="bf15")
    with pytest.raises(UserError, match="nothing to split"):
        split_front([], [Place(name="a", memory_bytes=1)], link)
    with pytest.raises(UserError, match="at most 64"):
        infer_plan(SMALL, parse("16x8xH100"), profile_of=find_profile)
    assert infer_command(SMALL, "RTX-4090,memory=400MiB") == 1
    assert "No split of gpt-tiny" in capsys.readouterr().out


def test_fit_answers_for_all_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """A copy on each where one holds it; else a split, whose parts hold all weights between them and fit."""
    from foretell import api
    from foretell.cli import main

    one, eight = (api.fit("gpt-tiny", seq=64, hardware=on, infer=True) for on in ("A100", "8xA100"))
    assert one.throughput and eight.throughput and eight.memory == one.memory
    assert eight.throughput.per_second == pytest.approx(8 * one.throughput.per_second)
    assert eight.cost and one.cost and eight.cost.per_hour == pytest.approx(8 * one.cost.per_hour)
    words = ["fit", "gpt2", "--seq", "64", "--infer", "--on", "4xRTX4090,memory=660MiB"]
    assert main([*words[:-1], "RTX4090,memory=660MiB"]) == 1, "one does not hold it"
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "fits" and data["one_device"]["verdict"] == "no"
    for split in data["infer"]["front"]:
        assert all(part["bytes"] <= 660 << 20 for part in split["parts"])
        assert sum(part["bytes"] for part in split["parts"]) >= 2 * data["one_device"]["parameters"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS  gpt2 on 4x RTX-4090: split over ") and len(shown.splitlines()) <= 30
    assert "one device alone: " in " ".join(shown.split())
    assert main([*words[:-1], "2xRTX4090,memory=560MiB"]) == 1
    assert "no split over the 2 devices fits either" in capsys.readouterr().out
