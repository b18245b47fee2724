"""`foretell chaos` in its short form: one fault on two ranks, survived; and a model that computes something else once it is resumed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.plan import file as plans
from foretell.plan.types import Mesh
from foretell.runtime.chaos.trial import Trial
from tests import forks
from tests.cpu_dist.train_cases import PLAN, ROOT

MODEL = '''
import sys, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.out = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
    def forward(self, x):
        time.sleep(0.01)
        return self.out(self.drop(self.norm(self.first(x)))) + (FORGETS and "--resume" in sys.argv)

class Points:
    def __len__(self): return 512
    def __getitem__(self, i): return {"x": torch.full((4,), i / 512) + torch.rand(4)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


class Forked(forks.Command):
    """What a trial uses of a Popen."""

    def wait(self, timeout: float | None = None) -> int:
        self._wait(timeout or 60.0)
        assert self.returncode is not None
        return self.returncode


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forked from a process that has torch; what their ranks are is asked of the lock, which has the first one's process."""

    def start(self: Trial, *words: str) -> None:
        known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.child = Forked("run", *words, *self.request.words, *self.flags, env=known)  # type: ignore[assignment]

    def pids(self: Trial) -> dict[int, int]:
        lock = self.out / "run.lock"
        return {0: json.loads(lock.read_text())["pid"]} if lock.exists() else {}

    monkeypatch.setattr(Trial, "start", start)
    monkeypatch.setattr(Trial, "pids", pids)


def chaos(folder: Path, forgets: str, *words: str) -> int:
    (folder / "mine.py").write_text(MODEL.replace("FORGETS", forgets))
    plans.write(PLAN.with_(model={"model": str(folder / "mine.py")}, mesh=Mesh(dp_shard=2)), folder / "two.json")
    return main(["chaos", str(folder / "two.json"), "--device", "cpu", "--steps", "24", "--save-every", "3", "--out", str(folder / "out"), *words])


def test_a_fault_that_is_survived(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert chaos(tmp_path, "False", "--faults", "kill-cold") == 0
    out, said = capsys.readouterr()
    (row,) = map(json.loads, (tmp_path / "out" / "trials.jsonl").read_text().splitlines())
    assert row["good"] and row["losses"] and row["files"] and row["data"] and 0 < row["seconds"] < row["whole_seconds"] < time.monotonic() - began
    assert 6 <= row["step"] <= 12 and 0 <= row["steps_again"] <= 6, "a checkpoint every three steps, one of which may be under way"
    _, survived, *_, end = out.splitlines()
    assert survived.split()[:2] == ["kill-cold", "yes"] and "0, 0" in survived and "nothing was lost" in end and "kill-cold after step" in said
    assert chaos(tmp_path, "False", "--faults", "kill-cold", "--json") == 0  # it is all there
    assert json.loads(capsys.readouterr().out)["chaos"]["faults"][0]["survived"] == 1
    assert (tmp_path / "out" / "trials.jsonl").read_text().count("\n") == 1
    assert chaos(tmp_path, "True", "--faults", "kill-cold") == 2
    assert "trials of another model file" in capsys.readouterr().err


@pytest.mark.slow(reason="the same with a model that is not resumed as it was; what is not the twin's is compared in test_chaos.py of tests/pure")
def test_what_is_lost_is_told(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos(tmp_path, "True", "--faults", "kill-cold") == 1
    out, said = capsys.readouterr()
    assert "NO, 0 of 1" in out and "kill-cold: losses and checkpoint unlike the twin's" in out and "1 LOST something" in out and "LOST" in said
    (row,) = map(json.loads, (tmp_path / "out" / "trials.jsonl").read_text().splitlines())
    assert row["data"] and row["repeatable"] and not row["good"]


@pytest.mark.slow(reason="every process imports torch: the standby, processes that are left behind and the clock are as for a user")
def test_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos(tmp_path, "False", "--faults", "kill,clock") == 0, capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert [row["fault"] for row in rows] == ["kill", "clock"] and all(row["good"] and row["left"] == 0 for row in rows)
