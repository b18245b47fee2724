"""What a remedy is said to save, held against a trace in which it was taken."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from foretell.api import predict
from foretell.cost.prediction import Prediction, Remedy
from foretell.hardware import parse
from foretell.trace.capture import capture
from foretell.trace.load import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.types import Trace

H100 = parse("H100")
DEEP = {"layers": 12, "dim": 256, "heads": 4, "context": 512}
"""Activations and logits at the peak."""
WIDE = {"layers": 12, "dim": 768, "heads": 12, "context": 64, "vocab_size": 5000}
"""Little but parameters: the update is the peak."""
CASES = {"many classes": (DEEP, 8, 512), "few classes": ({**DEEP, "vocab_size": 4096}, 8, 512), "wide": (WIDE, 2, 64)}


@functools.cache
def traced(case: str, micro_batch: int, options: tuple[tuple[str, Any], ...]) -> tuple[Trace, Recipe]:
    overrides, _, seq = CASES[case]
    source, recipe = Source(model="gpt2", overrides=overrides, micro_batch=micro_batch, seq=seq), Recipe(**dict(options))
    return capture(lambda: load(source), recipe), recipe


@functools.cache
def answer(case: str, *, micro_batch: int = 0, memory: int = 0, expandable: bool = False, **options: Any) -> Prediction:
    micro_batch = micro_batch or CASES[case][1]
    cluster = replace(H100, device=H100.device.with_memory(memory, "a test")) if memory else H100
    trace, recipe = traced(case, micro_batch, tuple(options.items()))
    return predict(trace, recipe, cluster, {"micro_batch": micro_batch}, expandable_segments=expandable)


def remedy(prediction: Prediction, flag: str) -> Remedy | None:
    return next((found for found in prediction.remedies if found.flag.startswith(flag)), None)


def saved(before: Prediction, after: Prediction) -> int:
    return before.memory.device_bytes - after.memory.device_bytes


DEEP_CASES = [(case, precision) for case in ("many classes", "few classes") for precision in ("bf16-autocast", "fp32")]


@pytest.mark.parametrize(("case", "precision"), DEEP_CASES, ids=str)
def test_recompute_saves_what_was_said(case: str, precision: str) -> None:
    before = answer(case, precision=precision)
    promise = remedy(before, "--recompute full")
    assert promise is not None
    assert promise.saves_bytes == pytest.approx(saved(before, answer(case, precision=precision, recompute="full")), rel=0.15)
    after = answer(case, precision=precision, recompute="full")
    assert remedy(after, "--recompute") is None, "it is not offered twice"


@pytest.mark.parametrize(("case", "precision"), DEEP_CASES, ids=str)
def test_half_the_micro_batch_saves_what_was_said(case: str, precision: str) -> None:
    before = answer(case, precision=precision)
    promise = remedy(before, "--micro-batch")
    assert promise is not None and promise.flag == "--micro-batch 4 --accumulate 2"
    after = answer(case, precision=precision, micro_batch=4, accumulate=2)
    assert promise.saves_bytes == pytest.approx(saved(before, after), rel=0.15)


def test_growing_segments_save_what_was_said() -> None:
    case = "many classes"
    before = answer(case)
    promise = remedy(before, "--expandable-segments")
    assert promise is not None and promise.saves_bytes == saved(before, answer(case, expandable=True))
    assert remedy(answer(case, expandable=True), "--expandable-segments") is None


def test_fused_optimizer_saves_what_was_said_where_the_update_is_the_peak() -> None:
    before, after = answer("wide", optimizer="adamw"), answer("wide", optimizer="adamw-fused")
    promise = remedy(before, "--optimizer")
    assert promise is not None and promise.flag == "--optimizer adamw-fused"
    assert promise.saves_bytes == pytest.approx(saved(before, after), rel=0.15)
    assert remedy(after, "--optimizer") is None


def test_lora_and_bf16_save_about_what_was_said() -> None:
    """Rough by design: adapters and temporaries are left out of the estimate."""
    before = answer("wide")
    for flag, options in (("--lora", {"lora": 16}), ("--precision bf16", {"precision": "bf16"})):
        promise = remedy(before, flag)
        assert promise is not None
        assert promise.saves_bytes == pytest.approx(saved(before, answer("wide", **options)), rel=0.25)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_nothing_is_promised_of_activations_where_the_update_is_the_peak(optimizer: str) -> None:
    """Fewer activations save nothing there, and a remedy that says so must not be shown as more than it is."""
    before = answer("wide", optimizer=optimizer)
    for flag, options in (
        ("--recompute full", {"recompute": "full"}), ("--micro-batch", {"micro_batch": 1, "accumulate": 2}),
    ):  # fmt: skip
        promise = remedy(before, flag)
        real = saved(before, answer("wide", optimizer=optimizer, **options))
        assert (promise.saves_bytes if promise else 0) <= max(0, real) + 0.02 * before.memory.device_bytes


def test_fits_says_what_the_same_device_says_with_the_remedy_taken() -> None:
    """On devices between what is needed now and what is needed with the remedy, away from the edges."""
    before, after = answer("few classes", precision="fp32"), answer("few classes", precision="fp32", recompute="full")
    now, then = before.memory.device_bytes, after.memory.device_bytes
    assert then < 0.8 * now
    for share, expected in ((0.5, True), (-0.5, False)):
        memory = int(then + share * (now - then))
        small = answer("few classes", precision="fp32", memory=memory)
        promise = remedy(small, "--recompute full")
        assert not small.fits and promise is not None
        assert promise.fits == expected
        assert answer("few classes", precision="fp32", recompute="full", memory=memory).fits == expected


@pytest.mark.parametrize(("case", "options"), [("few classes", {}), ("wide", {"optimizer": "adamw"})], ids=str)
def test_remedies_are_worth_it_and_in_order(case: str, options: dict[str, Any]) -> None:
    roomy = answer(case, **options)
    capacity = int(0.9 * roomy.memory.device_bytes)
    small = answer(case, memory=capacity, **options)
    for prediction in (roomy, small):
        found = prediction.remedies
        assert found and len({r.flag for r in found}) == len(found)
        assert all(0.01 * prediction.memory.device_bytes < r.saves_bytes < prediction.memory.device_bytes for r in found)
        assert all(r.change and r.costs for r in found)
        assert [r.fits for r in found] == sorted((r.fits for r in found), reverse=True)
        mild = [r.saves_bytes for r in found if r.fits and not r.flag.startswith(("--lora", "--precision", "--seq"))]
        assert mild == sorted(mild, reverse=True)
    assert all(r.fits for r in roomy.remedies)
    enough = [r for r in small.remedies if small.memory.device_bytes - r.saves_bytes <= 0.9 * capacity]
    assert all(r.fits for r in enough)


def test_nothing_about_training_is_offered_for_inference() -> None:
    offered = {r.flag.split()[0] for r in answer("many classes", mode="infer").remedies}
    assert offered <= {"--micro-batch", "--expandable-segments"}
    halved = remedy(answer("many classes", mode="infer"), "--micro-batch")
    assert halved is not None and halved.flag == "--micro-batch 4"
    real = saved(answer("many classes", mode="infer"), answer("many classes", mode="infer", micro_batch=4))
    assert halved.saves_bytes == pytest.approx(real, rel=0.15)
