"""Bytes and verdicts of deep stacks, every block replayed under the device's limit, held against `predict_plan`.

A short stack, with twins that stand for the blocks left out, does not see the gaps that depth leaves in the allocator: a plan
that it says fits may not. What a search shows is therefore found this way, and must say what the exact cost says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from foretell import zoo
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan.types import Mesh
from foretell.quantities import FITS, NO, TIGHT
from foretell.search.block_costs.sheet import Sheet, sheet_of
from foretell.search.estimate.depth import Depth
from foretell.search.estimate.plan import Layout, Quick, plan_of, quick
from foretell.search.solve.front import point_of
from foretell.search.space.fill import Filled
from foretell.simulate.plan import Options, PlanCost, predict_plan
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
DEEP = {"gpt2": (16, 1024), "llama3-1b": (40, 1024)}
"""Model → blocks, tokens."""
FULL = {"keep": "none", "recompute": "full", "selective": "selective"}
PRECISION = "fsdp-bf16"


def workload(name: str, micro_batch: int) -> Callable[[], Workload]:
    entry, (layers, tokens) = zoo.get(name), DEEP[name]
    module = zoo.load(entry)

    def build() -> Workload:
        model = module.build(**{**entry.config, "layers": layers})
        return Workload(model, module.batch(model, micro_batch, tokens, None), module.loss)

    return build


@functools.cache
def traced(name: str, micro_batch: int, mode: str) -> Trace:
    return capture(workload(name, micro_batch), Recipe(precision=PRECISION, recompute=FULL[mode], clip=1.0))


@functools.cache
def sheet(name: str) -> Sheet:
    return sheet_of({(PRECISION, 1): (traced(name, 2, "keep"), traced(name, 4, "keep"))}, parse("H100:8"), OPTIONS)


def layout(name: str, mesh: Mesh, micro_batch: int, accumulate: int = 1, recomputed: float = 1.0, mode: str = "recompute") -> Layout:
    """With a share of its blocks, the first, computed again."""
    layers = DEEP[name][0]
    count = round(recomputed * layers)
    cuts = tuple(range(layers // mesh.pp, layers, layers // mesh.pp)) if mesh.pp > 1 else ()
    schedule = "1f1b" if mesh.pp > 1 else None
    modes = (mode,) * count + ("keep",) * (layers - count)
    return Layout(mesh=mesh, micro_batch=micro_batch, accumulate=accumulate, modes=modes, cuts=cuts, schedule=schedule)


def both(name: str, asked: Layout, cluster: Cluster) -> tuple[Quick, PlanCost]:
    known = sheet(name).on(cluster, OPTIONS)
    wanted = sorted(set(asked.modes) | ({"keep"} if len(set(asked.modes)) > 1 else set()))
    traces = {mode: traced(name, asked.micro_batch, mode) for mode in wanted}
    exact = predict_plan(traces, plan_of(asked, known, {"model": name}, "H100:8"), cluster, OPTIONS)
    return quick(asked, known, cluster, held=Depth.WHOLE), exact


def verdict(asked: Layout, found: Quick, cluster: Cluster) -> str:
    """What a search says."""
    if not found.fits:
        return NO
    return TIGHT if point_of(Filled(layout=asked, quick=found), cluster, 1).tight else FITS


SHARDED = layout("gpt2", Mesh(dp_shard=8), 4)
MIXED = layout("gpt2", Mesh(dp_shard=8), 4, recomputed=0.3)
REPLICAS = layout("gpt2", Mesh(dp_shard=4, dp_replicate=2), 4, 2, 0.0)
PIPED = layout("gpt2", Mesh(pp=4, dp_shard=2), 4, 8, 0.5)
LARGE = layout("llama3-1b", Mesh(dp_shard=8), 4)
LARGE_PIPED = layout("llama3-1b", Mesh(pp=2, dp_shard=4), 4, 8)
OTHER = pytest.mark.slow(reason="another model of the same plans")
BETWEEN = pytest.mark.slow(reason="all blocks recomputed; a part of them is in the same mesh")
SHALLOW = pytest.mark.slow(reason="every block of a pipeline of six is walked in test_quick")


MANY = pytest.mark.slow(reason="blocks of one plan recomputed in part, each costed op by op; replicas stay")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        pytest.param("gpt2", SHARDED, id="sharded", marks=BETWEEN), pytest.param("gpt2", MIXED, id="mixed", marks=MANY),
        pytest.param("gpt2", REPLICAS, id="replicas"), pytest.param("gpt2", PIPED, id="piped", marks=SHALLOW),
        pytest.param("llama3-1b", LARGE, id="large", marks=OTHER), pytest.param("llama3-1b", LARGE_PIPED, id="large-piped", marks=OTHER),
    ],
)  # fmt: skip
def test_every_block_is_seen(name: str, asked: Layout) -> None:
    found, exact = both(name, asked, parse("H100:8"))
    assert exact.time is not None
    assert found.seconds == pytest.approx(exact.time.step_seconds, rel=0.03)
    assert -0.01 < found.memory_bytes / exact.worst.memory.device_bytes - 1 < 0.05


@pytest.mark.slow(reason="many limits, each costed op by op; around one limit both say the same in test_quick.py")
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        pytest.param("gpt2", MIXED, id="mixed"), pytest.param("gpt2", REPLICAS, id="replicas"),
        pytest.param("llama3-1b", LARGE, id="large"),
    ],
)  # fmt: skip
def test_what_the_exact_cost_refuses_is_refused(name: str, asked: Layout) -> None:
    """From a device that holds hardly what is alive to one on which the allocator never gives its cache back. Where it has to, a
    plan may be refused that would just get through; what fits is said to."""
    roomy = parse("H100:8")
    _, exact = both(name, asked, roomy)
    low, high = exact.worst.memory.allocated_bytes, exact.worst.memory.device_bytes
    said = []
    for part in range(7):
        size = int(low + (high * 1.1 - low) * part / 6) + (2 << 30)
        cluster = replace(roomy, device=replace(roomy.device, memory_bytes=size, memory_nominal_bytes=size))
        found, exact = both(name, asked, cluster)
        said.append((verdict(asked, found, cluster), exact.verdict))
    assert {exactly for _, exactly in said} == {NO, TIGHT, FITS}, said
    order = (FITS, TIGHT, NO)
    assert all(order.index(ours) >= order.index(exactly) for ours, exactly in said), said
    assert all(ours == FITS for ours, exactly in said if exactly == FITS), said
