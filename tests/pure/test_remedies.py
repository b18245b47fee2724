"""Ways to make a step fit: every one that is told was predicted, and gets the verdict it was told with when it is asked for."""

from __future__ import annotations

import functools
import json
import random
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.api import step
from foretell.cli import main
from foretell.errors import ModelError, UserError
from foretell.hardware import overhead, parse
from foretell.hardware.larger import larger
from foretell.quantities import FITS, NO, TIGHT, Memory, Prediction, Remedy
from foretell.report import command
from foretell.report.terminal import screen
from foretell.search.advice import fit as advice
from foretell.search.advice import ways as advice_ways
from foretell.search.advice.ways import FitRequest
from foretell.search.traces import child
from foretell.simulate.memory.memory import predict_memory
from foretell.simulate.memory.remedies import Outlook, outlook
from foretell.simulate.parts import TORCH
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.sandbox import child as single
from foretell.trace.store import traces as stored
from foretell.trace.types import Trace
from foretell.units import GIB, MIB

H100 = parse("H100")
DEEP = {"layers": 4, "dim": 256, "heads": 4, "context": 512}
"""Activations and logits at the peak."""
WIDE = {"layers": 4, "dim": 768, "heads": 12, "context": 64, "vocab_size": 5000}
"""Little but parameters: the update is the peak."""
CASES = {"many classes": (DEEP, 8, 512), "few classes": ({**DEEP, "vocab_size": 4096}, 8, 512), "wide": (WIDE, 2, 64)}


# ---------------------------------------------------------------- guesses


@functools.cache
def traced(case: str, micro_batch: int, options: tuple[tuple[str, Any], ...]) -> Trace:
    overrides, _, seq = CASES[case]
    source = Source(model="gpt2", overrides=overrides, micro_batch=micro_batch, seq=seq)
    return capture(lambda: load(source), Recipe(**dict(options)))


def needed(case: str, *, micro_batch: int = 0, expandable: bool = False, **options: Any) -> tuple[int, Outlook]:
    """Device bytes on a device that is large enough, and the guess for other options."""
    trace, extra = traced(case, micro_batch or CASES[case][1], tuple(options.items())), overhead(H100.device, TORCH)
    memory = predict_memory(trace, H100, extra, expandable=expandable).memory
    return memory.device_bytes, outlook(trace, memory, H100, extra, expandable=expandable)


AGAIN = pytest.mark.slow(reason="the same change of another model; each change is there once")


@pytest.mark.parametrize(
    ("case", "options", "change"),
    [
        pytest.param("many classes", {}, {"recompute": "full"}, marks=AGAIN),
        pytest.param("few classes", {"precision": "fp32"}, {"recompute": "full"}, marks=AGAIN),
        ("few classes", {}, {"recompute": "selective"}), ("many classes", {}, {"micro_batch": 4, "accumulate": 2}),
        ("many classes", {}, {"loss_chunks": 8}),
        ("many classes", {}, {"expandable_segments": True}), ("wide", {"optimizer": "adamw"}, {"optimizer": "adamw-fused"}),
        ("wide", {}, {"precision": "bf16"}), ("wide", {}, {"lora": 16}), ("wide", {"lora": 16}, {"nf4": True}),
        ("wide", {}, {"recompute": "full"}), pytest.param("few classes", {}, {"recompute": "full", "precision": "bf16"}, marks=AGAIN),
    ],
    ids=str,
)  # fmt: skip
def test_a_guess_is_near_what_is_then_predicted(case: str, options: dict[str, Any], change: dict[str, Any]) -> None:
    """Near enough to leave out what is not worth predicting: no more is asked of it."""
    _, guess = needed(case, **options)
    renamed = {"expandable" if name == "expandable_segments" else name: value for name, value in change.items()}
    real, _ = needed(case, **{**options, **renamed})
    guessed = guess.after(change, micro_batch=CASES[case][1], precision=options.get("precision", "bf16-autocast"))
    assert guessed == pytest.approx(real, rel=0.12)
    assert Outlook.from_json(json.loads(json.dumps(guess.to_json()))) == guess


# ---------------------------------------------------------------- which ways there are


def looks(**changes: Any) -> Outlook:
    values = dict.fromkeys(Outlook.__dataclass_fields__, 0) | {"allocated": 10 * GIB, "reserved": 10 * GIB, "single": True, "batch_norm": False}
    return Outlook(**{**values, "loose": MIB, **changes})


def asked(on: str = "H100", *, micro_batch: int = 1, resizable: bool = True, **recipe: Any) -> FitRequest:
    return FitRequest(recipe=Recipe(**recipe), cluster=parse(on), on=on, micro_batch=micro_batch, resizable=resizable)


def flags(ways: list[advice_ways.OptionChange]) -> list[str]:
    return [way.flag for way in ways]


def test_single_ways_come_before_several_and_the_last_is_the_strongest() -> None:
    found = advice_ways.same_maths(asked(micro_batch=12, optimizer="adamw"), looks())
    assert flags(found)[:7] == [
        "--optimizer adamw-fused", "--expandable-segments", "--micro-batch 6 --accumulate 2", "--micro-batch 3 --accumulate 4",
        "--micro-batch 1 --accumulate 12", "--recompute selective", "--recompute full",
    ]  # fmt: skip
    assert flags(found)[-1] == "--micro-batch 1 --accumulate 12 --recompute full --optimizer adamw-fused --expandable-segments"
    assert len(set(flags(found))) == len(found) and all(way.same_maths and way.costs for way in found)
    for way in found:
        size, steps = way.options.get("micro_batch", 12), way.options.get("accumulate", 1)
        assert size * steps == 12, "the batch of a step is kept"


def test_a_loss_in_chunks_is_offered_where_logits_are_large_and_may_be_cut() -> None:
    large = looks(logits=16 * GIB, rows=8192)
    assert flags(advice_ways.same_maths(asked(), large))[0] == "--loss-chunks 8"
    assert any("--recompute full --loss-chunks 8" in flag for flag in flags(advice_ways.same_maths(asked(), large)))
    for given, seen in (
        (asked(), looks(logits=GIB, rows=8192)), (asked(), looks(logits=20 * GIB, rows=300)), (asked(loss_chunks=4), large),
        (asked(compile="model"), large), (asked(precision="fp16-autocast"), large), (asked(mode="infer"), large),
    ):  # fmt: skip
        assert not any("loss-chunks" in flag for flag in flags(advice_ways.same_maths(given, seen)))


def test_what_changes_the_mathematics_is_marked_and_only_offered_where_it_can_be_done() -> None:
    lora = asked(lora=16)
    found = advice_ways.numerics(lora, looks())
    assert flags(found)[:2] == ["--precision bf16", "--nf4"] and not any(way.same_maths for way in found)
    assert flags(found).index("--recompute full --precision bf16") < flags(found).index("--precision bf16 --nf4")
    assert advice_ways.adapters(lora, looks()) == [] and flags(advice_ways.adapters(asked(), looks()))[0] == "--lora 16"
    assert not any("nf4" in flag for flag in flags(advice_ways.numerics(asked(), looks())))
    assert not any("bf16" in flag for flag in flags(advice_ways.numerics(asked("V100"), looks()))), "it has no bfloat16"
    normed = asked(micro_batch=4)
    assert not any("micro-batch" in flag for flag in flags(advice_ways.same_maths(normed, looks(batch_norm=True))))
    assert flags(advice_ways.numerics(normed, looks(batch_norm=True)))[0] == "--micro-batch 2 --accumulate 2"


def test_inference_and_given_batches_are_left_alone() -> None:
    infer = asked(mode="infer", micro_batch=4)
    assert flags(advice_ways.same_maths(infer, looks()))[:3] == ["--expandable-segments", "--micro-batch 2", "--micro-batch 1"]
    assert advice_ways.adapters(infer, looks()) == []
    assert not any("micro-batch" in flag for flag in flags(advice_ways.same_maths(asked(micro_batch=4, resizable=False), looks())))


@pytest.mark.parametrize(
    ("text", "times", "wide"),
    [
        ("H100", 2, "H100:2"), ("H100:8", 2, "H100:16"), ("8xH100", 2, "16xH100"), ("2x8xH100", 2, "4x8xH100"),
        ("RTX4090,memory=3GiB", 4, "RTX4090:4,memory=3GiB"), ("2x8xH100@IB400", 2, "4x8xH100@IB400"),
        ("2xH100+2xA100", 2, None), ("cluster.toml", 2, None),
    ],
)  # fmt: skip
def test_more_devices_are_written_as_they_were(text: str, times: int, wide: str | None, tmp_path: Path) -> None:
    assert larger(text, times) == wide
    if wide is not None:
        before, after = parse(text), parse(wide)
        assert after.count == times * before.count and after.device.memory_bytes == before.device.memory_bytes


def test_more_devices_share_the_batch_where_it_can_be_shared() -> None:
    kept = advice_ways.spread(asked(micro_batch=4, accumulate=2), "H100:2", 2, looks())[0]
    assert kept.flag == "--on H100:2 --accumulate 1" and kept.same_maths
    halved = advice_ways.spread(asked(micro_batch=4), "H100:2", 2, looks())[0]
    assert halved.flag == "--on H100:2 --micro-batch 2" and halved.same_maths
    grown = advice_ways.spread(asked(), "H100:2", 2, looks())[0]
    assert grown.flag == "--on H100:2" and not grown.same_maths and "samples" in grown.costs


# ---------------------------------------------------------------- which of them are predicted


def answer(verdict: str, gib: float, capacity: float = 10.0, count: int = 1, **model: Any) -> Prediction:
    memory = Memory(
        allocated_bytes=int(gib * GIB), reserved_bytes=int(gib * GIB), device_bytes=int(gib * GIB), host_bytes=0, holders=(), phases=(),
        capacity_bytes=int(capacity * GIB), margin_bytes=int((capacity - gib) * GIB), bands={}, categories={}, provenance={},
    )  # fmt: skip
    return Prediction(
        verdict=verdict, model=model, hardware={"nodes": 1, "devices_per_node": count}, parameters=1, memory=memory
    )


def advised(
    fitting: Mapping[str, float], looked: Outlook, given: FitRequest, *, verdict: str = NO, seconds: float = 60.0
) -> tuple[Prediction, list[str]]:
    """What is told where each way needs so many GiB of 10; a way that is not named cannot be done to the model."""
    seen: list[str] = []

    def attempt(options: Mapping[str, Any]) -> Prediction:
        flag = advice_ways.OptionChange(options=options, change="", costs="").flag
        seen.append(flag)
        if flag not in fitting:
            raise ModelError("it cannot be done", "")
        gib = fitting[flag]
        count = parse(options["hardware"]).count if "hardware" in options else 1
        return answer(FITS if gib <= 9.5 else TIGHT if gib <= 10 else NO, gib, count=count)

    found, _ = advice.advise(
        answer(verdict, 20.0 if verdict == NO else 9.9, outlook=looked.to_json()), given, attempt, seconds=seconds
    )
    return found, seen


STATES = looks(
    parameters=8 * GIB, gradients=4 * GIB, alive=0, optimizer=4 * GIB, moving=4 * GIB, full=3 * GIB, update=16 * GIB, loose=0,
    linear=8 * GIB, allocated=20 * GIB, reserved=20 * GIB,
)  # fmt: skip


def test_more_devices_come_last_and_are_the_fewest_that_were_predicted_to_fit() -> None:
    needs = {"--on H100:2": 14.0, "--on H100:2 --recompute full": 12.0, "--on H100:4": 9.9, "--on H100:4 --recompute full": 8.0}
    found, seen = advised({**needs, "--precision bf16": 11.0, "--recompute full --precision bf16": 9.0}, STATES, asked())
    good = [one for one in found.remedies if one.fits]
    assert [one.flag for one in good] == ["--recompute full --precision bf16", "--on H100:4"]
    assert [one.devices for one in good] == [1, 4] and good[1].verdict == TIGHT and not good[0].same_maths
    assert "--on H100:2 --recompute full" in seen, "fewer devices were tried before more are named"
    assert found.ways_tried == len(found.remedies) and found.advice == ""


def test_nothing_is_told_that_was_not_predicted_and_what_fails_is_told_as_it_is() -> None:
    found, seen = advised({}, STATES, asked())
    assert found.remedies == () and found.ways_tried == 0 and "nothing tried here fits: 0 ways tried" in found.advice and seen
    tried = ["--precision bf16", "--recompute full --precision bf16", "--on H100:2 --recompute full", "--on H100:4 --recompute full"]
    short, _ = advised(dict.fromkeys(tried, 12.0), STATES, asked())
    assert short.ways_tried > 2 and not any(one.fits for one in short.remedies)
    assert short.advice == f"nothing tried here fits: {short.ways_tried} ways tried"
    assert command.best(short) is None and "--json" in command.suggest(short, ["fit", "m", "--on", "H100"])


def test_what_weights_and_states_alone_do_not_leave_room_for_is_not_predicted() -> None:
    weights = replace(STATES, parameters=400 * GIB, optimizer=800 * GIB)
    found, seen = advised({}, weights, asked())
    assert not any("--on" not in flag for flag in seen), "on this device nothing can fit"
    assert "0 ways tried; weights and optimizer states alone need 1,200.0 GiB on this device" in found.advice


def test_the_same_mathematics_on_the_same_device_ends_it_and_time_ends_the_rest() -> None:
    light = replace(STATES, parameters=GIB, gradients=GIB, optimizer=GIB, moving=17 * GIB, full=16 * GIB, update=3 * GIB)
    found, seen = advised({"--recompute full": 4.0}, light, asked())
    assert seen[-1] == "--recompute full" and [one.flag for one in found.remedies] == ["--recompute full"]
    late, seen = advised({"--recompute full --precision bf16": 11.0, "--precision bf16": 11.0}, STATES, asked(), seconds=1e-9)
    assert late.ways_tried == 1 and "run it again" in late.advice
    none, seen = advised({}, STATES, asked(), seconds=0.0)
    assert not seen and none.remedies == ()


def test_a_tight_step_is_only_sent_to_what_leaves_more_room() -> None:
    light = replace(STATES, parameters=GIB, gradients=GIB, optimizer=GIB, moving=7 * GIB, full=2 * GIB, update=3 * GIB,
                    allocated=10 * GIB, reserved=10 * GIB)  # fmt: skip
    still = {"--recompute selective": 9.8, "--recompute full": 9.7, "--on H100:2": 9.8, "--on H100:2 --recompute full": 9.6}
    found, _ = advised(still, light, asked(), verdict=TIGHT)
    assert found.remedies and command.best(found) is None and "leaves more room" in found.advice
    better, _ = advised({**still, "--recompute full": 8.0}, light, asked(), verdict=TIGHT)
    assert (best := command.best(better)) is not None and best.flag == "--recompute full"


# ---------------------------------------------------------------- printed commands, run


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, shelf: Path) -> None:
    """What the tracing process does, in this one: torch is imported once."""

    def told_here(reply: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if "error" in reply:
            raise single.as_error(reply["error"])
        return reply.pop("text"), reply

    def one_here(asked: Mapping[str, Any], **_: Any) -> tuple[str, dict[str, Any]]:
        return told_here(single.answered(lambda: single.trace_asked(asked)))

    monkeypatch.setattr(stored, "trace_in_child", one_here)
    monkeypatch.setattr(child, "trace_all", lambda requests, *_, **__: [told_here(child.answer(asked)) for asked in requests])
    monkeypatch.setattr(step, "ADVICE_SECONDS", 600.0)
    monkeypatch.setenv("FORETELL_CACHE", str(shelf))
    monkeypatch.setenv("COLUMNS", "100")


MODELS: dict[str, tuple[list[str], list[str]]] = {
    "gpt2": (["--set", "layers=3", "--seq", "256"], []),
    "llama3-1b": (["--set", "layers=2", "--seq", "256"], ["--lora", "8"]),
    "vit-b16": (["--set", "depth=3"], []),
    "resnet-tiny": (["--image", "64"], []),
}
"""Zoo models, what keeps them small, and options that suit them."""
GROUND = (0.85, 0.6, 0.98, 0.35)
"""Shares of what a step needs that the device has, context aside."""


def drawn(count: int) -> list[list[str]]:
    """Commands over models, devices, batches, LoRA, optimizers and inference."""
    choose = random.Random(17)
    found = []
    for number in range(count):
        model = [*MODELS][number % len(MODELS)]
        small, more = MODELS[model]
        words = ["fit", model, *small, "--micro-batch", str(choose.choice([1, 4, 6])), *choose.choice([[], more])]
        words += choose.choice([[], ["--optimizer", "sgd"], ["--optimizer", "adamw"], ["--precision", "fp32"], ["--infer"]])
        found.append([*words, "--on", choose.choice(["RTX4090", "A100", "T4", "H100:2"])])
    return found


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def on_less(words: list[str], share: float, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The same on a device with less than it needs."""
    _, roomy = told(words, capsys)
    memory = roomy["memory"]
    beside = memory["device_bytes"] - memory["reserved_bytes"]
    return [*words[:-1], f"{words[-1]},memory={int(beside + share * memory['reserved_bytes']) // MIB}MiB"]


FURTHER = pytest.mark.slow(reason="another model and device")
DRAWN = [
    pytest.param(number, words, id=f"{words[1]} on {words[-1]}", marks=() if number == 1 else FURTHER)
    for number, words in enumerate(drawn(12))
]


@pytest.mark.parametrize(("number", "words"), DRAWN)
def test_every_printed_command_gets_the_verdict_it_was_printed_with(
    number: int, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = on_less(words, GROUND[number % len(GROUND)], capsys)
    status, found = told(small, capsys)
    assert found["verdict"] in (NO, TIGHT)
    if "one_device" in found:  # inference over several devices is answered by how they share the model: nothing is tried
        return
    assert found["ways_tried"] == len(found["remedies"])
    assert status == (0 if found["fits"] else 1)
    main(small)
    shown = capsys.readouterr().out
    again = [one for one in found["remedies"] if one["flag"]]
    for one in again:
        status, then = told(command.with_flag(small, one["flag"]), capsys)
        assert (then["verdict"], then["memory"]["device_bytes"]) == (one["verdict"], one["device_bytes"]), one["flag"]
        assert status == (0 if one["fits"] else 1) and one["fits"] == (one["verdict"] in (FITS, TIGHT))
        assert one["devices"] == then["hardware"]["count"] and one["margin_bytes"] == then["memory"]["margin_bytes"]
    rows = [line[11:] for line in shown.splitlines()]
    label = [line[:11].strip() for line in shown.splitlines()]
    if "try" not in label:
        assert found["advice"].split(";")[0].split(",")[0] in " ".join(" ".join(rows).split())
        return
    printed = rows[label.index("try") :]
    text = "\n".join(printed).partition("\npredicted: ")
    typed = shlex.split(text[0].replace("\\\n", ""))
    assert typed[0] == "foretell" and text[2]
    if typed[1] == "plan":
        return  # run by a test of its own
    status, then = told(typed[1:], capsys)
    assert status == 0 and then["verdict"] == text[2].split(",")[0]


@pytest.mark.slow(reason="a wide model; a question with LoRA is among those of test_advice_kept")
def test_lora_on_one_card_stays_on_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of the 8B model with as much less of a 4090; all of it is a slow case."""
    words = ["fit", "llama3-8b", "--set", "layers=2", "--lora", "16", "--seq", "1024", "--on", "RTX4090,memory=7500MiB"]
    _, found = told(words, capsys)
    assert found["verdict"] == NO
    first = found["remedies"][0]
    assert first["fits"] and first["devices"] == 1 and first["flag"] in ("--nf4", "--precision bf16", "--recompute full --precision bf16")


@pytest.mark.slow(reason="traces a model of 8B parameters several times")
def test_lora_of_eight_billion_parameters_fits_on_one_4090(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "llama3-8b", "--lora", "16", "--seq", "2048", "--on", "RTX-4090"]
    _, found = told(words, capsys)
    first = found["remedies"][0]
    assert found["verdict"] == NO and first["fits"] and first["devices"] == 1 and "--on" not in first["flag"]
    assert told(command.with_flag(words, first["flag"]), capsys)[0] == 0


def test_an_answer_that_fits_tries_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked_for = []
    real = step._traced
    monkeypatch.setattr(step, "_traced", lambda request, *rest: asked_for.append(request) or real(request, *rest))
    status, found = told(["fit", "gpt2", "--set", "layers=3", "--seq", "256", "--on", "H200"], capsys)
    assert status == 0 and found["verdict"] == FITS and found["remedies"] == [] and len(asked_for) == 1


def test_a_way_that_breaks_the_model_is_no_failure_of_the_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = step._traced

    def broken(request: dict[str, Any], *rest: Any) -> Any:
        if request["recipe"]["recompute"] != "none":
            raise UserError("the model cannot be recomputed", "")
        return real(request, *rest)

    monkeypatch.setattr(step, "_traced", broken)
    words = ["fit", "gpt2", "--set", "layers=2", "--seq", "128", "--infer", "--micro-batch", "2", "--on", "A100"]
    status, found = told(on_less([*words[:-4], "--micro-batch", "2", "--on", "A100"], 0.5, capsys), capsys)
    assert status == 1 and found["verdict"] == NO and not any("recompute" in one["flag"] for one in found["remedies"])


# ---------------------------------------------------------------- a plan that moves states


@pytest.mark.slow(reason="searches plans for each suggestion")
def test_the_plan_that_is_offered_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little but weights and states: on the device alone nothing helps that leaves the mathematics as it is."""
    monkeypatch.chdir(tmp_path)
    sizes = [word for size in ("layers=12", "dim=512", "heads=8", "vocab_size=512") for word in ("--set", size)]
    status, found = told(["fit", "gpt2", *sizes, "--seq", "64", "--on", "H200,memory=1300MiB"], capsys)
    plans = [one for one in found["remedies"] if one["command"]]
    assert status == 1 and len(plans) == 1 and plans[0]["fits"] and plans[0]["flag"] == "" and plans[0]["same_maths"]
    assert found["remedies"][0] == plans[0], "the same mathematics comes first"
    typed = shlex.split(plans[0]["command"])
    assert typed[:3] == ["foretell", "plan", "gpt2"] and "--host" in typed
    assert main([*typed[1:], "--quick"]) == 0
    assert "host memory" in capsys.readouterr().out


# ---------------------------------------------------------------- the screen


def test_the_screen_shows_each_verdict_and_says_where_nothing_fits() -> None:
    short = Remedy(change="recompute", flag="--recompute full", saves_bytes=GIB, fits=False, verdict=NO, device_bytes=13 * GIB, margin_bytes=-3 * GIB)
    tight = replace(short, flag="--nf4", fits=True, verdict=TIGHT, margin_bytes=GIB // 4, device_bytes=10 * GIB - GIB // 4, same_maths=False)
    base = replace(answer(NO, 14.0), assumptions=(), remedies=(tight, short), ways_tried=2)
    text = screen.render(base, 100, typed=["fit", "m", "--on", "H100"]).plain
    assert "reduce     tight           −1.00 GiB  --nf4" in text and "3.00 GiB short" in text
    assert "try        foretell fit m --on H100 --nf4\n           predicted: tight, 9.75 of 10.0 GiB; not the same maths" in text
    none = replace(base, remedies=(short,), ways_tried=1, advice="nothing tried here fits: 1 way tried")
    text = screen.render(none, 100, typed=["fit", "m", "--on", "H100"]).plain
    assert "nothing tried here fits: 1 way tried" in text and "\ntry" not in text
