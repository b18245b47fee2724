"""Steps whose loss or gradient is no number, or a spike: undone to the bit, told as data or hardware, passed over, and gone back from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan, Sync
from foretell.runtime.observe import measure
from foretell.runtime.train import save
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.run import run
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.test_train_faults import _Event as LateEvent
from tests.cpu_dist.test_train_faults import everything, same
from tests.cpu_dist.train_cases import PLAN, Quiet, go, losses

MODEL = '''
import os
import torch
from torch import nn

class Hurt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g * float("nan")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
    def forward(self, x, number):
        numbers = [str(int(one)) for one in number] if type(number) is torch.Tensor else []
        x = self.out(self.drop(self.norm(self.first(x))))
        if set(numbers) & set(os.environ.get("NAN_AT", "").split()): x = x * float("nan")
        if set(numbers) & set(os.environ.get("SPIKE_AT", "").split()): x = x * 100
        if set(numbers) & set(os.environ.get("BACK_AT", "").split()): x = Hurt.apply(x)
        if set(numbers) & set(os.environ.get("FLIP_AT", "").split()) and once(): x = x * float("inf")
        return x

def once():
    """As a bit that flips: it does not come again."""
    try:
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

class Points:
    """In its own order; a twin leaves samples out that the other passes over."""
    def __iter__(self):
        left = [int(one) for one in os.environ.get("LEFT_OUT", "0 0").split()]
        for i in range(400):
            if not left[0] <= i < left[1]:
                yield {"x": torch.full((4,), (i % 64) / 64) + torch.arange(4.0), "number": i}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - 1).square().mean()
'''
RUN: dict[str, Any] = {"data": None, "lr": 1e-2, "schedule": "constant", "warmup": 0, "save_every": 1, "keep": 30, "steps": 9}
NAMES = ("NAN_AT", "SPIKE_AT", "BACK_AT", "FLIP_AT", "LEFT_OUT", "ONCE")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    torch.set_num_threads(1)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.py").write_text(MODEL)
    return PLAN.with_(model={"model": str(tmp_path / "mine.py")})


def numbers(plan: Plan, step: int, data_rank: int = 0) -> list[int]:
    """Samples of a data rank in a step, counted from 1."""
    ranks, size = plan.mesh.data, plan.micro_batch
    first = (step - 1) * plan.accumulate * ranks * size
    return [first + (at * ranks + data_rank) * size + one for at in range(plan.accumulate) for one in range(size)]


LATE = pytest.mark.slow(reason="a device that is a step behind, with the other way of holding back an update")


@pytest.mark.parametrize(
    ("optimizer", "behind"),
    [("adamw-foreach", True), ("adamw-fused", False), pytest.param("adamw-fused", True, marks=LATE), pytest.param("momentum", False, marks=LATE)],
)
def test_the_step_is_undone_to_the_bit_and_the_run_goes_on(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, optimizer: str, behind: bool
) -> None:
    """Its twin ended there, as runs do that do not ask for more, and was resumed by hand."""
    if behind:
        monkeypatch.setattr(measure, "clock_of", lambda _: measure.DeviceClock(LateEvent, pin=False))
    plan = plan.with_(optimizer=optimizer)
    monkeypatch.setenv("NAN_AT", str(numbers(plan, 5)[1]))
    with pytest.raises(RunFailed, match="the loss of step 5 is nan"):
        go(tmp_path / "twin", plan, **RUN)
    go(tmp_path / "twin", plan, resume=True)
    quiet = Quiet()
    assert go(tmp_path / "run", plan, screen=quiet, **RUN, bad_steps=1).step == 9
    found, twin = losses(tmp_path / "run"), losses(tmp_path / "twin")
    assert [step for step, _ in found] == list(range(1, 10)) and found[4][1] == "nan"
    assert found[:4] + found[5:] == [one for one in twin if one[0] != 5]
    assert all(same(everything(tmp_path / "run", step), everything(tmp_path / "twin", step)) for step in (4, 9))
    assert int(everything(tmp_path / "run", 9)["buffer norm.num_batches_tracked"]) == 2 * 8  # neither the bad step nor the look at it counts
    (row,) = rows(tmp_path / "run")
    assert (row["event"], row["step"], row["what"], row["value"], row["verdict"], row["rank"]) == ("bad step", 5, "loss", "nan", "data", 0)
    assert row["samples"] == numbers(plan, 5) and (row["first_sample"], row["last_sample"]) == (16, 19)
    assert any(said.startswith("step 5: the loss is nan: it is the samples of rank 0") and "16 to 19" in said for said in quiet.said)


def test_a_number_that_does_not_come_again_is_the_hardware(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    at = str(numbers(plan, 4)[0])
    monkeypatch.setenv("NAN_AT", at)
    go(tmp_path / "twin", plan, **RUN, bad_steps=1)
    monkeypatch.delenv("NAN_AT")
    monkeypatch.setenv("FLIP_AT", at)
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    quiet = Quiet()
    go(tmp_path / "run", plan, screen=quiet, **RUN, bad_steps=1)
    (row,) = rows(tmp_path / "run")
    assert row["verdict"] == "hardware" and row["rank"] == 0 and row["host"] and 0 < row["again"] < 100 and row["samples"] is None
    assert any("it is the hardware of rank 0 on" in said and "the second time" in said for said in quiet.said)
    assert losses(tmp_path / "run")[4:] == losses(tmp_path / "twin")[4:]
    assert same(everything(tmp_path / "run", 9), everything(tmp_path / "twin", 9))


def test_a_spike_counts_as_bad(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of 30 times the median; the same samples as NaN are the twin. Without --bad-steps it ends the run."""
    asked = {**RUN, "steps": 15}
    at = str(numbers(plan, 13)[0])
    monkeypatch.setenv("NAN_AT", at)
    go(tmp_path / "twin", plan, **asked, bad_steps=1)
    monkeypatch.delenv("NAN_AT")
    monkeypatch.setenv("SPIKE_AT", at)
    go(tmp_path / "plain", plan, **asked)
    go(tmp_path / "run", plan, **asked, bad_steps=1, spike=30.0)
    (row,) = rows(tmp_path / "run")
    assert row["step"] == 13 and row["verdict"] == "data" and row["value"] > row["limit"] > 0 and row["again"] == pytest.approx(row["value"])
    assert losses(tmp_path / "run")[13:] == losses(tmp_path / "twin")[13:] != losses(tmp_path / "plain")[13:]
    assert same(everything(tmp_path / "run", 15), everything(tmp_path / "twin", 15))
    with pytest.raises(RunFailed, match=r"the loss of step 13 is \d+.*: above .*, which is 30 times the median"):
        go(tmp_path / "end", plan, **asked, spike=30.0)


def _ranked(rank: int, world: int, out: str, plan: Plan, env: dict[str, str], asked: dict[str, Any]) -> list[str]:
    torch.set_num_threads(1)
    os.environ.update(env)
    quiet = Quiet()
    try:
        run(plan, {**RUN, **asked}, screen=quiet, out=Path(out), device="cpu")
    except RunFailed as error:
        return [str(error)]
    finally:
        for name in env:
            del os.environ[name]
    return quiet.said


@pytest.mark.parametrize(
    ("name", "mesh", "verdict"),
    [
        ("NAN_AT", Mesh(dp_shard=2), "data"), ("FLIP_AT", Mesh(dp_replicate=2), "hardware"),
        pytest.param("BACK_AT", Mesh(dp_shard=2), "data", marks=pytest.mark.slow(reason="another number of the same step")),
        pytest.param("FLIP_AT", Mesh(dp_shard=2), "hardware", marks=pytest.mark.slow(reason="another mesh")),
    ],
)  # fmt: skip
def test_another_rank_tells_data_from_hardware(ranks: Any, tmp_path: Path, plan: Plan, name: str, mesh: Mesh, verdict: str) -> None:
    """Rank 1's samples are computed by rank 0. What is left is what a run has whose same samples are no numbers on the way there."""
    plan = plan.with_(mesh=mesh)
    at = str(numbers(plan, 5, 1)[2])
    ranks(2).run(_ranked, str(tmp_path / "twin"), plan, {"NAN_AT": at}, {"bad_steps": 3})
    said, _ = ranks(2).run(_ranked, str(tmp_path / "run"), plan, {name: at, "ONCE": str(tmp_path / "once")}, {"bad_steps": 3})
    (row,) = rows(tmp_path / "run")
    assert (row["verdict"], row["rank"], row["step"]) == (verdict, 1, 5), row
    assert row["samples"] == (numbers(plan, 5, 1) if verdict == "data" else None)
    whose = "the samples of rank 1" if verdict == "data" else f"the hardware of rank 1 on {row['host']}"
    assert any(f"it is {whose}" in line for line in said), said
    assert row["by"] == (None if name == "BACK_AT" else 0)
    assert losses(tmp_path / "run")[5:] == losses(tmp_path / "twin")[5:]
    assert same(everything(tmp_path / "run", 9), everything(tmp_path / "twin", 9))


@pytest.mark.parametrize("stops", [False, True])
def test_too_many_go_back_to_a_checkpoint_and_past_their_samples(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """Steps 5 and 6 are bad, one may be: back to step 4, and the order goes on with the samples of step 7. A twin never had those."""
    asked = {**RUN, "save_every": 2}
    monkeypatch.setenv("LEFT_OUT", "16 24")
    go(tmp_path / "twin", plan, **asked)
    monkeypatch.delenv("LEFT_OUT")
    monkeypatch.setenv("NAN_AT", "17 22")
    quiet = Quiet()
    go(tmp_path / "run", plan, screen=quiet, **{**asked, "steps": 5 if stops else 9, "schedule_steps": 9}, bad_steps=1)
    if stops:  # the one that was passed over counts in a resumed run too
        go(tmp_path / "run", plan, screen=quiet, resume=True, steps=9)
    assert losses(tmp_path / "run") == losses(tmp_path / "twin")
    assert same(everything(tmp_path / "run", 9), everything(tmp_path / "twin", 9))
    assert [row["event"] for row in rows(tmp_path / "run")] == ["bad step", "bad step", "rollback"]
    back = rows(tmp_path / "run")[-1]
    assert (back["checkpoint"], back["bad_steps"], back["first_sample"], back["last_sample"]) == (4, [5, 6], 16, 23)
    (kept,) = [one for one in save.complete(tmp_path / "run" / "checkpoints") if one.step == 4]
    assert kept.about["data"]["position"] == 24  # a run that is killed right after it does not come to them either
    assert any("back to the checkpoint of step 4; samples 16 to 23" in said for said in quiet.said)


def test_bad_again_soon_after_it_ends(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAN_AT", "17 22 33 38")
    with pytest.raises(RunFailed, match=r"is nan: first in the forward of the model.*; 2 steps were bad within 100") as failed:
        go(tmp_path / "run", plan, **RUN, bad_steps=1)
    assert failed.value.exit_code == 1 and [row["event"] for row in rows(tmp_path / "run")].count("rollback") == 1


def test_states_elsewhere_are_as_they_were(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan.with_(states={"rest": "host"})
    monkeypatch.setenv("NAN_AT", str(numbers(plan, 5)[1]))
    with pytest.raises(RunFailed):
        go(tmp_path / "twin", plan, **RUN)
    go(tmp_path / "twin", plan, resume=True)
    go(tmp_path / "run", plan, **RUN, bad_steps=1)
    assert losses(tmp_path / "run")[5:] == losses(tmp_path / "twin")[-4:]
    assert same(everything(tmp_path / "run", 9), everything(tmp_path / "twin", 9))


def test_bad_input_is_one_line(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plans.write(plan, tmp_path / "plan.json")
    for words, said in ((["--bad-steps", "-1"], "bad_steps must not be negative"), (["--spike", "0.5"], "a spike is more than the median")):
        assert main(["run", "plan.json", "--device", "cpu", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UserError, match="--spike needs replicas that sum gradients"):
        go(tmp_path / "a", plan.with_(mesh=Mesh(dp_replicate=2), sync=Sync(every=5)), **RUN, spike=3.0)
    with pytest.raises(UserError, match="--bad-steps needs updates that wait for backward"):
        go(tmp_path / "a", plan.with_(states={"rest": "host"}, clip=None), **RUN, bad_steps=1)
