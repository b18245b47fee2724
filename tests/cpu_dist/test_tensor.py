"""Split models on gloo ranks compute what one process computes: losses over three steps, every gradient of the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from foretell.errors import UserError
from foretell.plan.types import Mesh, Plan, Split
from foretell.runtime.check import verify
from foretell.runtime.parallel.ranks import start
from foretell.runtime.parallel.tensor import split as tensor
from foretell.runtime.parallel.tensor.values import SplitTensor
from foretell.runtime.process.pool import PoolWorld, RankFailure
from foretell.trace.load.model import Source
from foretell.trace.record.step import Workload, compute_loss

Ranks = Callable[[int], PoolWorld]


@dataclass(frozen=True)
class Case:
    model: str
    overrides: dict[str, Any] = field(default_factory=dict)
    seq: int | None = 16
    tp: int = 2
    split: Split | None = None
    compile: str = "none"
    steps: int = 3

    @property
    def source(self) -> Source:
        return Source(model=self.model, overrides=self.overrides, micro_batch=2, seq=self.seq)

    @property
    def plan(self) -> Plan:
        return Plan(
            model={"model": self.model}, hardware="CPU", mesh=Mesh(tp=self.tp), micro_batch=2, precision="fp32",
            optimizer="adamw", clip=None, split=self.split, compile=self.compile,
        )  # fmt: skip


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96}
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
PLAIN = Split(sequence=False, loss=False)
CASES = {
    "gpt": Case("gpt-tiny", {"layers": 2}),
    "gpt, nothing between": Case("gpt-tiny", {"layers": 2}, split=PLAIN),
    "gpt, four": Case("gpt-tiny", {"layers": 2}, tp=4),
    "gpt, odd vocabulary": Case("gpt-tiny", {"layers": 2, "vocab_size": 511}),
    "gpt, odd heads": Case("gpt-tiny", {"layers": 2, "dim": 96, "heads": 3}),
    "gpt, compiled": Case("gpt-tiny", {"layers": 2}, compile="blocks"),
    "llama, grouped heads": Case("llama-tiny", {"layers": 2}),
    "llama, rules given": Case(
        "llama-tiny", {"layers": 2}, split=Split(rules={"blocks.*.mlp.gate": "column", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"})
    ),
    "llama, tied": Case("llama-tiny", {"layers": 2, "tied": True}, split=Split(loss=False)),
    "vit": Case("vit-tiny", seq=None),
    "bert": Case("bert-tiny"),
    "t5": Case("t5-tiny", seq=64),
    "mixtral": Case("mixtral-tiny"),
    "dit": Case("dit-tiny", seq=None),
    "hf llama": Case("hf:llama", {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2}),
    "hf gpt2": Case("hf:gpt2", GPT2),
    "hf mixtral": Case("hf:mixtral", {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4}),
    "hf phi3, fused": Case("hf:phi3", {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}),
}  # fmt: skip


ALIKE = pytest.mark.slow(reason="split as another case is, only more or other layers")
LONG = (
    "gpt", "gpt, four", "gpt, odd vocabulary", "gpt, compiled", "vit", "bert", "dit", "hf llama", "hf gpt2", "hf mixtral", "hf phi3, fused",
    "mixtral",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=ALIKE if name in LONG else ()) for name in CASES])
def test_a_split_model_computes_what_one_process_computes(name: str, ranks: Ranks) -> None:
    case = CASES[name]
    if case.model.startswith("hf:"):
        pytest.importorskip("transformers")
    known = verify.reference(case.source, case.plan, case.steps)
    found = verify.merge(ranks(case.tp).run(verify.run_rank, case.source, case.plan, case.steps))
    difference = verify.compare(known, found)
    assert difference.good, difference


# ---------------------------------------------------------------- what a split model is like to use


class Cube(torch.autograd.Function):
    """A function of the user's own, which knows nothing of parts: it subtracts the mean over all positions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3 - (x**3).mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (grad - grad.mean(1, keepdim=True)) * 3 * x**2


class Odd(nn.Module):
    """A small model with things in it that need care."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))) * self.scale)
        x = x + Cube.apply(0.1 * x)
        x = self.encoder(x)
        first, rest = x[:, :1], x[:, 1:]
        x = torch.cat([first * 2, rest], dim=1)
        return x + self.down(torch.relu(self.up(self.norm(x))) * self.scale)


def odd_loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum(-1).sqrt().mean()


def odd_workload() -> Workload:
    torch.manual_seed(2)
    model = Odd()
    return Workload(model, (torch.randn(2, 8, 16),), odd_loss)


def split_odd(_: int, world: int) -> dict[str, Any]:
    plan = Plan(model={}, hardware="CPU", mesh=Mesh(tp=world), precision="fp32")
    ranks = start(plan, device="cpu")
    workload = odd_workload()
    applied = tensor.split(workload.model, plan, ranks, workload.batch, workload.loss)
    assert applied is not None
    names = [name for name, _ in workload.model.named_parameters()]
    loss = compute_loss(workload)
    loss.backward()
    gradients = {
        name: applied.whole(name, p.grad) for name, p in workload.model.named_parameters() if p.grad is not None
    }
    weights = {name: applied.whole(name, p.detach()) for name, p in workload.model.named_parameters()}
    fused = dict(workload.model.named_parameters())["encoder.self_attn.in_proj_weight"]
    assert (
        isinstance(fused, DTensor) and fused.placements == (Shard(0),) and fused.to_local().shape == (48 // world, 16)
    )
    stored = applied.stored("encoder.self_attn.in_proj_weight", weights["encoder.self_attn.in_proj_weight"])
    with torch.no_grad():
        output = workload.model(*workload.batch)
        assert isinstance(output, SplitTensor) and output.shape == (2, 8, 16)
        best = output.argmax(1)  # over the split positions: gathered, as a user would expect
    return {
        "loss": loss.item(), "gradients": gradients, "weights": weights, "names": names, "rules": dict(applied.rules),
        "kept": torch.equal(stored, fused.full_tensor()), "output": tensor.gathered(output), "best": tensor.gathered(best),
    }  # fmt: skip


def test_an_odd_model_keeps_its_names_its_order_and_its_numbers(ranks: Ranks) -> None:
    workload = odd_workload()
    loss = compute_loss(workload)
    loss.backward()
    with torch.no_grad():
        output = workload.model(*workload.batch)
    for found in ranks(2).run(split_odd):
        assert found["rules"]["encoder.self_attn.in_proj_weight"] == "column:3"
        assert found["rules"]["scale"] == "split:0"
        assert found["names"] == [name for name, _ in workload.model.named_parameters()]
        assert found["kept"]
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(found["output"], output, rtol=1e-4, atol=1e-5)
        assert torch.equal(found["best"], output.argmax(1))
        for name, parameter in workload.model.named_parameters():
            assert torch.equal(found["weights"][name], parameter)
            assert parameter.grad is not None
            assert (found["gradients"][name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-7


def with_dropout(rank: int, world: int) -> tuple[list[float], list[torch.Tensor]]:
    plan = Case("gpt-tiny", {"layers": 2, "dropout": 0.2}, tp=world).plan
    ranks = start(plan, device="cpu")
    torch.manual_seed(5)
    workload = verify.load(Case("gpt-tiny", {"layers": 2, "dropout": 0.2}).source)
    applied = tensor.split(workload.model.train(), plan, ranks, workload.batch, workload.loss)
    assert applied is not None
    losses = []
    torch.manual_seed(7)
    for _ in range(3):
        loss = compute_loss(workload)
        loss.backward()
        losses.append(loss.item())
    whole = [p.grad.to_local() for name, p in workload.model.named_parameters() if name not in applied.places]
    return losses, whole


def test_with_dropout_the_ranks_stay_together(ranks: Ranks) -> None:
    (first, grads), (second, others) = ranks(2).run(with_dropout)
    assert first == second
    assert len(set(first)) == 3
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


class Hoarder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.all = [self.up.weight, self.down.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, self.all[0])), self.all[1])


def refused(_: int, world: int, model: Any) -> None:
    plan = Plan(model={}, hardware="CPU", mesh=Mesh(tp=world), precision="fp32")
    ranks = start(plan, device="cpu")
    workload = (
        verify.load(model) if isinstance(model, Source) else Workload(Hoarder(), (torch.randn(2, 8, 16),), odd_loss)
    )
    tensor.split(workload.model, plan, ranks, workload.batch, workload.loss)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Source(model="resnet-tiny", micro_batch=2), "only 1% of its layers can be split over tp 2"),
        (Source(model="unet-tiny", micro_batch=2), "none of its layers can be split over tp 2"),
        (Source(model="lstm-tiny", micro_batch=2, seq=16), "none of its layers can be split over tp 2"),
        (None, "Hoarder keeps a parameter in 'all', where it cannot be replaced"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(model: Any, problem: str, ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(refused, model)
    assert len(caught.value.errors) == 2
    assert isinstance(caught.value.first, UserError)
    assert problem in caught.value.first.problem
