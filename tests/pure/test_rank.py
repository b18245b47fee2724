"""What a step could gain at most: small programs whose answer can be worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from foretell.quantities import COMPUTE, Task
from foretell.trace.types import ACTIVATION, Op, Program, Ref, Storage, TensorSpec, Trace
from foretell.tune.rank import folded, least_bytes, rank

BANDWIDTH = 1e9
KIB = TensorSpec((256,), "float32")


def op(name: str, reads: list[int], writes: list[int], *, module: str = "norm", frees: tuple[int, ...] = (), new: bool = True) -> Op:
    refs = [tuple(Ref(storage, KIB) for storage in some) for some in (reads, writes)]
    return Op(f"aten.{name}.default", refs[0], refs[1], module, "forward", None, allocates=tuple(writes) if new else (), frees=frees)


CHAIN = (op("pow", [0], [1]), op("mean", [1], [2], frees=(1,)), op("mul", [0, 2], [3], frees=(2,)))


def test_what_is_made_and_dropped_inside_is_not_moved() -> None:
    assert least_bytes(CHAIN) == 2 * 1024
    assert sum(one.bytes_read + one.bytes_written for one in CHAIN) == 7 * 1024


def test_in_place_reads_and_writes_and_views_move_nothing() -> None:
    assert least_bytes((op("add_", [0, 1], [0], new=False),)) == 3 * 1024
    assert least_bytes((op("view", [0], [0], new=False),)) == 1024
    assert least_bytes((op("view", [0], [0], new=False), op("neg", [0], [4]))) == 2 * 1024


def step(ops: tuple[Op, ...], seconds: dict[str, float], kinds: dict[str, str] | None = None, host: float = 0.0) -> tuple[Trace, list[Task]]:
    storages = {number: Storage(1024, ACTIVATION, "") for number in range(20)}
    trace = Trace({"micro": Program("micro", ops)}, {"steady_step": (("micro", 1),)}, storages, ())
    tasks = [Task(one.name, COMPUTE, seconds[one.name], (), host, (kinds or {}).get(one.name, "memory"), one.module, one.phase) for one in ops]
    return trace, tasks


def test_a_gain_is_what_is_above_the_floor() -> None:
    """2 KiB at 1 GB/s are 2.048 µs of 30."""
    trace, tasks = step(CHAIN, dict.fromkeys([one.name for one in CHAIN], 1e-5))
    found = rank(trace, tasks, 3e-5, 0.0, BANDWIDTH)
    (row,) = found.candidates
    assert row.ops == ("pow", "mean", "mul") and row.floor_bytes == 2048
    assert row.gain_seconds == pytest.approx(3e-5 - 2.048e-6)
    assert found.speedup == pytest.approx(3e-5 / 2.048e-6)


def test_products_end_a_group_and_gain_nothing() -> None:
    ops = (CHAIN[0], op("mm", [1], [5]), op("mul", [5], [6]))
    trace, tasks = step(ops, {"aten.pow.default": 1e-5, "aten.mm.default": 9e-5, "aten.mul.default": 1e-5}, {"aten.mm.default": "gemm"})
    found = rank(trace, tasks, 1.1e-4, 0.0, BANDWIDTH)
    assert sorted(one.ops for one in found.candidates) == [("mul",), ("pow",)]
    assert found.products_seconds == pytest.approx(9e-5)


def test_what_hides_behind_the_host_gains_nothing() -> None:
    trace, tasks = step(CHAIN, dict.fromkeys([one.name for one in CHAIN], 1e-5), host=1e-3)
    found = rank(trace, tasks, 3.01e-3, 2.9e-3, BANDWIDTH)
    assert found.candidates == ()


def test_at_its_floor_nothing_is_left() -> None:
    trace, tasks = step((CHAIN[0],), {"aten.pow.default": 2.1e-6})
    assert rank(trace, tasks, 2.1e-6, 0.0, BANDWIDTH).candidates == ()


def test_repeated_blocks_are_one_row() -> None:
    ops = tuple(op("neg", [number], [number + 10], module=f"blocks.{number}.norm") for number in range(4))
    trace, tasks = step(ops, {"aten.neg.default": 1e-5})
    (row,) = rank(trace, tasks, 4e-5, 0.0, BANDWIDTH).candidates
    assert (row.module, row.runs) == ("blocks.*.norm", 4)
    assert folded("h.12.mlp.3") == "h.*.mlp.*"
    assert dataclasses.asdict(row)["floor_bytes"] == 4 * 2048
