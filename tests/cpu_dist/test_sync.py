"""Replicas that step alone and are joined every few steps compute what one process computes that plays all of them in turn.

The reference is written out here in plain torch: own copies of the model, `torch.optim.SGD` as the outer optimizer, rounding to 8 bits by
its formula. Where each replica is one process the weights are equal to the bit: sums over replicas are taken in the order of ranks on
both sides. Shards of a replica sum their gradients in another order than one process, hence 1e-6.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.plan.types import Mesh, Plan, Sync
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.parallel.sync import codes
from foretell.runtime.parallel.sync.mean import Mean
from foretell.runtime.process.pool import PoolWorld, RankFailure
from foretell.trace.load.model import Source
from foretell.trace.record.step import Workload, build_optimizer, compute_loss
from tests.cpu_dist.test_equivalence import Sums
from tests.cpu_dist.train_cases import PLAN, SETTINGS, losses, sums, ten_steps
from tests.further import one_in

SOURCE = Source(model="gpt-tiny", overrides={"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}, micro_batch=2)
STEPS, RATE = 8, 1e-2
CASES = {
    "two": (Mesh(dp_replicate=2), Sync(every=3)),
    "four": (Mesh(dp_replicate=4), Sync(every=3, lr=0.5, momentum=0.8, nesterov=False)),
    "two, int8": (Mesh(dp_replicate=2), Sync(every=3, format="int8")),
    "four, int8": (Mesh(dp_replicate=4), Sync(every=2, format="int8")),
    "two, int8, delay": (Mesh(dp_replicate=2), Sync(every=3, format="int8", delay=2)),
    "two of two shards": (Mesh(dp_replicate=2, dp_shard=2), Sync(every=3)),
}


def plan_of(mesh: Mesh, sync: Sync, **more: Any) -> Plan:
    return Plan(model={}, hardware="auto", mesh=mesh, sync=sync, micro_batch=2, precision="fp32", clip=None, **more)


# ---------------------------------------------------------------- the reference


class Alone:
    """All replicas in one process."""

    def __init__(self, plan: Plan) -> None:
        assert plan.sync is not None
        self.sync, self.replicas = plan.sync, plan.mesh.dp_replicate
        self.works = [verify.build(SOURCE) for _ in range(self.replicas)]
        self.models = [work.model.train() for work in self.works]
        parts = verify.batches(SOURCE, plan.mesh.data)
        self.parts = [parts[r * plan.mesh.dp_shard : (r + 1) * plan.mesh.dp_shard] for r in range(self.replicas)]
        self.inner = [build_optimizer(plan.optimizer, list(model.parameters()), "fp32", []) for model in self.models]
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["lr"] = RATE
        self.global_ = nn.Parameter(flat(self.models[0]))
        self.outer = torch.optim.SGD([self.global_], lr=self.sync.lr, momentum=self.sync.momentum, nesterov=self.sync.nesterov)
        each = 256 * self.replicas
        self.padded = -(-self.global_.numel() // each) * each
        self.cuts = [torch.zeros(self.padded) for _ in range(self.replicas)]
        self.cut_of_mean = torch.zeros(self.padded)
        self.pending: tuple[int, list[Tensor]] | None = None

    def step(self, clip: float | None) -> None:
        for model, work, parts, optimizer in zip(self.models, self.works, self.parts, self.inner, strict=True):
            for part in parts:
                (compute_loss(Workload(model, part, work.loss)) / len(parts)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    def mean(self) -> Tensor:
        """Of what replicas have moved, as it arrives."""
        moved = [self.pad(self.global_.detach() - flat(model)) for model in self.models]
        if self.sync.format == "int8":
            for number, vector in enumerate(moved):
                exact = vector + self.cuts[number]
                moved[number] = eight_bits(exact)
                self.cuts[number] = exact - moved[number]
        total = moved[0].clone()
        for one in moved[1:]:
            total += one
        total /= self.replicas
        if self.sync.format == "int8":
            exact = total + self.cut_of_mean
            total = eight_bits(exact)
            self.cut_of_mean = exact - total
        return total[: self.global_.numel()]

    def join(self, step: int, *, last: bool) -> None:
        if self.pending is not None and (last or step >= self.pending[0] + self.sync.delay):
            self.finish()
        if step % self.sync.every == 0 or last:
            self.global_.grad = self.mean()
            self.pending = step, [flat(model) for model in self.models]
            if last or not self.sync.delay:
                self.finish()

    def finish(self) -> None:
        assert self.pending is not None
        self.outer.step()
        for model, before in zip(self.models, self.pending[1], strict=True):
            own = flat(model) - before + self.global_.detach() if self.sync.delay else self.global_.detach()
            nn.utils.vector_to_parameters(own.clone(), model.parameters())
        self.pending = None

    def pad(self, vector: Tensor) -> Tensor:
        return torch.cat([vector, torch.zeros(self.padded - vector.numel())])


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def eight_bits(vector: Tensor) -> Tensor:
    """As it is after rounding, 256 elements with one scale."""
    found = []
    for block in vector.split(256):
        scale = block.abs().max() / 127
        found.append(torch.round(block / scale) * scale if scale > 0 else torch.zeros_like(block))
    return torch.cat(found)


def play(rank: int, world: int, plan: Plan) -> Tensor:
    torch.set_num_threads(1)
    alone = Alone(plan)
    for step in range(1, STEPS + 1):
        alone.step(plan.clip)
        alone.join(step, last=step == STEPS)
    return alone.global_.detach()


def train(rank: int, world: int, plan: Plan) -> tuple[Tensor, list[int], list[int]]:
    """Weights at the end, the hash after each round, and how many messages each step and round sent."""
    torch.set_num_threads(1)
    ranks = start(plan, device="cpu")
    job = apply(verify.build(SOURCE), plan, ranks, learning_rate=RATE)
    assert job.outer is not None
    mine = [verify.batches(SOURCE, plan.mesh.data)[ranks.data_rank]]
    hashes, sent = [], []
    for step in range(1, STEPS + 1):
        with Sums() as messages:
            job.train_step(mine)
        job.outer.stepped(step, last=step == STEPS)
        sent.append(messages.number)
        hashes += [one.hash for one in job.outer.take_done()]
    job.close()
    return torch.cat([job.whole(name, p.detach()).reshape(-1) for name, p in job.named_parameters()]), hashes, sent


@pytest.mark.parametrize("name", one_in(2, CASES, "more replicas, or what comes late, of a round that is compared"))
def test_replicas_compute_what_one_process_computes(name: str, ranks: Callable[[int], PoolWorld]) -> None:
    mesh, sync = CASES[name]
    plan = plan_of(mesh, sync)
    (known,) = ranks(1).run(play, plan)
    found = ranks(mesh.world).run(train, plan)
    begun = flat(verify.build(SOURCE).model)
    assert (known - begun).abs().max() > 1e-2, "nothing was learned: nothing would be shown"
    for weights, hashes, sent in found:
        if mesh.dp_shard == 1:
            assert torch.equal(weights, known)
            assert sum(sent) == 0, "a step of a replica sent gradients"
        else:
            assert torch.allclose(weights, known, rtol=0, atol=1e-6)
        shard = [other[1] for other in found[:: mesh.dp_shard]]
        assert len(hashes) == -(-STEPS // sync.every) and (mesh.dp_shard > 1 or all(one == hashes for one in shard))
    hashes_of = [one[1] for one in found]
    for place in range(mesh.dp_shard):
        assert len({tuple(one) for one in hashes_of[place :: mesh.dp_shard]}) == 1


# ---------------------------------------------------------------- 8 bits


def test_what_rounding_cuts_off_comes_later() -> None:
    """A vector sent again and again: what arrived adds up to what was sent, to within one round's rounding."""
    torch.manual_seed(0)
    vector, cut, arrived = torch.randn(512) * torch.logspace(-4, 1, 512), torch.zeros(512), torch.zeros(512)
    for _ in range(50):
        arrived += codes.plain(codes.rounded(vector + cut, cut))
    once = codes.plain(codes.rounded(vector, torch.empty(512)))
    lost = once == 0
    assert lost.sum() > 20 and (arrived[lost] != 0).any(), "what is too small for one round arrives in some other"
    assert (arrived / 50 - vector).abs().max() < 0.05 * (once - vector).abs().max()


def test_codes_are_bytes_that_say_the_same_everywhere() -> None:
    torch.manual_seed(1)
    vector = torch.cat([torch.randn(256), torch.zeros(256), 1e-30 * torch.randn(256)])
    cut = torch.empty_like(vector)
    coded = codes.rounded(vector, cut)
    assert coded.dtype == torch.int8 and coded.numel() == codes.bytes_of(768) and codes.elements_of(coded.numel()) == 768
    assert torch.equal(codes.plain(coded), torch.cat([eight_bits(vector[:256]), torch.zeros(256), eight_bits(vector[512:])]))
    assert torch.equal(codes.plain(coded) + cut, vector) or torch.allclose(codes.plain(coded) + cut, vector, rtol=1e-6)


class Told:
    """An exchange in which the other replica says what it is told to."""

    replicas, place = 2, 0

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __call__(self, given: Tensor) -> Tensor:
        return torch.stack([given[0], self.change(given[0].clone())])


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_replicas_that_differ_are_noticed(format: str) -> None:
    def other_hash(row: Tensor) -> Tensor:
        row[-2:] += 1
        return row

    tag = torch.tensor([12345])
    assert Mean(Told(lambda row: row), 1024, format, torch.device("cpu"))(torch.ones(1024), tag).numel() == 1024
    with pytest.raises(UserError, match="replica 1 began the round from other weights than replica 0"):
        Mean(Told(other_hash), 1024, format, torch.device("cpu"))(torch.ones(1024), tag)


# ---------------------------------------------------------------- runs


def replicas_of(plan: Plan, number: int) -> Plan:
    return plan.with_(mesh=Mesh(dp_replicate=number), sync=Sync(every=4, format="int8", delay=2), accumulate=1)


def rounds(out: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(row["step"], row["hash"]) for row in rows if row["event"] == "round"]


def test_a_run_resumes_bit_for_bit_in_the_middle_of_an_exchange(tmp_path: Path, ranks: Callable[[int], PoolWorld]) -> None:
    """Saved after step 5: the exchange of step 4 is under way until step 6."""
    plan, asked = replicas_of(PLAN, 2), dict(SETTINGS)
    ranks(2).run(ten_steps, str(tmp_path / "whole"), plan, asked, False)
    ranks(2).run(ten_steps, str(tmp_path / "cut"), plan, asked, False)
    assert rounds(tmp_path / "whole") == rounds(tmp_path / "cut") and [step for step, _ in rounds(tmp_path / "whole")] == [4, 8, 10]
    from tests.cpu_dist.train_cases import cut_back

    cut_back(tmp_path / "cut", 5)
    ranks(2).run(ten_steps, str(tmp_path / "cut"), plan, {}, True)
    assert sums(tmp_path / "cut", 10) == sums(tmp_path / "whole", 10)
    assert losses(tmp_path / "cut")[-5:] == losses(tmp_path / "whole")[-5:]
    assert rounds(tmp_path / "cut")[-3:] == rounds(tmp_path / "whole")


@pytest.mark.slow(reason="runs of two and of four ranks; a run that resumes between two rounds is above")
def test_another_number_of_replicas_begins_a_round_from_the_saved_one(tmp_path: Path, ranks: Callable[[int], PoolWorld]) -> None:
    from tests.cpu_dist.train_cases import cut_back

    ranks(2).run(ten_steps, str(tmp_path / "run"), replicas_of(PLAN, 2), dict(SETTINGS), False)
    cut_back(tmp_path / "run", 5)
    done = ranks(4).run(ten_steps, str(tmp_path / "run"), replicas_of(PLAN, 4).with_(micro_batch=1), {}, True)
    assert done == [("done", 10)] * 4
    two = replicas_of(PLAN, 2).with_(mesh=Mesh(dp_replicate=2, dp_shard=2), micro_batch=1)
    cut_back(tmp_path / "run", 5)
    with pytest.raises(RankFailure, match="replicas of 1 ranks"):
        ranks(4).run(ten_steps, str(tmp_path / "run"), two, {}, True)
