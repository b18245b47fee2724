"""Ranks that share the positions of a sample compute what one process computes, and send what was foreseen.

The reference is the plain loop of `foretell.runtime.check.verify`: fp32 losses over three steps and every gradient of the first
are held to 1e-4.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretell.errors import UserError
from foretell.plan.context import share
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.runtime.box.group import opened
from foretell.runtime.box.script import BoxScript
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.context.positions import prepare
from foretell.runtime.parallel.ranks import start
from foretell.trace.flow.record import record
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Workload
from tests.cpu_dist.beside_one import Case, Ranks, check, params

TEXT = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}
QWEN = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=2),
    "llama": Source(model="llama-tiny", overrides={**TEXT, "kv_heads": 2, "ffn": 64}, micro_batch=2),
    "bert": Source(model="bert-tiny", micro_batch=2, seq=16),
    "t5": Source(model="t5-tiny", micro_batch=2, seq=16),
    "hf": Source(model="hf:qwen2", overrides=QWEN, micro_batch=2, seq=16),
}
PIPED = {"pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",)), "accumulate": 2}
AGAIN = {"blocks": {"model.layers.*": Residency(mode="recompute")}}
CASES = {
    "both ways, masked": Case("bert", Mesh(cp=2)),
    "bf16-mixed": Case("llama", Mesh(cp=2), {"precision": "bf16-mixed"}),
    "shards": Case("llama", Mesh(dp_shard=2, cp=2)),
    "hf, replicas, computed again": Case("hf", Mesh(dp_replicate=2, cp=2), {"accumulate": 2, **AGAIN}),
    "tensor": Case("gpt", Mesh(cp=2, tp=2)),
    "pipeline": Case("gpt", Mesh(pp=2, cp=2), PIPED),
    "learned positions, four": Case("gpt", Mesh(cp=4), slow="two ranks do the same"),
    "tensor, bf16-mixed": Case("llama", Mesh(cp=2, tp=2), {"precision": "bf16-mixed"}, slow="each of the two is there without the other"),
    "four kinds on sixteen": Case("gpt", Mesh(pp=2, dp_shard=2, cp=2, tp=2), PIPED, slow="every two of the four are together elsewhere"),
}


@pytest.mark.parametrize("name", params(CASES))
def test_shared_positions_compute_what_one_process_computes(name: str, ranks: Ranks) -> None:
    check(CASES[name], MODELS, ranks)


# ---------------------------------------------------------------- what is sent


KINDS = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce"}


class Messages(TorchDispatchMode):
    """Kinds and bytes of the messages between the ranks of a team, whole tensors counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        kind = KINDS.get(str(func).split(".")[1]) if str(func).startswith("_c10d_functional") else None
        if kind is not None:
            sizes = [leaf.nbytes for leaf in tree_leaves((args, output)) if isinstance(leaf, Tensor)]
            self.seen[kind, max(sizes)] += 1
        return output


def send(rank: int, world: int, source: Source, plan: Plan) -> Counter[tuple[str, int]]:
    job = apply(verify.build(source), plan, start(plan, device="cpu"))
    with Messages() as messages:
        job.backward(verify.batches(source, plan.accumulate))
    return messages.seen


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_the_messages_are_those_foreseen(model: str, ranks: Ranks) -> None:
    """Each key and value once, its gradient once, and the loss: nothing else goes between the ranks of the axis."""
    source = MODELS[model]
    plan = Case(model, Mesh(cp=2)).plan
    foreseen = share(record(verify.build(source)), 2).collectives
    expected = Counter((one.kind, one.nbytes) for one in foreseen)
    assert expected["all-reduce", 4] == 2 and sum(expected.values()) >= 10
    assert ranks(2).run(send, source, plan) == [expected, expected]


def test_a_model_that_is_not_yet_where_its_batch_is_shares_the_same_positions() -> None:
    """A rank moves its model to the GPU as it shards it, after this; a model on `meta` is as far from its batch."""
    plan, source = Case("llama", Mesh(cp=2)).plan, MODELS["llama"]
    work, away = verify.build(source), verify.build(source)
    with opened(BoxScript(), torch.device("cpu"), 1, 2):
        ranks = start(plan, device="cpu")
        here = prepare(work.model, ranks, work.batch, work.loss)
        there = prepare(away.model.to("meta"), ranks, away.batch, away.loss)
    assert here is not None and there is not None
    assert there.paths == here.paths and there.shared.collectives == here.shared.collectives


# ---------------------------------------------------------------- losses and chance


class Reader(nn.Module):
    """Attention with a mask of its own and a loss that leaves out most of the second half."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril().log()
        for layer in self.layers:
            q, k, v = layer(x).view(*ids.shape, 2, 24).transpose(1, 2).chunk(3, dim=-1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.drop(x)).view(-1, 20), targets.view(-1), ignore_index=3)


def read(seed: int = 5, p: float = 0.0) -> Workload:
    torch.manual_seed(seed)
    model = Reader()
    model.drop.p = p
    targets = torch.randint(4, 20, (2, 8))
    targets[:, 5:] = 3
    return Workload(model, {"ids": torch.randint(0, 20, (2, 8)), "targets": targets})


def read_on_ranks(rank: int, world: int, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    work = read()
    job = apply(work, plan, start(plan, device="cpu"))
    loss = job.backward([work.batch])
    assert loss is not None
    return loss.item(), job.gradients()


def test_positions_that_do_not_count_are_spread_unevenly(ranks: Ranks) -> None:
    """Of rank 1's four positions one counts: the loss is the mean over those that do, not a mean of means."""
    work = read()
    loss = work.model(**work.batch)
    loss.backward()
    plan = Plan(model={}, hardware="auto", mesh=Mesh(cp=2), micro_batch=2, precision="fp32", clip=None)
    for found, gradients in ranks(2).run(read_on_ranks, plan):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in work.model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def draw(rank: int, world: int, plan: Plan) -> tuple[Tensor, float]:
    """Which of this rank's numbers dropout keeps, and what is drawn after it."""
    ranks = start(plan, device="cpu")
    work = read(p=0.5)
    found = prepare(work.model, ranks, work.batch, None)
    assert found is not None
    batch = found.open({"x": torch.ones(2, 8), **work.batch})
    assert batch["x"].__class__ is batch["targets"].__class__ is Tensor
    for wrong, reason in (({"ids": torch.ones(2, 7)}, "7 positions"), ({"x": torch.ones(2, 8)}, "has no .*ids")):
        with pytest.raises(UserError, match=reason):
            found.open(wrong)
    ids = batch["ids"]
    torch.manual_seed(0)
    kept = F.dropout(ids.float() * 0 + 1, 0.5)
    assert kept.shape == (2, 8)
    with torch._C.DisableTorchFunctionSubclass():
        mine = kept.detach().clone()
    return mine, torch.rand(()).item()


def test_ranks_draw_for_their_own_positions_and_stay_in_step(ranks: Ranks) -> None:
    plan = Plan(model={}, hardware="auto", mesh=Mesh(cp=2), micro_batch=2, precision="fp32", clip=None)
    (first, after), (second, later) = ranks(2).run(draw, plan)
    assert first.shape == second.shape == (2, 4) and not torch.equal(first, second)
    assert after == later


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("model", "seq", "reason"),
    [
        ("ssm-tiny", 16, "blocks.0.mixer.conv needs all of them"),
        ("mixtral-tiny", 16, "blocks.0.moe needs all of them"),
        ("lstm-tiny", 16, "blocks.0 needs all of them"),
        ("vit-tiny", None, "no tensor of the batch"),
        ("gpt-tiny", 15, "15 positions do not divide by cp 2"),
    ],
)
def test_a_model_whose_positions_cannot_be_shared_is_refused_with_the_reason(
    model: str, seq: int | None, reason: str
) -> None:
    with torch.device("meta"):
        work = load(Source(model=model, micro_batch=2, seq=seq))
    with pytest.raises(UserError, match=reason):
        share(record(work), 2)


class ByHand(nn.Module):
    """Attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 16), nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.layer(self.words(ids)).chunk(3, dim=-1)
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).square().mean()


def test_attention_written_out_is_refused() -> None:
    ids = torch.randint(0, 20, (2, 8))
    with pytest.raises(UserError, match="no call of scaled_dot_product_attention"):
        share(record(Workload(ByHand(), {"ids": ids})), 2)
