"""Device memory runs out in a step: smaller micro-batches of the same samples, the same curve. Code of a model raises what CUDA raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from foretell.plan import file as plans
from foretell.plan.types import Mesh
from foretell.runtime.train import save
from foretell.runtime.train.numbers.guard import RunFailed
from tests.cpu_dist.test_supervise import command, rows
from tests.cpu_dist.train_cases import PLAN, Quiet, go, losses

MODEL = '''
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out, self.seen = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 1), 0
        self.register_buffer("steps", torch.zeros(()))
    def forward(self, x):
        self.steps += 1
        hidden = self.norm(self.first(x))
        self.seen += len(x) if type(x) is torch.Tensor else 0
        if self.seen > 40 and len(x) > int(os.environ.get("ROOM", "99")) and os.environ.get("RANK", "0") == os.environ.get("ON", "0"):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)}.00 GiB.")
        return self.out(hidden.relu())

class Points:
    def __len__(self): return 96
    def __getitem__(self, i): return {"x": torch.full((4,), i / 96) ** torch.arange(1, 5)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - batch["x"].sum(1, keepdim=True)).square().mean()
'''
STEPS = 7
RUN: dict[str, Any] = {"steps": STEPS, "lr": 1e-2, "save_every": 2, "data": None}


def planned(folder: Path, model: str = MODEL, **changes: Any) -> Any:
    (folder / "mine.py").write_text(model)
    return PLAN.with_(model={"model": str(folder / "mine.py")}, micro_batch=6, accumulate=2, **changes)


LOADED = pytest.mark.slow(reason="samples from another process, as in test_train_faults.py")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=LOADED)])
def test_one_process_goes_on_with_smaller_micro_batches(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 samples do not fit, nor 3; one does. The step that failed is computed anew, buffers and all, and nothing comes twice."""
    plan = planned(tmp_path)
    go(tmp_path / "twin", plan, **RUN)
    monkeypatch.setenv("ROOM", "2")
    screen = Quiet()
    go(tmp_path / "run", plan, screen=screen, **RUN, workers=workers)
    told = [line for line in screen.said if "device memory ran out" in line]
    assert len(told) == 2 and told[0].startswith("step 4: ") and "Tried to allocate 6.00 GiB" in told[0] and "micro-batches of 3, 4 a step" in told[0]
    assert "micro-batches of 1, 12 a step" in told[1]
    assert losses(tmp_path / "run")[:3] == losses(tmp_path / "twin")[:3]
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses(tmp_path / "run")] == pytest.approx([loss for _, loss in losses(tmp_path / "twin")], rel=1e-5)
    kept = plans.read(tmp_path / "run" / "plan.json")
    assert (kept.micro_batch, kept.accumulate, kept.predicted) == (1, 12, {}) and kept.notes[-1] == "micro-batches of 3 ran out of device memory"
    assert [row["micro_batch"] for row in rows(tmp_path / "run")] == [3, 1]
    assert _buffer(tmp_path / "run") == 3 * 2 + 4 * 12  # as if the failed tries had not been
    monkeypatch.delenv("ROOM")
    go(tmp_path / "run", kept, resume=True, steps=STEPS + 2)
    go(tmp_path / "twin", plan, resume=True, steps=STEPS + 2)
    assert [loss for _, loss in losses(tmp_path / "run")] == pytest.approx([loss for _, loss in losses(tmp_path / "twin")], rel=1e-5)


def _buffer(run: Path) -> float:
    (file,) = save.complete(run / "checkpoints")[0].path.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        return float(tensors.get_tensor(next(name for name in tensors.keys() if name.endswith("buffers/steps"))))  # noqa: SIM118


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (MODEL.replace("nn.LayerNorm(16)", "nn.BatchNorm1d(16)"), {}, "smaller micro-batches would change what the batch norm norm computes"),
        (MODEL, {"micro_batch": 1, "accumulate": 12}, "a micro-batch has one sample already"),
    ],
)
def test_where_it_would_change_the_maths_the_run_ends_and_says_so(
    model: str, changes: dict[str, int], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOM", "0" if changes else "2")
    plan = planned(tmp_path, model).with_(**changes)
    with pytest.raises(RunFailed, match="rank 0 ran out of device memory: CUDA out of memory") as failed:
        go(tmp_path / "run", plan, **RUN)
    assert said in failed.value.remedy and not failed.value.transient and not rows(tmp_path / "run")
    assert plans.read(tmp_path / "run" / "plan.json") == plan


def test_a_loss_of_pairs_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller batches have fewer negatives, which only the loss shows; without gradients it finds room. What was trained is saved."""
    model = MODEL.replace("if self.seen", "if torch.is_grad_enabled() and self.seen").replace(
        "return (output - batch", "return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output))) + 0 * (output - batch"
    )
    monkeypatch.setenv("ROOM", "2")
    plan = planned(tmp_path, model)
    with pytest.raises(RunFailed, match="rank 0 ran out of device memory") as failed:
        go(tmp_path / "run", plan, **RUN)
    assert "so smaller ones would train otherwise" in failed.value.remedy and not rows(tmp_path / "run")
    assert plans.read(tmp_path / "run" / "plan.json") == plan and save.complete(tmp_path / "run" / "checkpoints")[0].step == 3


@pytest.mark.slow(reason="one process goes on above; ranks are started again in test_supervise.py")
def test_ranks_are_started_again_with_smaller_micro_batches(ranks: Any, tmp_path: Path) -> None:
    """One of two runs out; both go on from the checkpoint under the new plan."""
    plan = planned(tmp_path, mesh=Mesh(dp_shard=2))
    plans.write(plan, tmp_path / "2.json")
    words = ["--steps", str(STEPS), "--lr", "1e-2", "--save-every", "2"]
    child = command(tmp_path / "2", tmp_path / "run", *words, "--max-restarts", "2", "--no-standby", ROOM="3", ON="1")
    whole = command(tmp_path / "2", tmp_path / "twin", *words)
    told, said = child.communicate(timeout=150)
    assert child.returncode == 0 and f"done after step {STEPS}" in told, said
    assert whole.communicate(timeout=150) and whole.returncode == 0
    memory, fault, again = rows(tmp_path / "run")
    assert (memory["event"], memory["rank"], memory["micro_batch"]) == ("memory", 1, 3)
    assert (fault["event"], fault["kind"], fault["checkpoint"]) == ("fault", "memory", 2) and again["event"] == "restarted"
    assert "rank 1 ran out of device memory" in said and "micro-batches of 3, 4 a step" in said and "restart 1 of 2" in said
    found, twin = (dict(losses(tmp_path / name)) for name in ("run", "twin"))
    assert found.keys() == twin.keys() and list(found.values()) == pytest.approx(list(twin.values()), rel=1e-5)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["micro_batch"] == 3
