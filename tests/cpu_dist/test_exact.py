"""`--exact`: losses and weights have the same bits on any number of ranks that divides the micro-batches of a step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoint.read import Reader
from foretell.checkpoint.store import look
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan, Residency
from foretell.runtime.data.samples import RankSamples
from foretell.runtime.parallel import exact_plans
from foretell.runtime.parallel.exact import TreeSum, subtrees
from tests.cpu_dist.test_elastic import MODEL as ELASTIC_MODEL
from tests.cpu_dist.test_elastic import command
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.train_cases import PLAN, SETTINGS, Quiet, go, losses, ten_steps

STEPS = 8
EXACT: dict[str, Any] = {**SETTINGS, "steps": STEPS, "exact": True, "save_every": 0}


def on(world: int, leaves: int, **changed: Any) -> Plan:
    return PLAN.with_(mesh=Mesh(dp_replicate=world), micro_batch=1, accumulate=leaves // world, clip=0.5, **changed)


def weights(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """Every tensor of a checkpoint, weights and moments, as its bytes, however ranks have shared the writing."""
    reader = Reader(look(run / "checkpoints" / f"step-{step:08d}"))
    return {name: reader.whole(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in reader.tensors}


def test_micro_batches_are_added_along_one_tree_whoever_has_them() -> None:
    """In numbers whose sum depends on the order, each split of 1 to 24 micro-batches gives what one rank gives."""
    draw = random.Random(7)
    orders = set()
    for leaves in range(1, 25):
        values = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-6, 6) for _ in range(leaves)]
        sums = set()
        for world in (number for number in range(1, leaves + 1) if leaves % number == 0):
            joined: TreeSum[float] = TreeSum(lambda a, b: a + b)
            for rank in range(world):
                own: TreeSum[float] = TreeSum(lambda a, b: a + b)
                count = leaves // world
                for leaf in range(rank * count, (rank + 1) * count):
                    own.push(leaf, 1, values[leaf])
                assert [part[:2] for part in own.parts] == subtrees(rank * count, count)
                for part in own.parts:
                    joined.push(*part)
            sums.add(joined.total())
        assert len(sums) == 1, leaves
        orders.add(sums.pop() == sum(values))
    assert orders == {True, False}, "adding from left to right gives other bits"


def test_ranks_have_micro_batches_that_follow_each_other() -> None:
    for world in (1, 2, 3, 4, 6, 12):
        shares = [RankSamples(micro_batch=2, accumulate=12 // world, ranks=world, rank=rank, together=True) for rank in range(world)]
        assert [row.tolist() for share in shares for row in share.numbers(48)] == [[48 + 2 * leaf, 49 + 2 * leaf] for leaf in range(12)]


@pytest.mark.parametrize(
    ("leaves", "worlds"), [(6, (2, 3)), pytest.param(12, (2, 3, 4), marks=pytest.mark.slow(reason="more ranks of more micro-batches"))]
)  # fmt: skip
def test_any_number_of_ranks_has_the_same_bits(ranks: Any, tmp_path: Path, leaves: int, worlds: tuple[int, ...]) -> None:
    """Steps with clipping, dropout and AdamW; three ranks have a subtree each, two and four of six and twelve micro-batches have two."""
    go(tmp_path / "1", on(1, leaves), **EXACT)
    first, kept = losses(tmp_path / "1"), weights(tmp_path / "1")
    assert len(first) == STEPS and first[-1][1] < first[0][1] and len(kept) > 20
    for world in worlds:
        out = tmp_path / str(world)
        assert ranks(world).run(ten_steps, str(out), on(world, leaves), EXACT, False) == [("done", STEPS)] * world
        assert losses(out) == first and weights(out) == kept, world
    ranks(2).run(ten_steps, str(tmp_path / "plain"), on(2, leaves), {**EXACT, "exact": False}, False)
    assert weights(tmp_path / "plain") != kept, "without --exact it is not so"


@pytest.mark.slow(reason="fp32 and its clipping are above")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_low_precision_has_the_same_bits(ranks: Any, tmp_path: Path, precision: str) -> None:
    found = []
    for world in (1, 2, 4):
        ranks(world).run(ten_steps, str(tmp_path / str(world)), on(world, 8, precision=precision), {**EXACT, "eval_every": 4}, False)
        found.append((losses(tmp_path / str(world)), weights(tmp_path / str(world))))
    assert found[0] == found[1] == found[2]


def test_an_exact_run_is_resumed_on_other_ranks_and_under_no_other_bits(ranks: Any, tmp_path: Path) -> None:
    asked = {**EXACT, "steps": 6, "schedule_steps": 6}
    ranks(2).run(ten_steps, str(tmp_path / "a"), on(2, 4), {**asked, "steps": 3}, False)
    torch.set_num_threads(2)
    go(tmp_path / "a", on(1, 4), resume=True, steps=6)
    assert torch.get_num_threads() == 1, "the run's own number of threads, whatever the process has"
    go(tmp_path / "b", on(1, 4), **asked)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and weights(tmp_path / "a", 6) == weights(tmp_path / "b", 6)
    with pytest.raises(UserError, match="the run is --exact, and the plan computes other bits: it differs in micro_batch"):
        go(tmp_path / "b", on(1, 4).with_(micro_batch=2, accumulate=2), resume=True, steps=8)


@pytest.mark.slow(reason="ranks that change are in test_elastic.py, and resuming on others with the same bits is above")
def test_four_ranks_become_two_and_one_and_four_again_with_the_same_bits(ranks: Any, tmp_path: Path) -> None:
    model = tmp_path / "mine.py"
    model.write_text(ELASTIC_MODEL)
    plan, steps = PLAN.with_(model={"model": str(model)}, mesh=Mesh(dp_replicate=4), micro_batch=2, accumulate=1), 40
    plans.write(plan, tmp_path / "plan.json")
    says = "2:80:1 1:200:4"
    there = str(tmp_path / "there")
    child = command(tmp_path, steps, "--exact", "--max-restarts", "1", "--elastic", "--ranks", there, DIES="4 3 46 100", SAYS=says, RANKS=there,
                    SLEEP="0.08")  # fmt: skip
    asked = {"lr": 1e-3, "schedule": "constant", "warmup": 0, "save_every": 3, "data": None, "steps": steps, "exact": True}
    ranks(4).run(ten_steps, str(tmp_path / "twin"), plan, asked, False)
    _, said = child.communicate(timeout=300)
    assert child.returncode == 0, said
    assert [(row["before"], row["ranks"]) for row in rows(tmp_path / "run") if row["event"] == "resized"] == [(4, 2), (2, 1), (1, 4)]
    assert losses(tmp_path / "run") == losses(tmp_path / "twin") and len(losses(tmp_path / "run")) == steps
    assert weights(tmp_path / "run", steps) == weights(tmp_path / "twin", steps)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mesh": Mesh(dp_shard=2)}, "has dp_shard 2"),
        ({"mesh": Mesh(dp_replicate=2, tp=2)}, "has tp 2"),
        ({"precision": "fp16-mixed"}, "has precision fp16-mixed"),
        ({"blocks": {"blocks.*": Residency(mode="host")}}, "moves weights, states or activations"),
    ],
)
def test_plans_that_cannot_be_exact_are_one_line(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"--exact sums the gradients of whole replicas, and the plan {told}"):
        exact_plans.refuse(PLAN.with_(**changed))


def test_what_remembers_other_micro_batches_is_refused(tmp_path: Path) -> None:
    for layer, told in (("nn.BatchNorm1d(4)", "the running statistics of norm"), ("Counts()", "the values of seen of Counts")):
        source = f"""
import torch
from torch import nn
class Counts(nn.Module):
    def __init__(self): super().__init__(); self.register_buffer("seen", torch.zeros(4))
    def forward(self, x): self.seen.add_(x.detach().mean(0)); return x
class Net(nn.Module):
    def __init__(self): super().__init__(); self.norm, self.out = {layer}, nn.Linear(4, 1)
    def forward(self, x): return self.out(self.norm(x))
class Points:
    def __len__(self): return 64
    def __getitem__(self, i): return {{"x": torch.full((4,), i / 64)}}
def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
"""
        path = tmp_path / "mine.py"
        path.write_text(source)
        with pytest.raises(UserError, match=f"--exact needs a model without memory of earlier micro-batches, and {told} are one"):
            go(tmp_path / layer[:5], PLAN.with_(model={"model": str(path)}), **{**EXACT, "data": None})


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plans.write(on(2, 4), tmp_path / "plan.json")
    plans.write(PLAN.with_(mesh=Mesh(dp_shard=2)), tmp_path / "sharded.json")
    for words, told in (
        (["plan.json", "--replan", "--max-restarts", "1"], "--exact keeps every bit"), (["sharded.json"], "and the plan has dp_shard 2"),
    ):  # fmt: skip
        assert main(["run", *words, "--exact", "--device", "cpu"]) == 2, words
        assert told in capsys.readouterr().err
    with pytest.raises(UserError, match="4 micro-batches of a step do not divide by it"):
        exact_plans.plan_for(on(2, 4), 3)


def test_a_run_says_nothing_of_predictions_that_are_of_other_messages(tmp_path: Path) -> None:
    plan = on(1, 4).with_(predicted={"step_seconds": 1.0, "memory_bytes": 1})
    screen = Quiet()
    done = go(tmp_path / "run", plan, screen=screen, **{**EXACT, "steps": 2})
    kept = plans.read(done.folder / "plan.json")
    assert not kept.predicted and "not predicted" in kept.notes[-1] and not any("predicted" in line for line in screen.lines)
