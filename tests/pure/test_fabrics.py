"""Which links each axis of a plan uses: nodes, unlike groups, placements, and three levels of sharding."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from foretell.hardware import find, parse
from foretell.hardware.lookup import find_profile
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.price.network.collectives import ALL_GATHER, among, collective, fabric
from foretell.price.speeds import comm_time_over, fabrics_for, fabrics_of
from foretell.simulate.plan import Options, PlanCost, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Op, Ref, TensorSpec, Trace

MIB = 2**20


def plan(mesh: Mesh, **more: object) -> Plan:
    return Plan(model={"model": "gpt2"}, hardware="x", mesh=mesh, **more)  # type: ignore[arg-type]


def gather(nbytes: int, ranks: int) -> Op:
    return Op("foretell.all_gather", (), (Ref(0, TensorSpec((nbytes,), "uint8")),), "blocks.0", "backward", None,
              attrs=("axis:dp_shard", f"ranks:{ranks}"))  # fmt: skip


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=32), Mesh(dp_replicate=4, dp_shard=8), Mesh(pp=2, dp_shard=2, tp=8), Mesh(tp=4, dp_shard=8)], ids=str)
def test_devices_named_one_by_one_give_what_strides_give(mesh: Mesh) -> None:
    cluster = parse("4x8xH100@8xIB400")
    by_stride = fabrics_of(mesh, cluster)
    placed = fabrics_for(plan(mesh, placement=tuple(range(32))), cluster)
    assert placed == by_stride


def test_a_placement_that_scatters_a_group_is_slower() -> None:
    cluster, mesh = parse("2x8xH100@1xIB400"), Mesh(dp_replicate=2, tp=8)
    odd = tuple(range(0, 16, 2)) + tuple(range(1, 16, 2))
    near, far = fabrics_for(plan(mesh), cluster)["tp"], fabrics_for(plan(mesh, placement=odd), cluster)["tp"]
    assert (near.domains, far.domains) == (1, 2)
    assert collective(ALL_GATHER, 64 * MIB, far).seconds > 3 * collective(ALL_GATHER, 64 * MIB, near).seconds


def test_unlike_groups_use_their_own_links_and_what_joins_them() -> None:
    cluster = parse("2x8xH100@8xIB400+2x8xA100@4xRoCE200,join=Eth25")
    inside, across = among(cluster, range(8, 16)), among(cluster, range(0, 16, 8))
    assert inside.intra and inside.domains == 1 and inside.intra.name == "NVLink4"
    assert across.inter and across.inter.name == "IB400" and across.network_bytes_per_second == 50e9
    other = among(cluster, range(16, 32, 8))
    assert other.inter and other.inter.name == "RoCE200" and other.network_bytes_per_second == 12.5e9
    both = among(cluster, (0, 16))
    assert both.inter and both.inter.name == "Eth25" and both.network_bytes_per_second == pytest.approx(25e9 / 8 / 8)
    assert both.intra and both.intra.name == "NVLink3", "the slower of the two"
    # every rank waits for the slowest group of an axis
    assert fabric(cluster, 2, stride=8).inter == other.inter
    found = fabrics_for(plan(Mesh(pp=2, dp_shard=2, tp=8)), cluster)
    assert [found[axis].inter and found[axis].inter.name for axis in ("pp", "dp_shard")] == ["Eth25", "RoCE200"]


def test_a_measured_matrix_counts_only_for_those_it_joins() -> None:
    cluster = parse("2x4xH100@4xIB400")
    rates = [[3e11 if a // 4 == b // 4 else 4e10 for b in range(8)] for a in range(8)]
    rates[6][7] = 1e9
    found = fabrics_for(plan(Mesh(dp_replicate=4, tp=2)), replace(cluster, matrix=tuple(map(tuple, rates))))
    assert found["tp"].measured_intra == 1e9 and found["dp_replicate"].measured_inter == 4e10
    assert found["dp_replicate"].measured_intra == 3e11


def test_three_levels_of_sharding_use_three_kinds_of_links() -> None:
    """Replicas across racks, shards across the nodes of a rack, and parameters gathered again inside a node."""
    cluster = parse("8x8xMI250X@4xSlingshot200")
    three = plan(Mesh(dp_replicate=2, dp_shard=32), reshard=8)
    found = fabrics_for(three, cluster)
    assert (found["dp_replicate"].domains, found["dp_shard"].domains, found["dp_shard:8"].domains) == (2, 4, 1)
    talk = comm_time_over(found)
    first, again = talk(gather(256 * MIB, 32)), talk(gather(256 * MIB, 8))
    assert again < first
    assert first == collective(ALL_GATHER, 256 * MIB, fabric(cluster, 32)).seconds
    assert again == collective(ALL_GATHER, 256 * MIB, fabric(cluster, 8)).seconds
    # placed by hand, the same
    assert fabrics_for(three.with_(placement=tuple(range(64))), cluster) == found


def test_shards_beside_tensor_parallel_ranks_are_gathered_again_among_neighbours() -> None:
    cluster = parse("4x8xH100@8xIB400")
    found = fabrics_for(plan(Mesh(dp_shard=16, tp=2), reshard=4), cluster)
    assert (found["dp_shard"].domains, found["dp_shard:4"].domains, found["dp_shard:4"].local) == (4, 1, 4)


# ---------------------------------------------------------------- unlike devices in the cost of a plan


TRACES: dict[Recipe, Trace] = {}


def traced(source: Source, recipe: Recipe) -> Trace:
    """A step of the one model that is costed below."""
    if recipe not in TRACES:
        TRACES[recipe] = capture(lambda: load(source), recipe, capability=(9, 0))
    return TRACES[recipe]


@functools.cache
def costed(hardware: str, mesh: Mesh, placement: tuple[int, ...] = ()) -> PlanCost:
    pipeline = Pipeline(cuts=("blocks.1",)) if mesh.pp > 1 else None
    asked = Plan(
        model={"model": "gpt-tiny", "overrides": {"layers": 4, "dim": 512, "heads": 8}, "seq": 128}, hardware=hardware,
        mesh=mesh, pipeline=pipeline, micro_batch=4, accumulate=4, placement=placement,
    )  # fmt: skip
    recipe = replace(recipe_of(asked, "keep"), accumulate=1, shards=1)
    return predict_plan(traced(source_of(asked), recipe), asked, parse(hardware), Options(profile_of=find_profile))


def busy(hardware: str, mesh: Mesh, placement: tuple[int, ...] = ()) -> list[float]:
    return [rank.seconds or 0.0 for rank in costed(hardware, mesh, placement).ranks]


def test_every_stage_is_costed_on_its_own_device() -> None:
    mesh, join = Mesh(pp=2), ",join=IB200"
    mixed, swapped = f"1xH100@1xIB200+1xV100@1xIB200{join}", f"1xV100@1xIB200+1xH100@1xIB200{join}"
    quick, slow = busy(f"1xH100@1xIB200+1xH100@1xIB200{join}", mesh), busy(f"1xV100@1xIB200+1xV100@1xIB200{join}", mesh)
    assert busy(mixed, mesh) == [quick[0], slow[1]] and busy(swapped, mesh) == [slow[0], quick[1]]
    assert busy(swapped, mesh, (1, 0)) == busy(mixed, mesh)
    memory = [rank.memory.capacity_bytes for rank in costed(mixed, mesh).ranks]
    assert memory == [find("H100").memory_bytes, find("V100").memory_bytes]


@pytest.mark.slow(reason="devices of several kinds are costed above, and placed in test_search_unlike.py")
def test_data_ranks_wait_for_the_slowest_device() -> None:
    mixed = costed("1xH100@1xIB200+1xA100@1xIB200", Mesh(dp_shard=2))
    slow = costed("1xA100@1xIB200+1xA100@1xIB200", Mesh(dp_shard=2))
    assert mixed.time and slow.time and mixed.time.step_seconds == pytest.approx(slow.time.step_seconds, rel=1e-9)
