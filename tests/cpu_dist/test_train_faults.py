"""Faults inside a run, injected for real: samples that are not numbers, code that raises, disks that are full.

What was trained before stays, what failed leaves no trace, and whose fault it was is told.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.checkpoint import store
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.observe import measure
from foretell.runtime.process import whose_error
from foretell.runtime.train import log as logs
from foretell.runtime.train import save
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.run import run
from tests.cpu_dist.train_cases import PLAN, SETTINGS, Quiet, every_line, go, losses, sums

MODEL = '''
import os, random, signal, sys
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    """Batch norm, dropout, noise of Python and numpy, and a mask with -inf."""
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, float("-inf")]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            self.out.bias.add_(random.random() + float(np.random.rand()))
    def forward(self, x, number):
        if self.training:
            self.calls = self.calls + 1
        noise = 1e-3 * (random.random() + float(np.random.rand()))
        if os.environ.get("RAISE_AT") in [str(int(one)) for one in number]:
            hurt(os.environ["RAISE_AS"])  # the line that is told
        poisons = os.environ.get("POISON_AT") in [str(int(one)) for one in number]
        x = self.drop(self.norm(self.first(x + torch.softmax(self.mask, 0)))) + noise
        if poisons:
            self.norm.running_mean.data[0] = float("nan")  # and the loss knows nothing of it
        return self.out(x)

def hurt(how):
    if how == "exit": sys.exit(3)
    if how == "shapes": torch.zeros(2, 3) @ torch.zeros(2, 3)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("no such thing")

class Points:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i):
        if os.environ.get("SAMPLE_RAISES") == str(i): hurt(os.environ["RAISE_AS"])
        x = torch.full((4,), i / self.count) + torch.arange(4.0)
        return {"x": x * float("nan") if os.environ.get("NAN_AT") == str(i) else x, "number": i}

def model(): return Net()
def data(split): return Points(64 if split == "train" else 8)
def loss(output, batch): return output.square().mean()
'''


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every_line(monkeypatch)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    for name in ("RAISE_AT", "RAISE_AS", "SAMPLE_RAISES", "NAN_AT", "POISON_AT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mine.py").write_text(MODEL)
    return PLAN.with_(model={"model": str(tmp_path / "mine.py")})


def sample_of(step: int) -> int:
    """A sample that the run sees first in that step, counted from 1."""
    import numpy as np

    from foretell.runtime.data.samples import shuffled

    return int(shuffled(64, 0, 0, np.array([4 * (step - 1) + 1]))[0])


RUN: dict[str, Any] = {"data": None, "warmup": 0, "save_every": 1, "keep": 20}


def everything(folder: Path, step: int) -> dict[str, Any]:
    """Tensors of a checkpoint, with what its rank keeps for itself."""
    saved = next(one for one in save.complete(folder / "checkpoints") if one.step == step)
    reader = save.Reader(saved)
    own = reader.own(0)["buffers"]
    return {name: reader.whole(name) for name in reader.tensors} | {f"buffer {name}": value for name, value in own.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# ---------------------------------------------------------------- not a number


class _Event:
    """An event of a device that is a step behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0


CROSSED = pytest.mark.slow(reason="each of the two is in the other cases, with the other's opposite")
EASIER = pytest.mark.slow(reason="known a step late, it is harder to leave no trace; known at once, it is in test_train_failures.py")


@pytest.mark.parametrize(
    ("optimizer", "behind"),
    [
        pytest.param("adamw-foreach", True, id="adamw-foreach-a step late"),
        pytest.param("adamw-fused", False, id="adamw-fused-at once", marks=EASIER),
        pytest.param("adamw-fused", True, id="adamw-fused-a step late", marks=CROSSED),
        pytest.param("adamw-foreach", False, id="adamw-foreach-at once", marks=CROSSED),
    ],
)
def test_a_sample_that_is_not_a_number_leaves_no_trace(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, behind: bool, optimizer: str
) -> None:
    """Running statistics hold NaN after the forward of such a sample, and a GPU is a step further when that is known."""
    if behind:
        monkeypatch.setattr(measure, "clock_of", lambda _: measure.DeviceClock(_Event, pin=False))
    plan = plan.with_(optimizer=optimizer)
    go(tmp_path / "good", plan, **RUN, steps=10)
    monkeypatch.setenv("NAN_AT", str(sample_of(5)))
    with pytest.raises(RunFailed, match="the loss of step 5 is nan"):
        go(tmp_path / "bad", plan, **RUN, steps=10)
    assert [one.step for one in save.complete(tmp_path / "bad" / "checkpoints")] == [5, 4, 3, 2, 1]
    before, after = everything(tmp_path / "good", 4), everything(tmp_path / "bad", 5)
    assert same(before, after) and int(after["buffer calls"]) == 8 and after["buffer norm.running_mean"].isfinite().all()
    done = go(tmp_path / "bad", plan, resume=True)  # the sample is passed
    assert done.step == 10 and done.measurement is not None
    assert done.measurement.eval_loss is not None and done.measurement.eval_loss == done.measurement.eval_loss
    assert int(everything(tmp_path / "bad", 10)["buffer calls"]) == 18


def test_checkpoints_that_hold_nan_are_never_good(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that became NaN without a trace in the loss: nothing of that is kept, and older checkpoints stay."""
    monkeypatch.setenv("POISON_AT", str(sample_of(4)))
    quiet = Quiet()
    with pytest.raises(RunFailed, match=r"the last checkpoint was not saved: .*norm.running_mean holds NaN or infinity") as caught:
        go(tmp_path / "a", plan, screen=quiet, **{**RUN, "keep": 1}, steps=8)
    assert "step 3 is kept" in caught.value.remedy
    (kept,) = save.complete(tmp_path / "a" / "checkpoints")
    assert kept.step == 3 and store.problems(kept.path) == []
    assert any(said.startswith("step 4: the checkpoint was not saved") for said in quiet.said)


@pytest.mark.slow(reason="a run that resumes; one whose checkpoint is damaged resumes in test_train_failures.py")
def test_a_broken_checkpoint_of_before_is_passed_over(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds NaN, written by something that did not look."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "is_finite", lambda *_: True)
        patch.setenv("POISON_AT", str(sample_of(5)))
        with pytest.raises(RunFailed, match="the held-out loss after step 5 is nan"):
            go(tmp_path / "a", plan, **RUN, steps=5)
    newest = save.complete(tmp_path / "a" / "checkpoints")[0]
    assert newest.step == 5 and any("holds NaN" in problem for problem in store.problems(newest.path))
    assert main(["ckpt", "verify", str(newest.path)]) == 1
    quiet = Quiet()
    assert go(tmp_path / "a", plan, screen=quiet, resume=True, steps=6).step == 6
    assert any("is not used" in said and "holds NaN" in said for said in quiet.said) and "resumed after step 4" in quiet.said


def test_what_was_infinite_from_the_start_may_stay_so(tmp_path: Path, plan: Plan) -> None:
    go(tmp_path / "a", plan, **RUN, steps=2)
    (newest, *_) = save.complete(tmp_path / "a" / "checkpoints")
    assert newest.about["nonfinite"] == ["rank/buffers/mask"] and store.problems(newest.path) == []
    assert go(tmp_path / "a", plan, resume=True, steps=4).step == 4


# ---------------------------------------------------------------- random numbers and the schedule


@pytest.mark.slow(reason="three runs; those that draw from torch go on to the bit in test_train.py")
def test_python_and_numpy_draw_the_same_again_and_in_a_resumed_run(tmp_path: Path, plan: Plan) -> None:
    go(tmp_path / "a", plan, **RUN, steps=6, eval_every=2)
    go(tmp_path / "b", plan, **RUN, steps=6)  # an evaluation draws too, and changes nothing
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    go(tmp_path / "c", plan, **RUN, steps=3, schedule_steps=6)
    go(tmp_path / "c", plan, resume=True, steps=6)
    assert losses(tmp_path / "c") == losses(tmp_path / "a") and sums(tmp_path / "c", 6) == sums(tmp_path / "a", 6)
    go(tmp_path / "d", plan, **RUN, steps=6, seed=1)
    assert losses(tmp_path / "d") != losses(tmp_path / "a")


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in logs.read(folder / "log.jsonl") if row["event"] == "step"]


@pytest.mark.parametrize("kind", [pytest.param("cosine", marks=pytest.mark.slow(reason="another shape by the same rule")), "wsd"])
def test_a_resumed_run_of_another_length_keeps_its_schedule(tmp_path: Path, plan: Plan, kind: str) -> None:
    asked = {**RUN, "warmup": None, "save_every": 0, "schedule": kind}
    asked.pop("warmup")
    go(tmp_path / "whole", plan, **{"warmup": None, **asked}, steps=60)
    go(tmp_path / "a", plan, **{"warmup": None, **asked}, steps=60, screen=Quiet({10: lambda: signal_stop()}))
    stopped = len(rates(tmp_path / "a"))
    assert stopped < 60
    quiet = Quiet()
    go(tmp_path / "a", plan, resume=True, steps=20, screen=quiet)
    assert rates(tmp_path / "a") == rates(tmp_path / "whole")[:20]
    assert any("stays on the 60-step schedule" in said for said in quiet.said)
    quiet = Quiet()
    go(tmp_path / "a", plan, resume=True, steps=64, screen=quiet)
    assert rates(tmp_path / "a")[:60] == rates(tmp_path / "whole")
    assert set(rates(tmp_path / "a")[60:]) == {rates(tmp_path / "whole")[-1]}
    assert any("ends at step 60" in said and "--schedule-steps 64" in said for said in quiet.said)


def signal_stop() -> None:
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow(reason="a resumed run of another schedule; one of another length is above")
def test_another_schedule_is_asked_for_and_told(tmp_path: Path, plan: Plan) -> None:
    go(tmp_path / "a", plan, **RUN, steps=4, schedule="cosine", schedule_steps=40)
    quiet = Quiet()
    go(tmp_path / "a", plan, resume=True, steps=6, schedule_steps=8, screen=quiet)
    told = next(said for said in quiet.said if "schedule changed (40 → 8 steps)" in said)
    found = rates(tmp_path / "a")
    assert f"step 5 has {found[4]:.3g}" in told and found[4] < found[3]
    with pytest.raises(UserError, match="at least one step"):
        go(tmp_path / "a", plan, resume=True, schedule_steps=0)


# ---------------------------------------------------------------- rows that cannot be written


def test_a_full_disk_costs_log_rows_and_not_the_run(tmp_path: Path, plan: Plan) -> None:
    ever = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = tmp_path / "a" / "log.jsonl"

    def full(more: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + more, ever[1]))

    quiet = Quiet({3: lambda: full(40), 6: lambda: resource.setrlimit(resource.RLIMIT_FSIZE, ever)})
    try:
        done = go(tmp_path / "a", plan, **{**RUN, "save_every": 0}, steps=10, no_save=True, screen=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, ever)
    assert done.status == "done" and done.step == 10
    assert [step for step, _ in losses(tmp_path / "a")] == [1, 2, 3, 7, 8, 9, 10]
    assert any("log.jsonl cannot be written: File too large; training continues" in said for said in quiet.said)
    assert any("3 rows of" in said and "could not be written" in said for said in quiet.said)
    assert log.read_text().splitlines()[4].startswith('{"event": "step", "step": 4')  # torn, and a line of its own


def test_a_logging_service_that_fails_is_left_out(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no route")

    told: list[str] = []
    log = logs.RunLog(tmp_path, [SimpleNamespace(write=fail, close=fail)], tell=told.append)
    for step in (1, 2):
        log.write("step", step, loss=1.0)
    log.close()
    assert len(told) == 1 and "gets no more rows: ConnectionError: no route" in told[0]
    assert len(logs.read(tmp_path / "log.jsonl")) == 2


# ---------------------------------------------------------------- code that raises


@pytest.mark.parametrize(
    ("how", "said"),
    [pytest.param("raise", "KeyError: 'no such thing'", marks=pytest.mark.slow(reason="the command below tells it")),
     pytest.param("shapes", "RuntimeError: mat1 and mat2 shapes cannot be multiplied", marks=pytest.mark.slow(reason="another exception")),
           ("exit", "SystemExit: 3")],
)  # fmt: skip
def test_what_the_model_raises_is_the_models_and_what_was_trained_is_saved(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    asked = {**RUN, "save_every": 0, "steps": 6}
    go(tmp_path / "good", plan, **asked)
    monkeypatch.setenv("RAISE_AT", str(sample_of(4)))
    monkeypatch.setenv("RAISE_AS", how)
    with pytest.raises(RunFailed) as caught:
        go(tmp_path / "a", plan, **asked)
    assert caught.value.exit_code == 1 and said in caught.value.problem
    assert caught.value.problem.startswith("rank 0 failed in step 4") and str(sample_of(4)) in caught.value.problem
    assert "mine.py:" in caught.value.problem and " in hurt)" in caught.value.problem and "in forward" in caught.value.detail
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [3]
    assert "the last checkpoint is of step 3" in caught.value.remedy
    monkeypatch.delenv("RAISE_AT")
    assert go(tmp_path / "a", plan, resume=True).step == 6
    assert losses(tmp_path / "a") == losses(tmp_path / "good") and sums(tmp_path / "a", 6) == sums(tmp_path / "good", 6)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow(reason="the same code, called in the rank itself")), 2])
def test_what_a_sample_raises_names_the_sample(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("SAMPLE_RAISES", str(sample_of(4)))
    monkeypatch.setenv("RAISE_AS", "raise")
    with pytest.raises(RunFailed, match=rf"rank 0 failed in step 4: sample {sample_of(4)} of .*mine.py:data raised KeyError") as caught:
        go(tmp_path / "a", plan, **{**RUN, "save_every": 0}, steps=6, workers=workers)
    assert "mine.py:" in caught.value.problem and caught.value.exit_code == 1
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [3]


@pytest.mark.slow(reason="one that is killed once is replaced in test_supervise.py; a loader takes five seconds to notice, and three die here")
def test_a_worker_that_is_killed_again_and_again_is_told_as_one(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLE_RAISES", str(sample_of(10)))
    monkeypatch.setenv("RAISE_AS", "kill")
    with pytest.raises(RunFailed, match=r"a process that prepares samples of .*mine\.py:data died"):
        go(tmp_path / "a", plan, **{**RUN, "save_every": 0}, steps=10, workers=1)
    assert save.complete(tmp_path / "a" / "checkpoints")


def test_the_command_exits_with_one_line_and_status_1(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans.write(plan, tmp_path / "plan.json")
    monkeypatch.setenv("RAISE_AT", str(sample_of(2)))
    monkeypatch.setenv("RAISE_AS", "raise")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "plan.json", "--steps", "3", "--out", "a", "--device", "cpu"]) == 1
    told = capsys.readouterr().err
    assert "error: rank 0 failed in step 2: KeyError: 'no such thing'" in told and "bug" not in told and "Traceback" not in told


def _two(rank: int, world: int, out: str, plan: Plan, env: dict[str, str], resume: bool) -> str:
    os.environ.update(env)
    try:
        asked = {} if resume else {**SETTINGS, **RUN, "save_every": 0, "steps": 6}
        run(plan, asked, screen=Quiet(), out=Path(out), resume=resume, device="cpu")
    except RunFailed as error:
        return f"{error.exit_code} {error}"
    finally:
        for name in env:
            del os.environ[name]
    return "done"


@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        pytest.param("RAISE_AT", Mesh(dp_shard=2), id="model-sharded",
                     marks=pytest.mark.slow(reason="a model raises on one rank above, and of several ranks one raises here")),
        pytest.param("SAMPLE_RAISES", Mesh(dp_replicate=2), id="sample-replicated"),
        pytest.param("RAISE_AT", Mesh(dp_replicate=2), id="model-replicated", marks=CROSSED),
        pytest.param("SAMPLE_RAISES", Mesh(dp_shard=2), id="sample-sharded", marks=CROSSED),
    ],
)  # fmt: skip
def test_code_that_raises_on_one_rank_is_named_and_all_ranks_save(
    ranks: Any, tmp_path: Path, plan: Plan, mesh: Mesh, where: str
) -> None:
    """The other rank waits in a collective that never comes; what was trained is saved all the same."""
    plan = plan.with_(mesh=mesh, accumulate=1)
    assert ranks(2).run(_two, str(tmp_path / "good"), plan, {}, False) == ["done", "done"]
    (at,) = {sample_of(4)}
    env = {where: str(at), "RAISE_AS": "raise"}
    told = ranks(2).run(_two, str(tmp_path / "a"), plan, env, False)
    assert all(said.startswith("1 rank ") and "failed in step 4" in said and "mine.py:" in said for said in told), told
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [3]
    assert ranks(2).run(_two, str(tmp_path / "a"), plan, {}, True) == ["done", "done"]
    assert losses(tmp_path / "a") == losses(tmp_path / "good") and sums(tmp_path / "a", 6) == sums(tmp_path / "good", 6)


def _raised(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_whose_an_exception_is() -> None:
    def theirs() -> None:
        json.loads("{")  # a library that this file, which is no part of foretell, calls

    assert whose_error.is_ours(_raised(lambda: plans.from_json(None)))  # type: ignore[arg-type]
    assert not whose_error.is_ours(_raised(lambda: save.Members(SimpleNamespace(gather=lambda _: theirs())).gather(1)))  # type: ignore[arg-type]
    assert not whose_error.is_ours(_raised(theirs))
