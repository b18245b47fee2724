"""Optimizer states on the host with sharded parameters: on real ranks, bit for bit what the same plan gives without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.checkpoint import store
from foretell.checkpoint.read import Reader
from foretell.errors import UserError
from foretell.plan.types import MASTER, Mesh, Plan, Residency
from foretell.runtime.offload import shards
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld, RankFailure
from foretell.runtime.train import log as logs
from foretell.runtime.train.run import run
from foretell.trace.record.step import Workload

STEPS, WIDTH = 5, 12
EVERYTHING = {"blocks.*": "host", "rest": "host"}
TWO, FOUR = Mesh(dp_shard=2), Mesh(dp_replicate=2, dp_shard=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)
        self.gain = nn.Parameter(torch.rand(1, WIDTH))  # one row: some ranks have none of it

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks of uneven rows, a weight that is used at both ends, one that is frozen; perhaps blocks that share a weight,
    which are gathered together: the last one's weights when the second is called."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.inside = nn.Parameter(torch.randn(7, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.blocks[3].up.weight = self.blocks[1].up.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.inside
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) @ self.inside.t()


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return 30 * (outputs.float() - batch["x"].float()).square().mean()


def workload(tied: bool) -> Workload:
    torch.manual_seed(0)
    return Workload(Model(tied), {"x": sample(0, 0)}, loss)


def sample(step: int, number: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(1000 * step + number))


def plan(mesh: Mesh, **more: Any) -> Plan:
    return Plan(**{"model": {}, "hardware": "CPU", "precision": "fp32", "accumulate": 2, "mesh": mesh, **more})


def steps(job: Job, asked: Plan) -> list[tuple[float, float]]:
    found = []
    for step in range(STEPS):
        mine = [{"x": sample(step, m * job.ranks.data_size + job.ranks.data_rank)} for m in range(asked.accumulate)]
        result = job.train_step(mine)
        found.append((result.loss.item(), result.grad_norm.item() if result.grad_norm is not None else 0.0))
        if step == 2:  # a forward in between, without gradients
            found.append((job.evaluate(mine).item(), 0.0))
    return found


def numbers(rank: int, world: int, asked: Plan, tied: bool = False) -> dict[str, Any]:
    """Losses and norms of some steps; weights and states after them, whole."""
    torch.set_num_threads(1)
    job = apply(workload(tied), asked, start(asked, device="cpu"), learning_rate=1e-2)
    said = steps(job, asked)
    job.settle()
    weights = {name: job.whole(name, p.detach()) for name, p in job.named_parameters()}
    states = {
        f"{name}/{key}": job.whole(name, value.int() if value.dtype == torch.int16 else value)  # gloo has no int16
        for name, p in job.named_parameters()
        for key, value in job.optimizer.state.get(p, {}).items()
    }
    held = {}
    if isinstance(job.optimizer, Offloaded):
        held = {unit.path: (unit.tier, sum(unit.sizes.values())) for unit in job.optimizer.units}
        assert world == 1 or all(isinstance(job.optimizer.state[p]["exp_avg"], DTensor) for p in job.optimizer.parameters.values())
    job.close()
    return {"said": said, "weights": weights, "states": states, "held": held}


def alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["said"] == other["said"]
    assert one["said"][-1][0] < one["said"][0][0]
    for kind in ("weights", "states"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            assert torch.equal(value, other[kind][name]), name


AGAIN = pytest.mark.slow(reason="two more worlds; what is moved how is in the other cases")


@pytest.mark.parametrize(
    ("mesh", "more", "tied"),
    [
        pytest.param(TWO, {}, False, marks=AGAIN),
        pytest.param(TWO, {"clip": None, "accumulate": 1, "reshard": False, "states": {"blocks.1-2": "host"}}, False, marks=AGAIN),
        (TWO, {"clip": 0.1, "precision": "bf16-mixed", "blocks": {"blocks.*": Residency(mode="recompute")}}, True),
        pytest.param(Mesh(dp_replicate=2), {"clip": 0.1, "cpu_share": 0.5}, False, marks=AGAIN),
        pytest.param(FOUR, {"clip": 0.1}, True, marks=AGAIN),
        pytest.param(Mesh(dp_shard=3), {"clip": None}, False, marks=AGAIN),
        pytest.param(TWO, {"precision": MASTER, "clip": 0.1}, True, marks=AGAIN),
        (TWO, {"precision": MASTER, "state_format": "split", "cpu_share": 0.5}, False),
    ],
    ids=["shards", "no clipping", "mixed, recomputed", "replicas", "both", "three", "masters", "split"],
)  # fmt: skip
def test_moved_states_give_the_numbers_of_those_that_stay(
    ranks: Callable[[int], PoolWorld], mesh: Mesh, more: dict[str, Any], tied: bool
) -> None:
    moved = plan(mesh, **{"states": EVERYTHING, **more})
    there = ranks(mesh.world).run(numbers, moved, tied)
    kept = ranks(mesh.world).run(numbers, moved.with_(states={}, cpu_share=0.0), tied)
    for one, other in zip(there, kept, strict=True):
        alike(one, other)
    alike(there[0], there[-1])
    assert {tier for tier, _ in there[0]["held"].values()} >= {"host"}
    if mesh.dp_shard > 1:  # every rank has its own share of the elements
        total = sum(p.numel() for p in Model(tied).parameters() if p.requires_grad)
        found = [sum(elements for _, elements in one["held"].values()) for one in there[: mesh.dp_shard]]
        assert sum(found) == total and max(found) < 0.6 * total


def by_hand(rank: int, world: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    """bf16 weights with fp32 masters, as torch has the pieces: gradients of every rank rounded, summed in fp32, rounded."""
    torch.set_num_threads(1)
    model = workload(False).model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    said = []
    for step in range(STEPS):
        total = 0.0
        for parameter in masters.values():
            parameter.grad = torch.zeros_like(parameter)
        for number in range(count):
            x = sample(step, number).to(torch.bfloat16)
            found = loss(model(x), {"x": x})
            total += found.item()
            for name, grad in zip(trained, torch.autograd.grad(found, list(trained.values())), strict=True):
                masters[name].grad += grad.float()
        for parameter in masters.values():
            parameter.grad = (parameter.grad / count).to(torch.bfloat16).float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
        said.append(total / count)
    return said, {name: p.detach() for name, p in masters.items()}


def test_masters_beside_sharded_weights_are_what_one_process_has(ranks: Callable[[int], PoolWorld]) -> None:
    asked = plan(TWO, precision=MASTER, states=EVERYTHING, clip=None, accumulate=1)
    found = ranks(2).run(numbers, asked)[0]
    said, known = ranks(1).run(by_hand, 2)[0]
    losses = [one for number, (one, _) in enumerate(found["said"]) if number != 3]  # without the evaluation
    assert losses == pytest.approx(said, rel=1e-6)
    for name, master in known.items():  # updates of pieces of other lengths differ in the last bit
        kept = found["states"][f"{name}/master"]
        torch.testing.assert_close(kept, master, rtol=1e-5, atol=1e-7)
        assert torch.equal(found["weights"][name], kept.to(torch.bfloat16)), name


# ---------------------------------------------------------------------- checkpoints

TINY = {"layers": 2, "dim": 32, "heads": 2, "context": 16, "vocab_size": 257, "dropout": 0.0}
TRAINED = Plan(
    model={"model": "gpt-tiny", "overrides": TINY, "seq": 16}, hardware="CPU", micro_batch=2, accumulate=2, precision="fp32"
)
SETTINGS: dict[str, Any] = {"steps": 2, "data": str(Path(json.__file__).parent), "lr": 1e-2, "schedule": "constant", "warmup": 0,
                            "eval_batches": 2}  # fmt: skip


class Silent:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def go(rank: int, world: int, out: str, asked: Plan, settings: dict[str, Any], resume: bool) -> None:
    torch.set_num_threads(1)
    run(asked, settings, screen=Silent(), out=Path(out), resume=resume, device="cpu")


def trained_on(ranks: Any, out: Path, asked: Plan, steps: int, before: Path | None = None) -> Reader:
    """Train up to a step, perhaps from what another run saved; what it saves last."""
    if before is not None:
        shutil.copytree(before, out)
    ranks(asked.mesh.world).run(go, str(out), asked, {**SETTINGS, "steps": steps} if before is None else {"steps": steps}, before is not None)
    return Reader(store.complete(out / "checkpoints")[0])


def same(one: Reader, other: Reader) -> None:
    assert one.tensors == other.tensors and one.saved.step == other.saved.step
    for name in one.tensors:
        assert torch.equal(one.whole(name), other.whole(name)), name


@pytest.mark.slow(reason="runs of two ranks and one; places change in test_checkpoint_direct.py, ranks in test_states_in_codes.py")
@pytest.mark.parametrize(
    ("precision", "worlds"),
    [
        pytest.param("fp32", (2, 1), id="fp32"),
        pytest.param("fp32", (2, 1, 2), id="fp32, and back", marks=pytest.mark.slow(reason="one rank's are taken up by two as by another one")),
        pytest.param(MASTER, (2, 1, 2), id=MASTER, marks=AGAIN),
    ],
)
def test_checkpoints_go_between_ranks_and_places(ranks: Any, tmp_path: Path, precision: str, worlds: tuple[int, ...]) -> None:
    """Two ranks, then one, perhaps two again, each from what the last has saved: states on the host, on the device, on the host
    give the numbers of states on the device, on the host, on the device."""
    alone = TRAINED.with_(precision=precision)
    two = alone.with_(mesh=TWO, accumulate=1)
    before: dict[bool, Path] = {}
    for number, asked in enumerate(two if world == 2 else alone for world in worlds):
        found = {}
        for turn in (False, True):
            away = turn == (number % 2 == 0)
            out = tmp_path / f"{number}-{turn}"
            states = {"blocks.0-1": "host", "rest": "host"} if away else {}
            found[turn] = trained_on(ranks, out, asked.with_(states=states), 2 + number, before.get(turn))
            before[turn] = out
        same(found[False], found[True])
    losses = [[row["loss"] for row in logs.read(out / "log.jsonl") if row["event"] == "step"] for out in before.values()]
    assert losses[0] == losses[1] and len(losses[0]) == 1 + len(worlds)


# ---------------------------------------------------------------------- host memory


def ask(rank: int, world: int, sizes: list[int]) -> None:
    shards.agreed(start(plan(TWO), device="cpu"))(sizes[rank])


def test_ranks_of_a_machine_ask_for_host_memory_together(ranks: Callable[[int], PoolWorld]) -> None:
    there = shards.available()
    assert there is not None
    ranks(2).run(ask, [4096, 0])
    each = int(0.6 * there)
    with pytest.raises(RankFailure) as failed:
        ranks(2).run(ask, [each, each])
    assert all(isinstance(cause, UserError) for cause in failed.value.causes.values()) and len(failed.value.causes) == 2
    assert "2 ranks of this machine" in str(failed.value)
    with pytest.raises(RankFailure):
        ranks(2).run(ask, [2 * each, 0])
