"""Searching with ranks that share positions or experts: quick costs held against `predict_plan`, the best held against
trying everything, and a sample that fits no other way."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.fsdp.units import COLLECTIVES
from foretell.plan import legal
from foretell.plan.facts import Facts, with_hardware
from foretell.plan.recipe import model_of, recipe_of, source_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.price.kernels.features import FREE
from foretell.price.kernels.shapes import short
from foretell.search.block_costs.ops import cut
from foretell.search.block_costs.sheet import Sheet
from foretell.search.estimate.plan import Layout, Quick, plan_of, quick
from foretell.search.solve.find import Finder, SearchResult, find
from foretell.search.space.constraints import SearchConstraints
from foretell.search.traces.needed import ModelFacts, Traces
from foretell.search.traces.shares import Shares, shares_of
from foretell.search.traces.split import capture_split
from foretell.simulate.plan import Options, PlanCost, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.record.capture import capture
from foretell.trace.types import Op, Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
LLAMA = Source(model="llama3-1b", overrides={"layers": 2}, seq=2048)
GPT = Source(model="gpt2", overrides={"layers": 4}, seq=1024)
MIXTRAL = Source(model="mixtral-tiny", overrides={"dim": 1024, "heads": 8, "kv_heads": 4, "ffn": 2048, "context": 2048}, seq=2048)
MADE: dict[Any, Trace | UserError] = {}


class Here(Traces):
    """Traces made in this process, of split models too: the models are the project's own."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        return {mode: self._made(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        self.facts = ModelFacts({"weight": ((2, 2), "float32")}, ())

    def shares(self, plan: Plan) -> Shares:
        return shares_of(lambda: load(source_of(plan)))

    def _at_hand(self, asked: Any) -> bool:
        return True

    def _made(self, plan: Plan, mode: str) -> Trace:
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        mesh, source = plan.mesh, replace(source_of(plan), micro_batch=plan.micro_batch)
        key = (repr(recipe), repr(source), mesh.tp, mesh.cp, mesh.ep)
        if key not in MADE:
            split = mesh.tp * mesh.cp * mesh.ep > 1
            try:
                MADE[key] = (
                    capture_split(lambda: load(source), recipe, mesh.tp, context=mesh.cp, experts=mesh.ep)[0] if split
                    else capture(lambda: load(source), recipe)
                )  # fmt: skip
            except UserError as error:
                MADE[key] = error
        found = MADE[key]
        if isinstance(found, UserError):
            raise found
        return found


def finder(source: Source, hardware: str, **wishes: Any) -> Finder:
    return Finder(source, parse(hardware), hardware, SearchConstraints(**wishes), OPTIONS, Here(capability=(9, 0)), lambda _: None, True)


SHEETS: dict[str, Sheet] = {}


def sheet(source: Source) -> Sheet:
    if repr(source) not in SHEETS:
        mine = finder(source, "H100:8")
        found = SHEETS[repr(source)] = mine.sheet(mine.cluster)
        found.experts = (mine.shares.paths, mine.shares.experts)
    return SHEETS[repr(source)]


def both(source: Source, asked: Layout) -> tuple[Quick, PlanCost]:
    known, cluster = sheet(source), parse("H100:8")
    asked = replace(asked, modes=(asked.modes or ("keep",))[:1] * len(known.blocks))
    plan = plan_of(asked, known, model_of(source, blocks=known.blocks), "H100:8")
    exact = predict_plan(Here(capability=(9, 0)).of(plan, asked.modes[:1]), plan, cluster, OPTIONS)
    return quick(asked, known, cluster), exact


def layout(mesh: Mesh, micro_batch: int = 4, accumulate: int = 1, mode: str = "keep", **more: Any) -> Layout:
    return Layout(mesh=mesh, micro_batch=micro_batch, accumulate=accumulate, modes=(mode,), **more)


CONTEXT = [
    (LLAMA, layout(Mesh(cp=8))), (LLAMA, layout(Mesh(cp=2, dp_shard=4), mode="recompute")),
    (LLAMA, layout(Mesh(cp=2, dp_shard=4), mode="selective")), (LLAMA, layout(Mesh(cp=2, dp_shard=2, dp_replicate=2), 2, 2)),
    (LLAMA, layout(Mesh(pp=2, cp=2, dp_shard=2), 4, 4, schedule="1f1b", cuts=(1,))), (GPT, layout(Mesh(cp=4, dp_shard=2))),
]  # fmt: skip
EXPERTS = [
    layout(Mesh(dp_shard=8, ep=4)), layout(Mesh(dp_shard=4, ep=4), mode="selective"), layout(Mesh(dp_shard=8, ep=2), reshard=False),
    layout(Mesh(dp_shard=4, dp_replicate=2, ep=2), 4, 2), layout(Mesh(dp_shard=8, ep=2), mode="recompute"),
]  # fmt: skip


OTHER = pytest.mark.slow(reason="another model, or a mesh or a way to recompute between those that stay")


@pytest.mark.parametrize(
    ("source", "asked"), [pytest.param(*one, marks=() if number == 4 else OTHER) for number, one in enumerate(CONTEXT)],
    ids=[f"{source.model} {one.mesh}" for source, one in CONTEXT],
)  # fmt: skip
def test_shared_positions_cost_what_a_trace_of_them_does(source: Source, asked: Layout) -> None:
    """From traces of whole samples and of half of them, by rule; the exact cost is of a trace of a rank with its part."""
    found, exact = both(source, asked)
    assert exact.time is not None and found.memory_bytes == pytest.approx(exact.worst.memory.device_bytes, rel=0.04)
    off = found.seconds / exact.time.step_seconds - 1
    assert abs(off) <= 0.05


@pytest.mark.slow(reason="traces of split layers; positions are shared above and layers split in test_sheet.py")
def test_shared_positions_of_split_layers() -> None:
    found, exact = both(LLAMA, layout(Mesh(cp=2, tp=2, dp_shard=2)))
    assert exact.time is not None and found.seconds == pytest.approx(exact.time.step_seconds, rel=0.08)
    assert found.memory_bytes == pytest.approx(exact.worst.memory.device_bytes, rel=0.04)


@pytest.mark.parametrize(
    "asked", [pytest.param(one, marks=() if number in (0, 4) else OTHER) for number, one in enumerate(EXPERTS)],
    ids=[f"{one.mesh} {one.modes[0]}" for one in EXPERTS],
)  # fmt: skip
def test_spread_experts_cost_what_a_trace_of_them_does(asked: Layout) -> None:
    """From the ops of all experts, by rule. Where blocks are computed again the exact bytes are 6 to 7 % too high."""
    found, exact = both(MIXTRAL, asked)
    assert exact.time is not None and found.seconds == pytest.approx(exact.time.step_seconds, rel=0.08)
    size = exact.worst.memory.device_bytes
    assert -0.06 * size < found.memory_bytes - size < 0.06 * size


@pytest.mark.parametrize(
    ("source", "mesh"), [(LLAMA, Mesh(cp=4)), pytest.param(GPT, Mesh(cp=2), marks=OTHER), (MIXTRAL, Mesh(dp_shard=4, ep=4))]
)
def test_a_block_sends_and_computes_what_its_trace_does(source: Source, mesh: Mesh) -> None:
    """Messages and products, one by one."""
    plan = Plan(model=model_of(source), hardware="H100:8", mesh=mesh, micro_batch=2)
    truth = cut(Here(capability=(9, 0)).of(plan, ["keep"])["keep"])
    said = sheet(source).works("fsdp-bf16", 2, cp=mesh.cp, ep=mesh.ep).material

    def told(ops: tuple[Op, ...]) -> Counter[object]:
        heavy = [op for op in ops if op.name in COLLECTIVES or short(op.name) in ("mm", "addmm", "bmm") or "scaled_dot" in op.name]
        shapes = [(op.name, max(r.spec.nbytes for r in (*op.inputs, *op.outputs)), op.flops) for op in heavy]
        return Counter(shapes)

    for half in ("forward", "backward"):
        assert told(getattr(said.pieces[0], half)) == told(getattr(truth.pieces[0], half))
        launched = [sum(short(op.name) not in FREE for op in getattr(one.pieces[0], half)) for one in (said, truth)]
        assert abs(launched[0] - launched[1]) <= 4


# ---------------------------------------------------------------------- against trying everything


def everything(source: Source, hardware: str, found: SearchResult, wishes: SearchConstraints, axis: str) -> Iterator[tuple[float, Plan]]:
    """Every legal plan of all devices without a pipeline or recomputation, costed op by op. Experts go without tp and cp,
    and a model without experts has no ep."""
    cluster = parse(hardware)
    assert found.best is not None
    count, batch = cluster.count, wishes.global_batch or 1
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    layers, experts = ([1], sizes) if axis == "ep" else (sizes, [1])
    traces, refused = Here(capability=(9, 0)), set()
    facts = replace(with_hardware(Facts(blocks=tuple(sheet(source).blocks), seq=source.seq), cluster), global_batch=batch)
    for tp in layers:
        for cp in layers:
            for shard in sizes:
                for ep in experts:
                    if count % (tp * cp * shard) or (batch * tp * cp * shard) % count:
                        continue
                    mesh = Mesh(tp=tp, cp=cp, dp_shard=shard, dp_replicate=count // (tp * cp * shard), ep=ep)
                    for micro in (1, 2, 4, 8):
                        for reshard in (True, False) if mesh.dp_shard * mesh.cp > 1 else (True,):
                            each = batch // mesh.data
                            plan = found.best.plan.with_(
                                mesh=mesh, micro_batch=micro, accumulate=max(1, each // micro), reshard=reshard, blocks={}, predicted={}
                            )
                            if each % micro or (tp, cp, ep) in refused or legal.complaints(plan, facts):
                                continue
                            try:
                                cost = predict_plan(traces.of(plan, ["keep"]), plan, cluster, OPTIONS)
                            except UserError:  # the model cannot be split so
                                refused.add((tp, cp, ep))
                                continue
                            assert cost.time is not None
                            yield (cost.time.step_seconds if cost.fits else float("inf")), plan


def search(source: Source, hardware: str, **wishes: Any) -> tuple[SearchResult, SearchConstraints]:
    asked = SearchConstraints(**wishes)
    return find(source, parse(hardware), hardware, asked, options=OPTIONS, traces=Here(capability=(9, 0)), exact=True), asked


LONG = Source(model="llama-tiny", overrides={"dim": 768, "heads": 6, "kv_heads": 3, "ffn": 2048, "layers": 2}, seq=16384)


WIDE = Source(model="mixtral-tiny", overrides={"dim": 2048, "heads": 8, "kv_heads": 4, "ffn": 8192, "context": 512}, seq=512)


@pytest.mark.parametrize(
    ("source", "hardware", "batch", "axis"),
    [
        pytest.param(LONG, "H100:4", 1, "cp", id="positions", marks=pytest.mark.slow(reason="every plan costed op by op")),
        pytest.param(WIDE, "2x2xH100", 4, "ep", id="experts", marks=pytest.mark.slow(reason="as many; test_space.py finds the best too")),
    ],
)  # fmt: skip
def test_the_best_is_the_best_of_everything(source: Source, hardware: str, batch: int, axis: str) -> None:
    """Long samples that are too few, and experts whose weights are more than their rows."""
    found, asked = search(source, hardware, global_batch=batch, fixed={"pp": 1}, ranks=(4,))
    every = sorted(everything(source, hardware, found, asked, axis), key=lambda one: one[0])
    assert found.best is not None and found.best.cost is not None and found.best.cost.time is not None
    assert len({plan.mesh for _, plan in every}) > 2 and getattr(every[0][1].mesh, axis) > 1
    assert found.best.plan.mesh == every[0][1].mesh
    assert found.best.cost.time.step_seconds == pytest.approx(every[0][0], rel=0.01)


@pytest.mark.slow(reason="longer samples fit where positions are shared in test_context_cost.py, and a search shares them below")
def test_a_sample_that_fits_only_where_its_positions_are_shared() -> None:
    """Three heads that no tensor ranks share, one sample: without cp there is no plan, on one device or on stages."""
    source = Source(model="llama-tiny", overrides={"dim": 384, "heads": 3, "kv_heads": 3, "ffn": 1024, "layers": 2}, seq=65536)
    hardware = "H100:4,memory=2600MiB"
    without, _ = search(source, hardware, global_batch=1, fixed={"cp": 1}, ranks=(1, 2, 4), compile=("none",))
    assert without.best is None and without.short_bytes > 0
    found, _ = search(source, hardware, global_batch=1, ranks=(4,), compile=("none",))
    assert found.best is not None and found.best.plan.mesh.cp > 1
    assert found.best.cost is not None and found.best.cost.fits


# ---------------------------------------------------------------------- what is asked


def test_what_a_model_lets_ranks_share() -> None:
    llama, mixtral = (shares_of(functools.partial(load, Source(model=name, micro_batch=2))) for name in ("llama-tiny", "mixtral-tiny"))
    assert llama.positions == 128 and not llama.experts and "no module" in llama.no_experts
    assert mixtral.experts == 4 and not mixtral.positions and mixtral.no_positions
    assert mixtral.paths == ("blocks.0.moe.experts", "blocks.1.moe.experts") and Shares.from_json(mixtral.to_json()) == mixtral


@pytest.mark.slow(reason="searches of several models; what a model lets ranks share is above")
def test_positions_are_shared_where_that_may_help() -> None:
    """Samples that are long, or too few for the devices; not with short samples that fill them."""
    def degrees(seq: int, batch: int | None, **wishes: Any) -> tuple[int, ...]:
        mine = finder(replace(LONG, seq=seq), "H100:8", global_batch=batch, **wishes)
        return mine.room(mine.cluster, mine.wishes).context

    assert degrees(2048, 64) == (1,) and degrees(2048, 2) == (1, 2, 4)
    assert degrees(16384, 64) == (1, 2, 4) and degrees(2048, 64, fixed={"cp": 4}) == (4,)
    assert degrees(16384, 64, fixed={"cp": 1}) == (1,)


REFUSED = pytest.mark.slow(reason="refused in the same place for another reason")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["llama-tiny", "--cp", "3", "--on", "H100:3"], "--cp 3: 128 positions cannot be shared evenly"),
        pytest.param(["mixtral-tiny", "--cp", "2"], "--cp 2: cp shares the positions of a sample", marks=REFUSED),
        (["llama-tiny", "--ep", "2"], "--ep 2: ep shares experts among ranks"),
        pytest.param(["mixtral-tiny", "--ep", "2", "--tp", "2"], "--ep 2 and --tp 2 do not go together", marks=REFUSED),
    ],
)
def test_what_cannot_be_asked(flags: list[str], told: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traces, "of", Here.of)
    monkeypatch.setattr(Traces, "prepare", Here.prepare)
    monkeypatch.setattr(Traces, "shares", Here.shares)
    monkeypatch.setattr(Traces, "_made", Here._made, raising=False)
    on = [] if "--on" in flags else ["--on", "H100:8"]
    assert main(["plan", *flags, *on, "--out", str(tmp_path / "p.json")]) == 2
    error = capsys.readouterr().err.strip()
    assert told in error and len(error.splitlines()) == 1


def test_a_pipeline_of_experts_is_not_predicted() -> None:
    plan = Plan(model={"model": "mixtral-tiny"}, hardware="H100:4", mesh=Mesh(pp=2, dp_shard=2, ep=2), pipeline=Pipeline(cuts=("blocks.1",)))
    with pytest.raises(UserError, match="ep 2 and pp 2"):
        predict_plan({}, plan, parse("H100:4"))
