"""What cannot be launched on unlike devices, with the reason."""

from __future__ import annotations

import pytest

from foretell.hardware import parse
from foretell.plan import legal
from foretell.plan.facts import Complaint, facts_of
from foretell.plan.types import Mesh, Pipeline, Plan

BLOCKS = {"model": "gpt2", "blocks": ["blocks.0-11"], "seq": 1024}
TWO_ISLANDS = "1x8xH100@8xIB400+1x8xH100@8xRoCE200,join=Eth25"


def found(hardware: str, mesh: Mesh, **more: object) -> list[Complaint]:
    pipeline = Pipeline(schedule="gpipe", cuts=tuple(f"blocks.{n}" for n in range(1, mesh.pp))) if mesh.pp > 1 else None
    plan = Plan(model=BLOCKS, hardware=hardware, mesh=mesh, pipeline=pipeline, **more)  # type: ignore[arg-type]
    return list(legal.complaints(plan, facts_of(plan, parse(hardware))))


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=16), Mesh(pp=2, dp_shard=8), Mesh(dp_replicate=2, tp=8)], ids=str)
def test_no_library_speaks_to_both_vendors(mesh: Mesh) -> None:
    wrong = found("8xH100+8xMI300X", mesh)
    assert [one.field for one in wrong] == ["mesh"]
    assert "8 ranks of NCCL and 8 ranks of RCCL cannot be one group" in wrong[0].problem and "8 ranks" in wrong[0].remedy


def test_one_vendor_of_a_mixed_cluster_may_be_used_alone() -> None:
    assert found("8xH100+8xMI300X", Mesh(dp_shard=8)) == []
    assert found("8xH100+8xA100", Mesh(dp_shard=16)) == []


def test_a_tensor_parallel_group_stays_on_its_fabric() -> None:
    wrong = found(TWO_ISLANDS, Mesh(tp=16), split=None)
    assert [one.field for one in wrong] == ["mesh.tp"]
    assert "ranks 0 to 15" in wrong[0].problem and "only Eth25 joins" in wrong[0].problem
    assert wrong[0].remedy == "tp 8 with dp_replicate 2"
    assert found(TWO_ISLANDS, Mesh(dp_replicate=2, tp=8)) == []
    assert found("2x8xH100@8xIB400", Mesh(tp=16)) == [], "nodes of one fabric: slow, and may be run"
    assert found("1x8xH100@8xIB400+1x8xA100@8xIB200", Mesh(tp=16)) == [], "one fabric joins both"


@pytest.mark.parametrize("mesh", [Mesh(pp=2, tp=8), Mesh(dp_replicate=2, dp_shard=8), Mesh(dp_shard=16)], ids=str)
def test_other_axes_may_cross_a_boundary(mesh: Mesh) -> None:
    assert found(TWO_ISLANDS, mesh) == []


def test_a_placement_may_put_a_group_across_and_is_refused() -> None:
    order = (0, 8, *range(1, 8), *range(9, 16))
    wrong = found(TWO_ISLANDS, Mesh(dp_replicate=8, tp=2), placement=order)
    assert [one.field for one in wrong] == ["mesh.tp"] and "ranks 0 to 1" in wrong[0].problem


def test_formats_are_those_that_every_device_has() -> None:
    assert found("1xV100+1xH100", Mesh(dp_shard=2))[0].problem == "the device does not compute in bfloat16"
    assert found("1xA100+1xH100", Mesh(dp_shard=2)) == []


def test_groups_that_nothing_joins() -> None:
    from dataclasses import replace

    cluster = replace(parse("8xH100+8xA100"), inter=None)
    plan = Plan(model=BLOCKS, hardware="x", mesh=Mesh(dp_shard=16))
    (wrong,) = legal.complaints(plan, facts_of(plan, cluster))
    assert wrong.field == "mesh.dp_shard" and "nothing joins" in wrong.problem
