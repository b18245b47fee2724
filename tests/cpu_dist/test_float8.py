"""float8 with torchao, where it is installed: two ranks compute what one does, as closely as rounding allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foretell.plan.types import Mesh, Plan
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.trace.load.model import Source

SOURCE = Source(model="gpt-tiny", overrides={"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}, micro_batch=2)


def losses(_rank: int, _world: int, plan: Plan, precision: str) -> list[float]:
    plan = plan.with_(precision=precision)
    ranks = start(plan, device="cpu")
    job = apply(verify.build(SOURCE), plan, ranks, learning_rate=verify.LEARNING_RATE)
    kinds = {type(module).__name__.removeprefix("FSDP") for module in job.parts[0].modules()}
    assert ("Float8Linear" in kinds) == (precision == "float8")
    every = verify.batches(SOURCE, 2)
    mine = every[ranks.data_rank :: ranks.data_size]
    return [job.train_step(mine).loss.item() for _ in range(5)]


def test_two_ranks_train_in_float8_as_one_does(ranks: Callable[[int], PoolWorld]) -> None:
    """Two mantissa bits in gradients, three in the rest: a loss, the mean of many, is within 2⁻⁵ of that of bf16."""
    pytest.importorskip("torchao")
    plan = Plan(model={}, hardware="auto", micro_batch=2, clip=1.0)
    one = ranks(1).run(losses, plan.with_(accumulate=2), "float8")[0]
    two = ranks(2).run(losses, plan.with_(mesh=Mesh(dp_shard=2)), "float8")
    wide = ranks(2).run(losses, plan.with_(mesh=Mesh(dp_shard=2)), "bf16-mixed")[0]
    assert two[0] == two[1] and two[0][-1] < two[0][0]
    assert two[0] == pytest.approx(one, rel=2**-5)
    assert two[0] == pytest.approx(wide, rel=2**-5) and two[0] != wide
