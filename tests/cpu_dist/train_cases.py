"""Small runs for tests of training: a plan, data, a model that can be hurt, and what a run left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.plan.types import Plan
from foretell.runtime.train import log as logs
from foretell.runtime.train import loop, save
from foretell.runtime.train.outcome import RunOutcome
from foretell.runtime.train.run import run

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(json.__file__).parent
"""Text that every Python has: the source of its json package."""
TINY = {"layers": 2, "dim": 32, "heads": 2, "context": 32, "vocab_size": 256, "dropout": 0.1}
PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": TINY, "seq": 32}, hardware="CPU", micro_batch=2, accumulate=2, precision="fp32"
)
SETTINGS: dict[str, Any] = {"steps": 10, "data": str(TEXT), "lr": 1e-2, "schedule": "wsd", "warmup": 2, "save_every": 5, "eval_batches": 2}
"""Evaluating the usual sixteen batches at the end would take as long as a short run."""

OWN = '''
import os, signal
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self): super().__init__(); self.inner = nn.Linear(4, 4)
    def forward(self, x): return x + torch.tanh(self.inner(x))

class Touchy(Layer):
    """Overflows for a sample that is marked: in forward (value 7), or in backward alone (value 9)."""
    def forward(self, x):
        x = super().forward(x)
        x = x * torch.where((x[:, :1] - x[:, :1].detach() + MARK == 7), float("inf"), 1.0)
        return Hurt.apply(x) if MARK == 9 else x

class Hurt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g * float("nan")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Touchy(), Layer()])
        self.out = nn.Linear(4, 1)
    def forward(self, x, mark):
        global MARK
        MARK = float(mark.max())
        for layer in self.layers: x = layer(x)
        return self.out(x)

MARK = 0.0

class Points:
    def __len__(self): return 64
    def __getitem__(self, i):
        rank = os.environ.get("RANK", "0")
        if os.environ.get("HURT_AT") == f"{rank}:{i}":
            os.kill(os.getpid(), getattr(signal, os.environ["HURT_WITH"]))
        mark = float(os.environ.get("MARK_AS", 0)) if os.environ.get("MARK_AT") == str(i) else 0.0
        return {"x": torch.full((4,), i / 64), "mark": mark}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


class Quiet:
    """Keeps what a run says; `at` does something when a step's line is written."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.said: list[str] = []
        self.lines: list[str] = []
        self.at = at or {}

    def step(self, text: str, step: int) -> None:
        self.lines.append(text)
        self.at.get(step, lambda: None)()

    def say(self, text: str) -> None:
        self.said.append(text)


def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step tells; one thread, as its ranks have."""
    monkeypatch.setattr(loop, "TELL_SECONDS", 0.0)
    torch.set_num_threads(1)


def write_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with a model and data of one's own, which nothing hurts yet."""
    (folder / "own.py").write_text(OWN)
    for name in ("HURT_AT", "HURT_WITH", "MARK_AT", "MARK_AS"):
        monkeypatch.delenv(name, raising=False)
    return str(folder / "own.py")


def go(out: Path, plan: Plan = PLAN, *, screen: Quiet | None = None, resume: bool = False, **changed: Any) -> RunOutcome:
    asked = changed if resume else {**SETTINGS, **changed}
    return run(plan, asked, screen=screen or Quiet(), out=out, resume=resume, device="cpu")


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in logs.read(out / "log.jsonl") if row["event"] == "step"]


def sums(out: Path, step: int) -> dict[str, int]:
    """Checksums of weights, optimizer state and random numbers after a step, a file for every rank."""
    found = json.loads((out / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: file["crc32"] for name, file in found["files"].items()}


def ten_steps(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], resume: bool) -> tuple[str, int]:
    torch.set_num_threads(1)
    done = run(plan, asked, screen=Quiet(), out=Path(out), resume=resume, device="cpu")
    return done.status, done.step


def cut_back(out: Path, step: int) -> None:
    """As if the run had been killed right after the checkpoint of `step`."""
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    assert [one.step for one in save.complete(out / "checkpoints")] == [step]


def own_order(number: int) -> int:
    """Which of the 64 own samples is number so-and-so of a run with seed 0; one that rank 1 of 2 gets."""
    import numpy as np

    from foretell.runtime.data.samples import shuffled

    return int(shuffled(64, 0, 0, np.array([number + 2]))[0])
