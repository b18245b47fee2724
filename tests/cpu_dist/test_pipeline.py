"""Stages on gloo ranks compute what one process computes: losses of three steps, gradients of the first and the last.

Held to 1e-4, in fp32, against a plain loop over the same micro-batches. A gradient is compared tensor by tensor, and a
parameter that no rank has a gradient for, or that is missing, fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.errors import UserError
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.parallel import ranks as places
from foretell.runtime.parallel.pipeline.dry_run import Notes, RankEvent, dry_run
from foretell.runtime.parallel.pipeline.stages import RankStages, cut
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.parallel.shard import shard
from foretell.runtime.process.pool import PoolWorld, RankFailure
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Batch, Workload, compute_loss

STEPS, RATE, BOUND = 3, 0.1, 1e-4
TEXT = {"layers": 4, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}
HF = {
    "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=2),
    "short gpt": Source(model="gpt-tiny", overrides={**TEXT, "layers": 2}, micro_batch=2),
    "llama": Source(model="llama-tiny", overrides={**TEXT, "kv_heads": 2, "ffn": 64}, micro_batch=2),
    "hf": Source(model="hf:llama", overrides=HF, micro_batch=2, seq=16),
    "vit": Source(model="vit-tiny", overrides={"depth": 2, "dim": 32, "image": 16}, micro_batch=2),
    "t5": Source(model="t5-tiny", overrides={"dim": 32, "vocab_size": 64}, micro_batch=2, seq=16),
}


@dataclass(frozen=True)
class Case:
    model: str
    schedule: str
    cuts: tuple[str, ...]
    pp: int = 2
    count: int = 4
    shard: int = 1
    tp: int = 1
    slow: str = ""
    """Why `make test` leaves it out, if it does: what it runs instead."""

    @property
    def plan(self) -> Plan:
        return Plan(
            model={}, hardware="auto", mesh=Mesh(pp=self.pp, dp_shard=self.shard, tp=self.tp), micro_batch=2,
            pipeline=Pipeline(schedule=self.schedule, cuts=self.cuts), accumulate=self.count, precision="fp32",
            reshard=not self.schedule.startswith("zero"),
        )  # fmt: skip

    def __str__(self) -> str:
        more = f", {self.shard} shards" * (self.shard > 1) + f", tp {self.tp}" * (self.tp > 1)
        return f"{self.model}, {self.schedule}, {len(self.cuts) + 1} stages on {self.pp}{more}"


def blocks(*numbers: int, at: str = "blocks") -> tuple[str, ...]:
    return tuple(f"{at}.{number}" for number in numbers)


CASES = [
    Case("short gpt", "gpipe", blocks(1), slow="the schedule is in test_equivalence.py, with a model of hf"),
    Case("gpt", "1f1b", blocks(1, 2, 3), pp=4, count=6, slow="two ranks of it below"),
    Case("gpt", "zero-bubble-v", blocks(1, 2, 3)),  # the tied weight is on one rank twice
    Case("short gpt", "1f1b", blocks(1), shard=2, count=2, slow="with shards in test_equivalence.py"),
    Case("short gpt", "zero-bubble", blocks(1), shard=2, count=2),
    Case("llama", "1f1b", blocks(3), slow="the schedule is in test_equivalence.py, with other models, and so are uneven cuts"),
    Case("llama", "interleaved-1f1b", blocks(1, 2, 3)),
    Case("llama", "1f1b", blocks(2), tp=2, slow="in test_equivalence.py with foretell's own split"),
    Case("hf", "1f1b", blocks(1, at="model.layers"), count=3, slow="another model of hf is cut in test_equivalence.py"),
    Case("hf", "zero-bubble", blocks(1, 2, 3, at="model.layers"), slow="the model and the schedule are there without each other"),
    Case("vit", "zero-bubble", blocks(1), slow="the model is cut in test_equivalence.py, and the schedule is here with others"),
    Case("t5", "1f1b", ("encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1"), pp=4,
         slow="cut in both stacks by the test of evaluation"),
    Case("t5", "zero-bubble", ("decoder.blocks.1",)),
]  # fmt: skip


# --- one process -----------------------------------------------------------------------------------------------------


def build(source: Source) -> Workload:
    """The same weights on every rank, none of them zero: a zeroed gate would hide what lies behind it."""
    torch.manual_seed(0)
    work = load(source)
    with torch.no_grad():
        for parameter in work.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return work


def data(source: Source, steps: int, count: int) -> list[list[Batch]]:
    example = load(source).batch
    torch.manual_seed(1)

    def other(value: Tensor) -> Tensor:
        return torch.randn_like(value) if value.is_floating_point() else torch.randint_like(value, 10)

    return [[{name: other(value) for name, value in example.items()} for _ in range(count)] for _ in range(steps)]


@dataclass(frozen=True)
class Run:
    losses: list[list[float]]
    first: dict[str, Tensor]
    last: dict[str, Tensor]


def alone(source: Source, steps: list[list[Batch]]) -> Run:
    work = build(source)
    optimizer = torch.optim.SGD(work.model.parameters(), lr=RATE)
    losses, gradients = [], []
    for batches in steps:
        optimizer.zero_grad()
        losses.append([])
        for batch in batches:
            loss = compute_loss(Workload(work.model, batch, work.loss))
            (loss / len(batches)).backward()
            losses[-1].append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in work.model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Run(losses, gradients[0], gradients[-1])


# --- on a rank -------------------------------------------------------------------------------------------------------


def split_llama(model: nn.Module, ranks: Ranks) -> None:
    """By PyTorch's own styles, activations split along the sequence between them: what crosses is each rank's piece."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, model = ranks.submesh(("tp",)), model
    whole, piece = Replicate(), Shard(1)
    outer = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=piece),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=piece, output_layouts=whole),
    }
    inner = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(piece, None, None), desired_input_layouts=(whole, None, None)),
        "mlp": PrepareModuleInput(input_layouts=(piece,), desired_input_layouts=(whole,)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=piece),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=piece),
    }
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    rotary = model.rotary.forward
    model.rotary.forward = lambda x, positions=None: rotary(x.new_zeros(1, x.shape[1] * mesh.size(), 1))


def start(plan: Plan, source: Source) -> tuple[Ranks, RankStages]:
    ranks = places.start(plan, device="cpu")
    work = build(source)
    if plan.mesh.tp > 1:
        split_llama(work.model, ranks)
    stages = cut(work.model, plan, ranks, work.batch, work.loss)
    for part in stages.parts:
        shard(part, find_blocks(part), plan, ranks)
    return ranks, stages


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, world: int, source: Source, plan: Plan, steps: list[list[Batch]]) -> dict[str, Any]:
    ranks, stages = start(plan, source)
    optimizer = torch.optim.SGD([p for _, p in stages.named_parameters()], lr=RATE, foreach=False)
    losses, gradients = [], []
    for batches in steps:
        mine = batches[ranks.data_rank :: ranks.data_size]
        optimizer.zero_grad()
        losses.append([loss.item() for loss in stages.run(mine)])
        stages.reduce_ties()
        gradients.append([(n, full(p.grad).clone()) for n, p in stages.named_parameters() if p.grad is not None])
        optimizer.step()
    return {
        "losses": losses, "first": gradients[0], "last": gradients[-1], "data": ranks.data_rank,
        "owned": [name for name, _ in stages.owned_parameters()] if rank % (world // plan.mesh.pp) == 0 else [],
    }  # fmt: skip


# --- the comparison --------------------------------------------------------------------------------------------------


def params(*cases: Case) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=pytest.mark.slow(reason=case.slow) if case.slow else ()) for case in cases]


@pytest.mark.parametrize("case", params(*CASES))
def test_stages_compute_what_one_process_computes(case: Case, ranks: Callable[[int], PoolWorld]) -> None:
    if case.model == "hf":
        pytest.importorskip("transformers")
    source, plan = MODELS[case.model], case.plan
    steps = data(source, STEPS, case.count * case.shard)
    known = alone(source, steps)
    assert sum(known.losses[-1]) != sum(known.losses[0])
    found = ranks(plan.mesh.world).run(train, source, plan, steps)

    told = [result for result in found if result["losses"][0]]
    assert {result["data"] for result in told} == set(range(case.shard))
    for result in told:
        mine = [losses[result["data"] :: case.shard] for losses in known.losses]
        assert result["losses"] == [pytest.approx(losses, rel=BOUND) for losses in mine]
    for when, wanted in (("first", known.first), ("last", known.last)):
        assert {name for result in found for name, _ in result[when]} == wanted.keys()
        for result in found:
            for name, gradient in result[when]:
                off = (gradient - wanted[name]).norm() / wanted[name].norm()
                assert off <= BOUND, f"{when} gradient of {name}: {off:.1e}"
    names = sorted(name for name, _ in build(source).model.named_parameters())
    assert sorted(name for result in found for name in result["owned"]) == names


# --- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(rank: int, world: int, source: Source, plan: Plan, batches: list[Batch]) -> Any:
    _, stages = start(plan, source)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    losses = [loss.item() for loss in stages.forward(batches)]
    kept = torch.equal(before, torch.random.get_rng_state())
    again = [loss.item() for loss in stages.forward(batches[:1])]
    return losses, again, kept, all(p.grad is None for _, p in stages.named_parameters())


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.slow(reason="one cut; here both stacks are cut")), "zero-bubble-v"]
)
def test_evaluation_takes_batches_of_any_shape(schedule: str, ranks: Callable[[int], PoolWorld]) -> None:
    source = MODELS["t5"]
    one, three = ("decoder.blocks.0",), ("encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1")
    plan = Case("t5", schedule, one if schedule == "1f1b" else three).plan
    torch.manual_seed(3)
    batches = [
        load(Source(model="t5-tiny", overrides=source.overrides, micro_batch=n, seq=s)).batch
        for n, s in [(2, 16), (1, 8), (2, 16)]
    ]
    work = build(source)
    with torch.no_grad():
        wanted = [compute_loss(Workload(work.model, batch, work.loss)).item() for batch in batches]
    found = ranks(2).run(evaluate, source, plan, batches)
    told = [losses for losses, *_ in found if losses]
    assert told == [pytest.approx(wanted, rel=1e-5)]
    assert all(kept and clean for _, _, kept, clean in found)
    assert [again for _, again, *_ in found if again] == [pytest.approx(wanted[:1], rel=1e-5)]


# --- the dry run against the real one --------------------------------------------------------------------------------


def noted(rank: int, world: int, source: Source, plan: Plan, batches: list[Batch]) -> list[RankEvent]:
    ranks, stages = start(plan, source)
    notes = Notes(stages)
    mine = batches[ranks.data_rank :: ranks.data_size]
    for _ in range(2):
        stages._find_forms(mine[0])
        with notes.recording():
            notes.events.clear()
            stages.run(mine)
            stages.reduce_ties()
    return notes.events


@pytest.mark.parametrize(
    "case",
    params(
        Case("short gpt", "1f1b", blocks(1), shard=2, count=3),
        Case("llama", "interleaved-1f1b", blocks(1, 2, 3), slow="dry runs of every schedule are compared in tests/pure/test_stages.py"),
        Case("gpt", "zero-bubble-v", blocks(1, 2, 3), slow="dry runs of every schedule are compared in tests/pure/test_stages.py"),
        Case("t5", "zero-bubble", ("decoder.blocks.1",), slow="dry runs of every schedule are compared in tests/pure/test_stages.py"),
    ),
)
def test_a_dry_run_does_what_a_real_one_does(case: Case, ranks: Callable[[int], PoolWorld]) -> None:
    source, plan = MODELS[case.model], case.plan
    steps = data(source, 1, case.count * case.shard)
    found = ranks(plan.mesh.world).run(noted, source, plan, steps[0])
    for rank in range(case.pp):
        expected = dry_run(source, plan, rank, steps=2).events
        assert tuple(found[rank * case.shard]) == expected
        assert any(event.what == "send activations" for event in expected) or rank == case.pp - 1


# --- what is refused -------------------------------------------------------------------------------------------------


def differ(rank: int, world: int, source: Source, plan: Plan) -> None:
    _, stages = start(plan, source)
    long, short = build(source).batch, {key: value[:, :8] for key, value in build(source).batch.items()}
    stages.run([long, short, long, short])


def test_micro_batches_of_different_shapes_are_refused(ranks: Callable[[int], PoolWorld]) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(differ, MODELS["gpt"], Case("gpt", "1f1b", blocks(2)).plan)
    assert isinstance(failure.value.first, UserError) and "differ in shape" in str(failure.value.first)


def test_a_plan_that_torch_cannot_run_is_refused_before_anything_is_cut() -> None:
    work = build(MODELS["gpt"])
    plan = Case("gpt", "zero-bubble", blocks(2), shard=2).plan
    one = Ranks(rank=0, world=4, local_rank=0, device=torch.device("cpu"), mesh=None, sizes=plan.mesh)
    for changed in (plan.with_(reshard=True), plan.with_(compile="blocks"), plan.with_(accumulate=5)):
        with pytest.raises(UserError, match="cannot be run"):
            cut(work.model, changed, one, work.batch, work.loss)
    assert len(list(work.model.parameters())) == len(list(build(MODELS["gpt"]).model.parameters()))
