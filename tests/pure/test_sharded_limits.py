"""Verdicts of FSDP2 ranks near a limit of memory, checked against runs on an H200 (benchmarks/results/sharded_limits.jsonl).

What decides is whether PyTorch's allocator gets through by freeing its cache. It often does: a verdict on the peak alone
refuses every run here that needs it. It is irregular, too: less memory may do where more does not.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

from foretell.hardware import overhead, parse
from foretell.lower.fsdp.sharded import shard
from foretell.quantities import NO, TIGHT
from foretell.simulate.memory.memory import MemoryOutcome, careful_limit, fits_in, predict_memory, run_order, sizes_for
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "benchmarks" / "results" / "sharded_limits.jsonl").read_text().splitlines()
]
H200 = parse("H200:8")
EXTRA = overhead(H200.device, "2.11")
BESIDE = EXTRA.context_bytes + EXTRA.nccl_for(H200)
CASE = {"model": "llama3-1b", "micro_batch": 2, "seq": 2048, "world": 8}


MINE = [row for row in ROWS if row["case"] == CASE]


@functools.cache
def rank() -> Trace:
    source = Source(model="llama3-1b", micro_batch=2, seq=2048)
    return shard(capture(lambda: load(source), Recipe(precision="fsdp-bf16", shards=8)), 8)


@functools.cache
def of_rank(limit: int) -> MemoryOutcome:
    return outcome(rank(), limit)


def outcome(trace: Trace, limit: int) -> MemoryOutcome:
    device = H200.device.with_memory(limit + BESIDE, "a test")
    return predict_memory(trace, replace(H200, device=device), EXTRA)


def test_nothing_said_to_fit_ran_out() -> None:
    """By the rows, of which those without `seen` were predicted before they were run."""
    fresh = [row for row in ROWS if not row.get("seen")]
    assert len(fresh) == 55 and len(ROWS) == 142
    said = [row for row in ROWS if row["verdict"] != NO]
    assert said and all(row["ran"] for row in said)
    assert sum(row["retries"] > 0 for row in fresh if row["verdict"] != NO) >= 10, "runs that fit by freeing cache only"


def test_verdicts_are_those_of_the_rows() -> None:
    assert {row["verdict"] for row in MINE} == {TIGHT, NO}
    for row in MINE:
        assert of_rank(row["limit"]).verdict == row["verdict"], row["limit"]


def test_freeing_cache_counts_for_ranks_of_fsdp2_alone() -> None:
    """A limit below the peak at which the run went through on an H200."""
    trace = rank()
    row = next(row for row in MINE if row["verdict"] == TIGHT)
    assert row["ran"] and row["retries"] and row["limit"] < row["reserved_predicted"]
    answer = of_rank(row["limit"])
    assert answer.verdict == TIGHT and answer.memory.margin_bytes > 0
    assert max(phase.reserved_bytes for phase in answer.memory.phases) == row["reserved_predicted"] > answer.memory.reserved_bytes
    for other in ({"tp": 2}, {"stages": [0]}, {"compiled": {}}, {"ranks": 16}):
        assert outcome(replace(trace, meta={**trace.meta, **other}), row["limit"]).verdict == NO, other


def test_a_limit_that_does_by_luck_is_not_enough() -> None:
    """One limit and three steps said that this run fits; on an H200 it ran out in its second step."""
    trace = rank()
    row = min(MINE, key=lambda row: row["limit"])
    assert not row["ran"]
    careful = careful_limit(trace, row["limit"] + BESIDE, BESIDE)
    lucky = fits_in(trace, sizes_for(H200, EXTRA), run_order(trace), careful)
    assert lucky and of_rank(row["limit"]).verdict == NO
