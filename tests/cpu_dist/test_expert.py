"""Data ranks that share experts compute what one process computes; every row that leaves a rank arrives at another.

The reference is the plain loop of `foretell.runtime.check.verify`: fp32 losses over three steps and every gradient of the first
are held to 1e-4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.errors import UserError
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.expert import experts as expert
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import RankFailure
from foretell.trace.load.model import Source
from foretell.trace.record.step import Workload
from tests.cpu_dist.beside_one import Case, Ranks, check, params

SMALL = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab_size": 64, "context": 16, "experts": 4}
HF = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "num_local_experts": 4,
}  # fmt: skip
MODELS = {
    "mixtral": Source(model="mixtral-tiny", overrides=SMALL, micro_batch=2),
    "hf": Source(model="hf:mixtral", overrides=HF, micro_batch=2, seq=16),
}
AGAIN = {"blocks": {"blocks.*": Residency(mode="recompute")}, "accumulate": 2}
PIPED = {"pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",)), "accumulate": 2}
CASES = {
    "replicas, computed again": Case("mixtral", Mesh(dp_replicate=2, dp_shard=2, ep=2), AGAIN),
    "pipeline": Case("mixtral", Mesh(pp=2, dp_shard=2, ep=2), PIPED),
    "hf, bf16-mixed, as many as choose it": Case("hf", Mesh(dp_shard=2, ep=2), {"precision": "bf16-mixed"}),
    "pipeline, bf16-mixed": Case(
        "mixtral", Mesh(pp=2, dp_shard=2, ep=2), {**PIPED, "precision": "bf16-mixed"}, slow="each of the two is there without the other"
    ),
    "hf, shards, as many as choose it": Case("hf", Mesh(dp_shard=4, ep=2), slow="two ranks do the same"),
}  # fmt: skip


@pytest.mark.parametrize("name", params(CASES))
def test_spread_experts_compute_what_one_process_computes(name: str, ranks: Ranks) -> None:
    check(CASES[name], MODELS, ranks)


# ---------------------------------------------------------------- routing that is fixed


class Experts(nn.Module):
    """Told for every row which experts it goes to."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, size, size) / size**0.5)

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            row, choice = torch.where(index == number)
            out = out.index_add(0, row, torch.tanh(x[row] @ self.weight[number]) * share[row, choice, None])
        return out


class Fixed(nn.Module):
    """The batch itself says where its rows go."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.experts, self.out = nn.Linear(8, 16), Experts(4, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        return self.out(self.experts(self.into(x), index, share)).square().mean()


SOME, NONE = [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0, 0]] * 2
"""By rank, the first expert of each of its rows; the second is the next one. Nobody chooses expert 3, or 2 and 3."""


def fixed(rank: int, routes: list[list[int]]) -> Workload:
    torch.manual_seed(3)
    model = Fixed()
    torch.manual_seed(10 + rank)
    first = torch.tensor(routes[rank])
    batch = {"x": torch.randn(6, 8), "index": torch.stack([first, first + 1], 1), "share": torch.rand(6, 2)}
    return Workload(model, batch)


def step(rank: int, world: int, plan: Plan, routes: list[list[int]]) -> tuple[float, dict[str, Tensor], list[int], list[int], list[int]]:
    ranks = start(plan, device="cpu")
    work = fixed(rank, routes)
    stacks = expert.find(work.model, 2)
    ways: dict[str, Any] = {}
    plain = expert.apply

    def watched(*args: Any) -> Any:
        found = plain(*args)
        ways.update(found.ways)
        return found

    expert.apply = watched
    try:
        job = apply(work, plan, ranks)
    finally:
        expert.apply = plain
    assert [one.kind for one in stacks] == ["routed"]
    loss = job.backward([work.batch])
    assert loss is not None
    held = dict(job.named_parameters())["experts.weight"]
    assert isinstance(held, DTensor)
    account = ways["experts"].account
    return loss.item(), job.gradients(), account.sent, account.received, list(held.to_local().shape)


@pytest.mark.parametrize(
    ("routes", "sent", "received"), [(SOME, [[10, 2], [12, 0]], [[10, 12], [2, 0]]), (NONE, [[12, 0]] * 2, [[12, 12], [0, 0]])]
)
def test_every_row_is_accounted_for_and_nothing_is_dropped(
    routes: list[list[int]], sent: list[list[int]], received: list[list[int]], ranks: Ranks
) -> None:
    """Rank 0 holds experts 0 and 1, rank 1 experts 2 and 3: of the rows that go there, some or none at all."""
    plan = Plan(model={}, hardware="auto", mesh=Mesh(dp_shard=2, ep=2), micro_batch=6, precision="fp32", clip=None)
    found = ranks(2).run(step, plan, routes)
    assert [row[2] for row in found] == sent and [row[3] for row in found] == received
    assert all(row[4][0] == 2 for row in found)
    works = [fixed(rank, routes) for rank in range(2)]
    losses = [work.model(**work.batch) for work in works]
    for loss in losses:
        (loss / 2).backward()
    for rank, (loss, gradients, *_) in enumerate(found):
        assert loss == pytest.approx(losses[rank].item(), rel=1e-6)
        for name, parameter in works[0].model.named_parameters():
            other = dict(works[1].model.named_parameters())[name]
            torch.testing.assert_close(gradients[name], parameter.grad + other.grad, rtol=1e-5, atol=1e-7)
    assert not found[0][1]["experts.weight"][3].any()


# ---------------------------------------------------------------- what is refused


class Mixing(nn.Module):
    """Stacked weights that are no experts: each one's answer has something of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(x, self.weight)
        return y - y.mean(0, keepdim=True)


class Averaging(Mixing):
    """Experts whose rows see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight) - x.mean(1, keepdim=True)


class OneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        (nn.Sequential(Mixing()), 2, "an expert depends on others"),
        (nn.Sequential(Averaging()), 2, "a row depends on others"),
        (OneByOne(), 2, "experts calls its 4 experts one by one"),
        (Fixed(), 3, "experts holds 4 experts, which do not divide by ep 3"),
        (nn.Linear(4, 4), 2, "no module of the model holds stacked weights"),
    ],
)
def test_what_is_no_expert_is_refused_with_the_reason(model: nn.Module, ranks: int, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        expert.find(model, ranks)


def test_weights_that_are_read_elsewhere_are_refused(ranks: Ranks) -> None:
    """Routing by a loop takes single experts out of the stack, past the module's forward: a wrong one would be taken."""
    source = Source(model="mixtral-tiny", overrides={**SMALL, "routing": "loop"}, micro_batch=2)
    plan = Case("", Mesh(dp_shard=2, ep=2)).plan
    with pytest.raises(RankFailure, match=r"blocks\.0\.moe\.experts\.gate is read outside the forward"):
        ranks(2).run(verify.run_rank, source, plan, 1)
