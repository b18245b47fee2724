"""What ranks hold whose states are in host memory: every byte, against one rank that really does it in this process."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.lower.offload import states as offload
from foretell.lower.steps import repeated
from foretell.plan.types import MASTER, Mesh
from foretell.simulate.plan import sharded
from tests.pure import dry
from tests.pure.test_plan_cost import SCALARS, messages, peaks, plan, traced, workload

ALL = {"blocks.*": "host", "rest": "host"}
LAST = {"blocks.1": "host"}
SMALL = {"vocab_size": 96, "dim": 32, "layers": 3}  # bf16 products are slow where a CPU has none


MESHES: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(dp_shard=2), {"states": ALL}),
    (Mesh(dp_shard=4), {"states": LAST, "accumulate": 3}),
    (Mesh(dp_replicate=2, dp_shard=2), {"states": ALL, "accumulate": 2}),
    (Mesh(dp_replicate=2), {"states": ALL}),
    (Mesh(dp_shard=2), {"states": ALL, "clip": None, "reshard": False}),
    (Mesh(dp_shard=2), {"states": ALL, "cpu_share": 0.5}),
]
PRECISIONS = ("fp32", "bf16-mixed", MASTER)
CROSSED = pytest.mark.slow(reason="the mesh in one precision, and the precision on two meshes, are not")


@pytest.mark.parametrize(
    ("mesh", "more", "precision"),
    [
        pytest.param(mesh, more, precision, marks=() if PRECISIONS[number % 3] == precision else CROSSED)
        for number, (mesh, more) in enumerate(MESHES)
        for precision in PRECISIONS
    ],
)
def test_every_byte_of_a_rank(mesh: Mesh, more: dict[str, Any], precision: str) -> None:
    asked = plan(mesh=mesh, precision=precision, **more)
    build = workload("gpt-tiny", **SMALL)
    seen = dry.run(build, asked)
    local = sharded(repeated(traced(build, asked), asked.accumulate), asked)
    said = peaks(offload.moved(local, asked))
    steps = 4 * len(list(build().model.parameters()))  # one number for each parameter
    assert abs(seen.peaks["compute"] - said["compute"] - steps) <= SCALARS
    assert {key: times for key, times in seen.messages.items() if key != ("all_reduce", 0, 8)} == messages(local)
