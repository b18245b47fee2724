"""Quick costs held against `predict_plan`, plan by plan: bytes, seconds, their order, and what fits.

Both take the same path; the quick one sees merged ops, and a short stack (`Depth.SHORT`) or every block (`Depth.WHOLE`, as what
is shown of a plan). Found on these plans: seconds within 3 % (3.6 % where a host is waited for and blocks are computed again),
bytes with every block within -1 and +3.3 %, but for one plan (GAPS). A short stack does not see all that fragments memory: bytes of
one device that adds gradients up come out 10 % high, those of 36 blocks of 12 kinds 14 % low where they are computed again (4.7 GiB
allocated, 7.0 reserved) and 10 % high where they are not; what is chosen is replayed with every block.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foretell import zoo
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan.types import Mesh
from foretell.search.block_costs.sheet import Sheet, sheet_of
from foretell.search.estimate.depth import Depth
from foretell.search.estimate.plan import Layout, Quick, plan_of, quick, recipe_for
from foretell.search.space.price import SheetPricer
from foretell.simulate.plan import Options, PlanCost, predict_plan
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
FULL = {"keep": "none", "recompute": "full", "selective": "selective"}
LAYERS = {"gpt2": 6, "llama3-1b": 4}
LENGTH = {"gpt2": 1024, "llama3-1b": 2048}
PAIR = (2, 4)


def workload(name: str, micro_batch: int) -> Callable[[], Workload]:
    entry = zoo.get(name)
    module = zoo.load(entry)

    def build() -> Workload:
        model = module.build(**{**entry.config, "layers": LAYERS[name]})
        return Workload(model, module.batch(model, micro_batch, LENGTH[name], None), module.loss)

    return build


@functools.cache
def traced(name: str, micro_batch: int, mode: str, precision: str, tp: int) -> Trace:
    recipe = Recipe(precision=precision, recompute=FULL[mode], clip=1.0)
    if tp == 1:
        return capture(workload(name, micro_batch), recipe)
    from foretell.search.traces.split import capture_split

    return capture_split(workload(name, micro_batch), recipe, tp)[0]


@functools.cache
def cluster(hardware: str) -> Cluster:
    return parse(hardware)


@functools.cache
def sheet(name: str, hardware: str) -> Sheet:
    traces: dict[tuple[str, int], tuple[Trace, Trace | None]] = {}
    for precision in ("fsdp-bf16", "bf16-autocast"):
        small, large = (traced(name, size, "keep", precision, 1) for size in PAIR)
        traces[precision, 1] = (small, large)
    return sheet_of(traces, cluster(hardware), OPTIONS)


def layout(mesh: Mesh, micro_batch: int = 4, accumulate: int = 1, mode: str = "keep", **more: Any) -> Layout:
    return Layout(mesh=mesh, micro_batch=micro_batch, accumulate=accumulate, modes=(mode,) * 6, **more)


def trimmed(name: str, asked: Layout) -> Layout:
    return replace(asked, modes=asked.modes[: LAYERS[name]])


@functools.cache
def both(name: str, asked: Layout, hardware: str) -> tuple[Quick, PlanCost]:
    asked = trimmed(name, asked)
    known = sheet(name, hardware)
    wanted = sorted(set(asked.modes) | ({"keep"} if len(set(asked.modes)) > 1 else set()))
    traces = {mode: traced(name, asked.micro_batch, mode, recipe_for(asked), asked.mesh.tp) for mode in wanted}
    exact = predict_plan(traces, plan_of(asked, known, {"model": name}, hardware), cluster(hardware), OPTIONS)
    return quick(asked, known, cluster(hardware)), exact


PLAIN = [
    layout(Mesh()), layout(Mesh(), 2, 3), layout(Mesh(), 4, mode="recompute"), layout(Mesh(), 4, mode="selective"),
]  # fmt: skip
SHARDED = [
    layout(Mesh(dp_shard=8)), layout(Mesh(dp_shard=8), 2, 4), layout(Mesh(dp_shard=8), reshard=False),
    layout(Mesh(dp_shard=8), mode="recompute"), layout(Mesh(dp_shard=8), mode="selective"),
    layout(Mesh(dp_replicate=8)), layout(Mesh(dp_shard=8), reshard=4),
    replace(layout(Mesh(dp_shard=8)), modes=("recompute",) * 2 + ("keep",) * 4),
]  # fmt: skip
TWO_LEVELS = [layout(Mesh(dp_shard=4, dp_replicate=2), 4, 2)]
PIPED = [
    layout(Mesh(pp=2), 4, 8, schedule="1f1b", cuts=(3,)), layout(Mesh(pp=2), 4, 8, schedule="gpipe", cuts=(2,)),
    layout(Mesh(pp=2), 4, 8, schedule="interleaved-1f1b", cuts=(1, 3, 4), interleave=2),
    layout(Mesh(pp=2), 4, 8, schedule="zero-bubble", cuts=(1, 3, 4), interleave=2),
    layout(Mesh(pp=2), 4, 8, schedule="zero-bubble-v", cuts=(1, 3, 4), interleave=2),
    layout(Mesh(pp=2, dp_shard=4), 4, 8, schedule="1f1b", cuts=(4,)),
    layout(Mesh(pp=2, dp_shard=4), 4, 8, "recompute", schedule="1f1b", cuts=(4,)),
    layout(Mesh(pp=2, dp_shard=4), 4, 8, schedule="gpipe", cuts=(3,)),
]  # fmt: skip
GAPS = {("llama3-1b", "zero-bubble-v"): 0.13}
"""Logits of 128k words leave gaps of 4 GiB. There one gradient of 501 MiB lies in such a gap, as it does not op by op: a gap more is
reserved. Bytes too many, with every block."""
SPLIT = [layout(Mesh(tp=2, dp_shard=4)), layout(Mesh(tp=2, dp_shard=4), 4, mode="recompute")]


OTHER = pytest.mark.slow(reason="another model of the same plans")


def told(name: str, asked: Layout, found: Quick, exact: PlanCost) -> str:
    assert exact.time is not None
    seconds, size = exact.time.step_seconds, exact.worst.memory.device_bytes
    return f"{name} {asked}: {found.seconds / seconds - 1:+.3f} of seconds, {found.memory_bytes / size - 1:+.3f} of bytes"


LONGER = pytest.mark.slow(reason="each of its plans costed op by op; sharded plans of one and of two levels are")


@pytest.mark.parametrize(
    ("name", "plans", "slack", "high"),
    [
        pytest.param("gpt2", PLAIN, 0.04, 0.12, id="one-gpt2", marks=LONGER),
        pytest.param("gpt2", SHARDED, 0.03, 0.05, id="sharded-gpt2"),
        pytest.param("gpt2", TWO_LEVELS, 0.03, 0.05, id="two-levels-gpt2"),
        pytest.param("gpt2", PIPED, 0.03, 0.05, id="piped-gpt2", marks=LONGER),
        pytest.param("llama3-1b", PLAIN, 0.03, 0.05, id="one-llama3-1b", marks=OTHER),
        pytest.param("llama3-1b", SHARDED, 0.03, 0.05, id="sharded-llama3-1b", marks=OTHER),
        pytest.param("llama3-1b", TWO_LEVELS, 0.03, 0.05, id="two-levels-llama3-1b", marks=OTHER),
        pytest.param("llama3-1b", PIPED, 0.03, 0.05, id="piped-llama3-1b", marks=OTHER),
    ],
)
def test_seconds_and_bytes_follow_the_exact_cost(name: str, plans: list[Layout], slack: float, high: float) -> None:
    """`high`: how many bytes too many a short stack may say; fewer than there are, at most 2 % of them."""
    if name == "llama3-1b":
        cuts = {(4,): (2,), (3,): (2,), (1, 3, 4): (1, 2, 3), (2,): (1,)}
        plans = [replace(one, cuts=cuts.get(one.cuts, ())) for one in plans]
    misses = []
    for asked in plans:
        hardware = "H100:8" if asked.mesh.world > 1 else "H100"
        found, exact = both(name, asked, hardware)
        assert exact.time is not None
        assert found.seconds == pytest.approx(exact.time.step_seconds, rel=slack), told(name, asked, found, exact)
        size = exact.worst.memory.device_bytes
        gap = GAPS.get((name, str(asked.schedule)), 0.05)
        assert -0.02 * size < found.memory_bytes - size < max(gap, high) * size, told(name, asked, found, exact)
        whole = quick(trimmed(name, asked), sheet(name, hardware), cluster(hardware), held=Depth.WHOLE)
        assert -0.01 * size < whole.memory_bytes - size < gap * size, told(name, asked, whole, exact)
        assert whole.seconds == pytest.approx(exact.time.step_seconds, rel=slack), told(name, asked, whole, exact)
        misses.append([abs(one.seconds / exact.time.step_seconds - 1) for one in (whole, found)])
        assert found.low < found.seconds < found.high and found.joules and len(found.stage_memory) == asked.mesh.pp
    closer, short = (statistics.mean(each) for each in zip(*misses, strict=True))
    assert closer <= short + 0.002, "every block is walked, not two for all"


@pytest.mark.parametrize(("name", "hardware"), [("gpt2", "H100:8"), pytest.param("llama3-1b", "H100:8", marks=OTHER)])
def test_an_optimist_is_no_slower_and_holds_no_more(name: str, hardware: str) -> None:
    """Ranks that share no parameters, by the traces of those that do: what loses so need not be traced."""
    plans = [one for one in PIPED if one.mesh.spread == 1] + [layout(Mesh(tp=2)), layout(Mesh(tp=2), 2, 3), layout(Mesh(tp=2), mode="recompute")]
    pricer = SheetPricer(sheet(name, hardware), cluster(hardware))
    for asked in plans:
        cuts = {3: (1, 2, 3)}.get(len(asked.cuts), (2,) if asked.cuts else ())
        asked = replace(asked, modes=asked.modes[: LAYERS[name]], cuts=cuts)
        light, own = pricer.optimist().quick(asked), pricer.quick(asked)
        assert light.seconds <= own.seconds and light.memory_bytes <= own.memory_bytes, asked


@pytest.mark.slow(reason="traces of two split models; a split block is compared in test_sheet.py")
@pytest.mark.parametrize(
    "asked",
    [SPLIT[0], pytest.param(SPLIT[1], marks=pytest.mark.slow(reason="computed again, as blocks that are not split are above"))],
    ids=["keep", "recompute"],
)
def test_a_split_model_follows_its_own_trace(asked: Layout) -> None:
    """From the whole model's trace, by rule; the exact cost is of a trace of the split model."""
    found, exact = both("llama3-1b", asked, "H200:8")
    assert exact.time is not None
    assert found.seconds == pytest.approx(exact.time.step_seconds, rel=0.03), told("llama3-1b", asked, found, exact)
    size = exact.worst.memory.device_bytes
    assert -0.01 < found.memory_bytes / size - 1 < 0.05, told("llama3-1b", asked, found, exact)


def test_plans_come_in_the_same_order() -> None:
    """Tokens a second: of all pairs of plans, nearly all are ordered as exactly."""
    plans = [one for one in (*SHARDED, *PIPED) if one.mesh.world in (2, 8)]
    rates = []
    for asked in plans:
        found, exact = both("gpt2", asked, "H100:8")
        assert exact.per_second is not None
        rates.append((asked.global_batch / found.seconds, exact.per_second))
    pairs = list(itertools.combinations(rates, 2))
    agree = sum(((a[0] - b[0]) * (a[1] - b[1]) > 0) - ((a[0] - b[0]) * (a[1] - b[1]) < 0) for a, b in pairs)
    assert agree / len(pairs) >= 0.9


def test_what_fits_is_what_the_allocator_gets_through_with() -> None:
    """Around the limit of a small device both say the same."""
    asked, trace, small = layout(Mesh()), traced("gpt2", 4, "keep", "bf16-autocast", 1), cluster("H100")

    def said(size: int) -> tuple[bool, bool]:
        tight = replace(small, device=replace(small.device, memory_bytes=size, memory_nominal_bytes=size))
        known = sheet("gpt2", "H100").on(tight, OPTIONS)
        exact = predict_plan(trace, plan_of(asked, known, {"model": "gpt2"}, "H100"), tight, OPTIONS)
        return quick(asked, known, tight).fits, exact.fits

    answers: list[tuple[bool, bool]] = []
    for size in range(34, 49):  # until both get through, and a roomy one
        answers.append(said(size << 27))
        if all(any(one[which] for one in answers) for which in (0, 1)):
            break
    answers.append(said(49 << 27))
    ours, exactly = (next(place for place, one in enumerate(answers) if one[which]) for which in (0, 1))
    assert answers[0] == (False, False) and answers[-1] == (True, True)
    assert abs((34 + ours) / (34 + exactly) - 1) < 0.06


def test_parts_add_up_and_recomputing_buys_bytes_with_seconds() -> None:
    known, eight = sheet("gpt2", "H100:8"), cluster("H100:8")
    modes = ("keep", "selective", "recompute")
    kept, some, full = (quick(layout(Mesh(dp_shard=8), 4, mode=mode), known, eight) for mode in modes)
    assert kept.seconds < min(some.seconds, full.seconds)
    assert kept.memory_bytes > some.memory_bytes > full.memory_bytes
    assert kept.parts["recompute"] == 0 < some.parts["recompute"] < full.parts["recompute"]
    total = sum(value for part, value in full.parts.items() if part != "recompute")
    assert total == pytest.approx(full.seconds, rel=0.02)


def test_many_micro_batches_take_as_long_as_if_all_were_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.search.estimate import pipeline as quick_pipeline

    for schedule, cuts in (("1f1b", (1,)), ("gpipe", (4,)), ("interleaved-1f1b", (1, 3, 4)), ("zero-bubble", (1, 3, 4))):
        asked = layout(Mesh(pp=2), 4, 64, schedule=schedule, cuts=cuts)
        monkeypatch.setattr(quick_pipeline, "MOST_EVENTS", 10)
        few = quick(asked, sheet("gpt2", "H100:8"), cluster("H100:8"))
        monkeypatch.setattr(quick_pipeline, "MOST_EVENTS", 10**6)
        every = quick(asked, sheet("gpt2", "H100:8"), cluster("H100:8"))
        assert few.seconds == pytest.approx(every.seconds, rel=0.01)
        assert few.stage_seconds == pytest.approx(every.stage_seconds, rel=0.01)


def test_where_every_block_is_there_nothing_is_asked_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 blocks of many kinds that took nine tenths of the search."""
    from foretell.search.estimate import step

    monkeypatch.setattr(step, "periods", lambda *_: pytest.fail("a block more is asked for"))
    asked = layout(Mesh(dp_shard=8), 3)
    assert quick(asked, sheet("gpt2", "H100:8"), cluster("H100:8"), held=Depth.WHOLE).seconds > 0


def test_a_degree_that_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(UserError, match="heads"):
        quick(layout(Mesh(tp=8)), sheet("gpt2", "H100:8"), cluster("H100:8"))


@pytest.mark.slow(reason="another optimizer; the fused one is compared above")
def test_an_update_that_is_not_fused_costs_what_the_exact_one_does() -> None:
    """Its counts of steps are in host memory: neither cost waits for the device."""
    hardware, asked = "H200:8", layout(Mesh(dp_shard=8))
    pair = {size: capture(workload("gpt2", size), Recipe(precision="fsdp-bf16", clip=1.0, optimizer="adamw")) for size in PAIR}
    known = sheet_of({("fsdp-bf16", 1): (pair[2], pair[4])}, cluster(hardware), OPTIONS, optimizer="adamw")
    exact = predict_plan(pair[4], plan_of(asked, known, {"model": "gpt2"}, hardware), cluster(hardware), OPTIONS)
    assert exact.time is not None
    assert quick(asked, known, cluster(hardware)).seconds == pytest.approx(exact.time.step_seconds, rel=0.03)


# ---------------------------------------------------------------------- blocks of many kinds


@functools.cache
def uneven(micro_batch: int, mode: str, precision: str) -> Trace:
    from benchmarks.models import uneven_stack

    def build() -> Workload:
        model = uneven_stack.model(layers=36, dim=2048, heads=16, vocab_size=8192, context=2048)
        return Workload(model, uneven_stack.batch(model, micro_batch, None), None)

    return capture(build, Recipe(precision=precision, recompute=FULL[mode], clip=1.0))


PLANS = pytest.mark.slow(reason="blocks of many kinds in further plans, which blocks of one kind have above")


@pytest.mark.slow(reason="twelve kinds of blocks costed op by op; blocks of one kind are above")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(layout(Mesh(dp_shard=8)), id="keep"),
        pytest.param(layout(Mesh(dp_shard=8), mode="recompute"), id="recompute", marks=PLANS),
        pytest.param(layout(Mesh(dp_shard=8), 2, 4), id="accumulate", marks=PLANS),
        pytest.param(layout(Mesh(pp=2, dp_shard=4), 4, 8, schedule="1f1b", cuts=(17,)), id="pipeline", marks=PLANS),
    ],
)  # fmt: skip
def test_blocks_of_many_kinds_are_walked_two_by_two(asked: Layout) -> None:
    """Twelve kinds of blocks in turn: more than are walked in their order. The gaps that they leave each other in the allocator are
    seen with every block."""
    asked = replace(asked, modes=asked.modes[:1] * 36)
    precision, hardware = recipe_for(asked), "H100:8"
    pair = tuple(uneven(size, "keep", precision) for size in PAIR)
    known = sheet_of({(precision, 1): (pair[0], pair[1])}, cluster(hardware), OPTIONS)
    assert len(set(known.kinds)) == 12
    mode = asked.modes[0]
    plan = plan_of(asked, known, {"model": "uneven"}, hardware)
    exact = predict_plan({mode: uneven(asked.micro_batch, mode, precision)}, plan, cluster(hardware), OPTIONS)
    found = quick(asked, known, cluster(hardware))
    assert exact.time is not None
    assert found.seconds == pytest.approx(exact.time.step_seconds, rel=0.03), told("uneven", asked, found, exact)
    size = exact.worst.memory.device_bytes
    assert -0.14 * size < found.memory_bytes - size < 0.1 * size, told("uneven", asked, found, exact)
    whole = quick(asked, known, cluster(hardware), held=Depth.WHOLE)
    assert -0.01 < whole.memory_bytes / size - 1 < 0.05, told("uneven", asked, whole, exact)
