"""A run goes on with as many ranks as there are: one that never comes back, a file that says how many. Losses are those of a run with all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.process.supervise.elastic import Elastic
from foretell.search.other_ranks import plan_for
from tests import forks
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.train_cases import PLAN, ROOT, losses, ten_steps

MODEL = '''
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 1)
    def forward(self, x, number):
        world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
        numbers = number.tolist() if type(number) is torch.Tensor else []
        dies = os.environ.get("DIES", "- - 0 0").split()
        if dies[:2] == [world, rank] and int(dies[2]) <= max(numbers, default=-1) < int(dies[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        if numbers and rank == "0":
            for said in os.environ.get("SAYS", "").split():
                size, first, ranks = said.split(":")
                if size == world and min(numbers) >= int(first):
                    open(os.environ["RANKS"], "w").write(ranks)
        time.sleep(float(os.environ.get("SLEEP", "0")))
        return self.out(self.norm(self.first(x)).relu())

class Points:
    def __iter__(self):
        for i in range(4000): yield {"x": torch.full((4,), (i % 64) / 64) ** torch.arange(1, 5), "number": i}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - batch["x"].sum(1, keepdim=True) - batch["number"][:, None] * 7919 % 13).square().mean()
'''
RUN: dict[str, Any] = {"lr": 1e-3, "schedule": "constant", "warmup": 0, "save_every": 3, "data": None}
FLAGS = ["--lr", "1e-3", "--schedule", "constant", "--warmup", "0", "--save-every", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One file for all tests: it is traced once."""
    path = tmp_path_factory.mktemp("model") / "mine.py"
    path.write_text(MODEL)
    return str(path)


def planned(folder: Path, model: str, world: int) -> Plan:
    plan = PLAN.with_(model={"model": model}, mesh=Mesh(dp_shard=world), micro_batch=2, accumulate=1)
    plans.write(plan, folder / "plan.json")
    return plan


def command(folder: Path, steps: int, *words: str, **env: str) -> forks.Command:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return forks.Command("run", str(folder / "plan.json"), "--steps", str(steps), *FLAGS, "--out", str(folder / "run"), *words, env=known)


def same_course(folder: Path, steps: int) -> None:
    found, twin = dict(losses(folder / "run")), dict(losses(folder / "twin"))
    assert list(found) == list(twin) == list(range(1, steps + 1))
    assert list(found.values()) == pytest.approx(list(twin.values()), rel=1e-6)


def test_the_planner_finds_the_same_training_for_other_ranks(tmp_path: Path, model: str) -> None:
    plan = planned(tmp_path, model, 4).with_(precision="fp32", clip=0.5)
    for world in (1, 2):
        found = plan_for(plan, (world,))
        assert found.mesh.world == world and found.global_batch == 8 and found.micro_batch == 2
        assert (found.clip, found.optimizer, found.precision) == (0.5, plan.optimizer, "fp32")
    with pytest.raises(UserError, match="no plan for 3 ranks"):
        plan_for(plan, (3,))


def test_a_rank_that_does_not_come_back_is_done_without(ranks: Any, tmp_path: Path, model: str) -> None:
    """Rank 1 of two dies in step 8 as often as it is started; one process goes on with the same samples."""
    plan = planned(tmp_path, model, 2)
    child = command(tmp_path, 16, "--max-restarts", "1", "--elastic", DIES="2 1 28 99")
    ranks(2).run(ten_steps, str(tmp_path / "twin"), plan, {**RUN, "steps": 16}, False)
    told, said = child.communicate(timeout=150)
    assert child.returncode == 0 and "done after step 16" in told, said
    same_course(tmp_path, 16)
    assert "ranks, since rank 1 did not come back after 1 restart: one process, micro-batches of 2, 2 a step" in said
    resized = next(row for row in rows(tmp_path / "run") if row["event"] == "resized")
    assert (resized["before"], resized["ranks"], resized["micro_batch"], resized["accumulate"]) == (2, 1, 2, 2) and resized["checkpoint"] in (3, 6)
    events = [row["event"] for row in rows(tmp_path / "run")]
    assert events[:2] == ["fault", "restarted"] and events[-3:] == ["fault", "resized", "restarted"]
    assert len(events) in (5, 7), events  # a restart that came as far as another checkpoint does not count
    kept = plans.read(tmp_path / "run" / "plan.json")
    assert kept.mesh == Mesh() and kept.global_batch == 4


@pytest.mark.slow(reason="one rank that goes for good is above; here they come back, too")
def test_four_ranks_become_two_and_one_and_four_again(ranks: Any, tmp_path: Path, model: str) -> None:
    """Rank 3 of four is gone; a file says that one is left, and later that four are there."""
    plan, steps = planned(tmp_path, model, 4), 40
    says = "2:80:1 1:200:4"  # with two ranks from sample 80 on there may be one; with one, from 200 on, four
    child = command(tmp_path, steps, "--max-restarts", "1", "--elastic", "--ranks", str(tmp_path / "there"), DIES="4 3 46 100",
                    SAYS=says, RANKS=str(tmp_path / "there"), SLEEP="0.08")  # fmt: skip
    ranks(4).run(ten_steps, str(tmp_path / "twin"), plan, {**RUN, "steps": steps}, False)
    told, said = child.communicate(timeout=300)
    assert child.returncode == 0, said
    same_course(tmp_path, steps)
    assert [(row["before"], row["ranks"]) for row in rows(tmp_path / "run") if row["event"] == "resized"] == [(4, 2), (2, 1), (1, 4)]
    assert "done" in told and plans.read(tmp_path / "run" / "plan.json").mesh == plan.mesh


def test_the_next_smaller_number_with_a_plan_is_taken(tmp_path: Path, model: str) -> None:
    said: list[str] = []
    asked: list[int] = []

    def plan_of(plan: Plan, worlds: Any) -> Plan:
        asked.append(worlds[0])
        if worlds[0] == 3:
            raise UserError("no plan for 3 ranks: none fits", "")
        return plan.with_(mesh=Mesh(dp_shard=worlds[0]), accumulate=4 // worlds[0])

    elastic = Elastic(planned(tmp_path, model, 4), plan_of, tmp_path / "run", said.append, tmp_path / "there")
    assert [elastic.most(world).mesh.world for world in (3, 2, 9, 4, 3)] == [2, 2, 4, 4, 2]  # type: ignore[union-attr]
    assert asked == [3, 2] and said == ["no plan for 3 ranks: none fits"]
    (tmp_path / "run").mkdir()
    plans.write(elastic.first.with_(clip=0.25), tmp_path / "run" / "plan.json")
    with pytest.raises(UserError, match=r"the plan differs .* in clip"):
        elastic.go_over(elastic.most(2))  # type: ignore[arg-type]


def test_a_file_counts_the_rank_that_was_given_up_until_it_is_written_anew(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    there = tmp_path / "there"
    there.write_text("4")
    elastic = Elastic(planned(tmp_path, model, 4), lambda plan, worlds: plan.with_(mesh=Mesh(dp_shard=worlds[0])), tmp_path, print, there)
    elastic.leave_out([1])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,7"
    with elastic:
        elastic.now = 3
        time.sleep(1.3)
        assert elastic.next is None
        there.write_text("4\n")
        deadline = time.monotonic() + 10
        while elastic.next is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert elastic.next.mesh.world == 4 and os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_bad_input_is_one_line(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path, model, 2)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "many").write_text("lots")
    restarts = ["--max-restarts", "1", "--elastic"]
    for words, told in (
        (["--elastic"], "--elastic goes on without a rank whose restarts are used up"), (["--ranks", "many"], "give --elastic too"),
        ([*restarts, "--no-save"], "--no-save has none"), ([*restarts, "--ranks", "many"], "--ranks many has 'lots' and not a number of ranks"),
        ([*restarts, "--ranks", "none/many"], "there is no folder none"),
    ):  # fmt: skip
        assert main(["run", "plan.json", "--device", "cpu", *words]) == 2, words
        assert told in capsys.readouterr().err
