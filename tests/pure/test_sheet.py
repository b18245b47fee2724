"""What a sheet is made from, held against traces of the same blocks: other micro-batches, residencies, splits, compiled."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from foretell import zoo
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.fsdp.units import COLLECTIVES
from foretell.price.kernels.features import FREE
from foretell.price.kernels.shapes import short
from foretell.price.machine import machine
from foretell.price.time import op_prices
from foretell.search.block_costs.compiled import judged, shortened
from foretell.search.block_costs.ops import AFTER, BEFORE, PieceSource, cut
from foretell.search.block_costs.residency import in_mode
from foretell.search.block_costs.sheet import sheet_of
from foretell.search.block_costs.tensor import split
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Op, Trace
from tests.further import further

FULL = {"keep": "none", "recompute": "full", "selective": "selective"}


def workload(name: str, micro_batch: int, **changes: Any) -> Callable[[], Workload]:
    entry = zoo.get(name)
    module = zoo.load(entry)

    def build() -> Workload:
        model = module.build(**{**entry.config, **changes})
        return Workload(model, module.batch(model, micro_batch, entry.seq, entry.image), module.loss)

    return build


@functools.cache
def traced(name: str, micro_batch: int, mode: str = "keep", precision: str = "fsdp-bf16") -> Trace:
    return capture(workload(name, micro_batch), Recipe(precision=precision, recompute=FULL[mode], clip=1.0))


def shapes(ops: tuple[Op, ...]) -> list[tuple[object, ...]]:
    return [(op.name, op.phase, tuple(r.spec for r in op.inputs), tuple(r.spec for r in op.outputs), op.flops) for op in ops]


ALIKE = pytest.mark.slow(reason="one kind of block after another, as in gpt-tiny")


@pytest.mark.parametrize(
    "name", ["gpt-tiny", *(pytest.param(name, marks=ALIKE) for name in ("t5-tiny", "mixtral-tiny", "llama-tiny", "vit-tiny"))]
)
def test_pieces_of_any_micro_batch_follow_from_two_traces(name: str) -> None:
    source = PieceSource(traced(name, 2), traced(name, 4), (2, 4))
    said, truth = source.at(8), cut(traced(name, 8))
    assert said.kinds == truth.kinds and said.boundary == truth.boundary and said.inputs == truth.inputs
    for key, piece in truth.pieces.items():
        assert shapes(said.pieces[key].forward) == shapes(piece.forward)
        assert shapes(said.pieces[key].backward) == shapes(piece.backward)
    sizes = {number: storage.nbytes for number, storage in truth.storages.items()}
    assert {number: storage.nbytes for number, storage in said.storages.items()} == sizes


def test_alike_blocks_are_one_kind_and_unlike_ones_are_not() -> None:
    assert cut(traced("llama-tiny", 2)).kinds == (0, 0, 0, 0)
    kinds = cut(traced("t5-tiny", 2)).kinds
    assert kinds[0] != kinds[-1] and len(set(kinds)) < len(kinds) + 1  # encoder and decoder


@pytest.mark.parametrize("precision", further(["fsdp-bf16", "bf16-autocast"], ["bf16-autocast"], "shards are compared in test_sharded.py"))
@pytest.mark.parametrize("mode", ["recompute", "selective"])
@pytest.mark.parametrize("name", ["gpt-tiny", pytest.param("llama-tiny", marks=ALIKE)])
def test_a_residency_runs_and_keeps_what_its_trace_does(name: str, mode: str, precision: str) -> None:
    """All but views, of which a checkpoint makes a few more; bytes after forward to the last one."""
    plain, truth = cut(traced(name, 2, "keep", precision)), cut(traced(name, 2, mode, precision))
    said = in_mode(plain.pieces[0], mode, plain.storages)
    real = truth.pieces[0]

    def launched(ops: tuple[Op, ...]) -> list[tuple[str, str]]:
        return [(op.name, op.phase) for op in ops if short(op.name) not in FREE]

    assert Counter(launched(said.forward)) == Counter(launched(real.forward))
    assert Counter(launched((*said.again, *said.backward))) == Counter(launched(real.backward))
    cluster = parse("H100")
    prices = sheet_of({(precision, 1): (traced(name, 2), None)}, cluster).prices
    kept = prices.walk(said.forward, plain.storages)[1] - sum(plain.storages[n].nbytes for n in said.lingering)
    held = prices.walk(real.forward, truth.storages)[1]
    casts = {n for op in real.forward for n in op.allocates if op.name == "aten._to_copy.default"} if said.lingering else set()
    gone = {n for op in real.forward for n in op.frees}
    held -= sum(truth.storages[n].nbytes for n in casts - gone)
    assert kept == held


def split_trace(name: str, ranks: int, micro_batch: int) -> Trace:
    from foretell.search.traces.split import capture_split

    return capture_split(workload(name, micro_batch), Recipe(precision="fsdp-bf16", clip=1.0), ranks)[0]


def test_a_split_block_sends_and_computes_what_its_trace_does() -> None:
    said, truth = split(cut(traced("llama-tiny", 2)), 2), cut(split_trace("llama-tiny", 2, 2))
    for key in (BEFORE, 0, AFTER):
        for half in ("forward", "backward"):
            ours, theirs = getattr(said.pieces[key], half), getattr(truth.pieces[key], half)

            def sent(ops: tuple[Op, ...]) -> Counter[tuple[str, int]]:
                return Counter((op.name, max(op.bytes_read, op.bytes_written)) for op in ops if op.name in COLLECTIVES)

            def products(ops: tuple[Op, ...]) -> Counter[object]:
                heavy = [op for op in ops if short(op.name) in ("mm", "addmm") or "scaled_dot" in op.name]
                return Counter((op.name, tuple(sorted(r.spec.shape for r in op.inputs[:3])), op.outputs[0].spec.shape) for op in heavy)

            assert sent(ours) == sent(theirs), (key, half)
            assert products(ours) == products(theirs), (key, half)
        weights, real = said.weights[key], truth.weights[key]
        assert sorted(spec.numel for spec in weights.all) == sorted(spec.numel for spec in real.all)


@pytest.mark.slow(reason="what a split block sends and computes is compared above")
def test_a_split_block_keeps_what_its_trace_does() -> None:
    said, truth = split(cut(traced("llama-tiny", 2)), 2), cut(split_trace("llama-tiny", 2, 2))
    prices = sheet_of({("fsdp-bf16", 1): (traced("llama-tiny", 2), None)}, parse("H100")).prices
    words = 2 * 128
    for key in (BEFORE, 0, AFTER):
        ours, theirs = (prices.walk(one.pieces[key].forward, one.storages)[1] for one in (said, truth))
        assert ours == pytest.approx(theirs, rel=0.02, abs=12 * words if key == BEFORE else 0)  # masks of foreign words


def test_what_cannot_be_split_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="heads"):
        split(cut(traced("gpt-tiny", 2)), 8)
    with pytest.raises(UserError, match=r"not known to split|hand on"):
        split(cut(traced("mixtral-tiny", 2)), 2)


def test_a_shortened_stack_costs_as_much_less_as_its_blocks() -> None:
    known = machine(parse("H200").device, find_profile("H200-SXM-141GB"))
    assert known is not None

    def seconds(trace: Trace) -> float:
        prices = op_prices(trace, known)
        return sum(prices[id(op)][1] for op in trace.programs["micro_first"].ops)

    whole = traced("llama-tiny", 4)
    two, three, four = (seconds(shortened(whole, keep)) for keep in (2, 3, 4))
    assert four == pytest.approx(seconds(shortened(whole, 9))) and three - two == pytest.approx(four - three)
    faster = judged(whole, known, "model")
    assert 0.1 < faster.block.forward < 1 and 0.1 < faster.block.backward < 1
