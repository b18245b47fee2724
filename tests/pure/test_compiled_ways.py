"""torch.compile block by block and with CUDA graphs: sound traces, and bytes that an H200 measured."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from foretell.hardware import overhead, parse
from foretell.lower.compiling import compiled
from foretell.simulate.memory.memory import predict_memory
from foretell.trace.inductor import blocks
from foretell.trace.inductor.blocks import ENTER, LEAVE
from foretell.trace.inductor.cuda_graphs import POOL, REPLAY, REPLAYED
from foretell.trace.inductor.emit import FUSED
from foretell.trace.types import Trace
from tests.pure.test_compiled import ALIKE, MODELS, SOME, mistakes, traced

WAYS = ("blocks", "graphs")


@functools.cache
def step(model: str, way: str) -> Trace:
    return compiled(traced(model), way)


RUN = [(model, WAYS[number % 2]) for number, model in enumerate(SOME, 1) if model not in ("t5-tiny", "unet-tiny")]
OTHER_WAY = pytest.mark.slow(reason="compiled the other way, or whole in test_compiled.py, in `make test`, and others this way")


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=ALIKE if model not in SOME else () if (model, way) in RUN else OTHER_WAY)
        for model in MODELS
        for way in WAYS
    ],
)
def test_storages_are_born_used_and_freed_in_order(model: str, way: str) -> None:
    before = mistakes(traced(model))
    assert [line for line in mistakes(step(model, way)) if line not in before] == []


SETTINGS: list[dict[str, Any]] = [
    {"accumulate": 3}, {"recompute": "full"}, {"recompute": "selective"}, {"mode": "infer"}, {"precision": "bf16"}, {"lora": 4},
    {"freeze": ("blocks.0",)}, {"clip": 1.0, "optimizer": "adamw"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        pytest.param(settings, way, id=f"{settings}-{way}", marks=() if number % 4 == place else OTHER_WAY)
        for number, settings in enumerate(SETTINGS)
        for place, way in enumerate(WAYS)
    ],
)
def test_every_recipe_compiles_to_a_sound_trace(settings: dict[str, Any], way: str) -> None:
    trace = traced("gpt-tiny", **settings)
    done = compiled(trace, way)
    before = mistakes(trace)
    assert [line for line in mistakes(done) if line not in before] == []
    assert any(op.name == FUSED for op in done.ops())


MEASURED = {
    ("gpt2", 1, 256): (2120, 2183, 2602), ("vit-b16", 8, None): (1732, 1723, 1970), ("dit-b2", 8, None): (2519, 2550, 2804),
    ("t5-small", 4, 128): (1073, 1121, 1304),
}  # fmt: skip
"""MiB on an H200, torch 2.11: allocated with compiled blocks; allocated and reserved with CUDA graphs."""


@pytest.mark.slow(reason="whole models are held against an H200 in test_compiled.py")
@pytest.mark.parametrize("row", [pytest.param(row, id=row[0], marks=() if row[0] == "gpt2" else ALIKE) for row in MEASURED])
def test_bytes_are_those_an_h200_measured(row: tuple[str, int, int | None]) -> None:
    cluster = parse("H200")
    blocks, graphs = (
        predict_memory(compiled(traced(*row), way), cluster, overhead(cluster.device, "2.11")).memory for way in WAYS
    )
    allocated, recorded, reserved = (2**20 * value for value in MEASURED[row])
    assert blocks.allocated_bytes == pytest.approx(allocated, rel=0.02)
    assert graphs.allocated_bytes == pytest.approx(recorded, rel=0.05)
    assert graphs.reserved_bytes == pytest.approx(reserved, rel=0.05)


@pytest.mark.parametrize("model", ["gpt-tiny", "vit-tiny"])
def test_a_block_like_one_before_is_what_it_would_be_by_itself(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = traced(model, mode="infer")
    found = compiled(eager, "blocks")
    whole, taken = blocks._forward, []

    def alone(ops: Any, ahead: Any, storages: Any, readers: Any, block: str, alike: Any) -> Any:
        taken.append(len(alike))
        return whole(ops, ahead, storages, readers, block, {})

    monkeypatch.setattr(blocks, "_forward", alone)
    assert compiled(eager, "blocks") == found
    assert taken == [0] * len(taken) and len(taken) > 2


def test_only_blocks_are_entered_and_what_is_around_them_stays_eager() -> None:
    eager, done = traced("gpt-tiny"), step("gpt-tiny", "blocks")
    ops = done.programs["micro_first"].ops
    marks = [(op.name, op.module) for op in ops if op.name in (ENTER, LEAVE) and op.phase == "forward"]
    names = eager.meta["blocks"]
    assert isinstance(names, (list, tuple))
    assert marks == [(name, block) for block in names for name in (ENTER, LEAVE)]
    inside, outside = False, []
    for op in ops:
        inside = op.name != LEAVE and (inside or op.name == ENTER)
        outside += [] if inside else [op.name]
    assert FUSED not in outside and any(name.startswith("aten._log_softmax") for name in outside)


def test_graphs_keep_to_memory_of_their_own() -> None:
    done = step("gpt-tiny", "graphs")
    inside = False
    for op in done.programs["micro_first"].ops:
        inside = op.name != REPLAYED and (inside or op.name == REPLAY)
        if inside:
            assert {done.storages[number].stream for number in op.allocates} <= {POOL}
    ops = done.programs["micro_first"].ops
    at = next(position for position, op in enumerate(ops) if op.name == REPLAY and op.phase == "backward")
    assert ops[at - 1].name == "aten.clone.default", "the gradient of the logits is copied to where the graph expects it"
    assert done.storages[ops[at - 1].outputs[0].storage].stream == POOL
