"""A small run whose replicas come and go, and one process that plays the same members in each round.

The reference is plain torch, and knows of the run what its log says of each round: who was in it, and who had taken the weights of the
others before. A slot's steps are those that it has not done yet. Weights are equal to the bit.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan, Sync
from foretell.runtime.data.samples import shuffled
from foretell.runtime.parallel.sync.codes import hash_of
from foretell.runtime.train import save
from foretell.runtime.train.prepare import build
from foretell.runtime.train.schedule import Schedule

MODEL = '''
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 48), nn.Linear(48, 8)
    def forward(self, x):
        return self.out(torch.tanh(self.first(x)))

SLOT = os.environ.get("FORETELL_REPLICA", "").partition(" ")[0]

def once(i):
    """Hurt the process at a sample, the first time that it comes; another one waits until it is there again."""
    for told in os.environ.get("HURT", "").split(";"):
        if not told: continue
        sample, how, mark = told.split()
        if int(sample) != i or (os.path.exists(mark) and how != "ALWAYS"): continue
        if how == "WAIT":
            end = time.monotonic() + 30
            while not os.path.exists(mark) and time.monotonic() < end: time.sleep(0.01)
            time.sleep(0.5)
            continue
        with open(mark, "w") as file: file.write(str(os.getpid()))
        if how == "RAISE": raise ValueError("broken")
        os.kill(os.getpid(), signal.SIGKILL if how == "ALWAYS" else getattr(signal, how))

class Points:
    def __len__(self): return 4096
    def __getitem__(self, i):
        time.sleep(float(os.environ.get("SLEEP", "0.001")))
        once(i)
        return torch.sin(torch.arange(4.) * (1 + i))

def model():
    back = os.environ.get("BACK")
    if back and SLOT == "1" and os.path.exists(os.environ["MARK"]): open(back, "w").close()
    return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - 0.5).square().mean()
'''
EVERY, MICRO, RATE = 4, 2, 1e-2
SCHEDULE = {"kind": "wsd", "peak": RATE, "warmup": 2}


def plan_of(folder: Path, count: int, **sync: Any) -> Path:
    (folder / "mine.py").write_text(MODEL)
    told = Sync(every=EVERY, **{"quorum": 2, "grace": 20.0, **sync})
    made = Plan(model={"model": str(folder / "mine.py")}, hardware="CPU", precision="fp32", mesh=Mesh(dp_replicate=count), sync=told,
                micro_batch=MICRO, accumulate=1, clip=None)  # fmt: skip
    plans.write(made, folder / "plan.json")
    return folder / "plan.json"


def words(plan: Path, out: Path, steps: int, *more: str) -> list[str]:
    """Of `foretell`."""
    rate = [] if "--resume" in more else ["--lr", str(RATE), "--schedule", "wsd", "--warmup", "2", "--schedule-steps", "100"]
    return ["run", str(plan), "--steps", str(steps), *rate, "--device", "cpu", "--out", str(out), *more]


def sample_of(slot: int, own_step: int, count: int) -> int:
    return int(indices(slot, own_step, count)[0])


def indices(slot: int, own_step: int, count: int) -> np.ndarray:
    first = MICRO * (count * own_step + slot)
    return shuffled(4096, 0, 0, np.arange(first, first + MICRO))


def rows(out: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    path = out / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rounds(out: Path) -> list[dict[str, Any]]:
    return [row for row in rows(out) if row["event"] == "round"]


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def eight_bits(vector: Tensor) -> Tensor:
    """As it is after rounding, 256 elements with one scale."""
    found = []
    for block in vector.split(256):
        scale = block.abs().max() / 127
        found.append(torch.round(block / scale) * scale if scale > 0 else torch.zeros_like(block))
    return torch.cat(found)


class Replayed:
    """One process that plays the members of each round."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        assert plan.sync is not None
        self.sync, self.count = plan.sync, plan.mesh.dp_replicate
        os.environ.pop("HURT", None)
        self.model = build(plan, 0).model.train()
        self.outer = nn.Parameter(flat(self.model))
        self.by = torch.optim.SGD([self.outer], lr=self.sync.lr, momentum=self.sync.momentum, nesterov=self.sync.nesterov)
        self.padded = -(-self.outer.numel() // 256) * 256
        self.used = [0] * self.count
        self.inner: dict[int, torch.optim.Optimizer] = {}
        self.copies: dict[int, nn.Module] = {}
        self.cuts = {slot: torch.zeros(self.padded) for slot in range(self.count)}
        self.cut_of_mean = torch.zeros(self.padded)
        self.schedule = Schedule(steps=100, **SCHEDULE)
        self.step = 0

    def round(self, members: list[int], joined: list[int], steps: int) -> None:
        moved = []
        for slot in sorted(members):
            if slot in joined:
                self.copies[slot] = copy.deepcopy(self.model)
                self.inner[slot] = torch.optim.AdamW(self.copies[slot].parameters(), lr=RATE, fused=True)
                self.cuts[slot].zero_()
            model, inner = self.copies[slot], self.inner[slot]
            nn.utils.vector_to_parameters(self.outer.detach().clone(), model.parameters())
            for place in range(steps):
                for group in inner.param_groups:
                    group["lr"] = self.schedule.at(self.step + place)
                batch = torch.stack([torch.sin(torch.arange(4.0) * (1 + i)) for i in indices(slot, self.used[slot] + place, self.count).tolist()])
                (model(batch) - 0.5).square().mean().backward()
                inner.step()
                inner.zero_grad()
            self.used[slot] += steps
            moved.append(self.rounded(torch.cat([self.outer.detach() - flat(model), torch.zeros(self.padded - self.outer.numel())]), self.cuts[slot]))
        total = moved[0].clone()
        for one in moved[1:]:
            total += one
        total /= len(moved)
        self.outer.grad = self.rounded(total, self.cut_of_mean)[: self.outer.numel()]
        self.by.step()
        self.step += steps

    def rounded(self, exact: Tensor, cut: Tensor) -> Tensor:
        if self.sync.format == "fp32":
            return exact
        exact = exact + cut
        coded = eight_bits(exact)
        cut.copy_(exact - coded)
        return coded


def replayed(plan: Path, out: Path, step: int) -> Replayed:
    """By what the log says of rounds, as far as that step; every hash in it is looked at."""
    torch.set_num_threads(1)
    found = Replayed(plans.read(plan), out)
    for row in [row for row in rounds(out) if row["step"] <= step]:
        found.round(row["replicas"], row["joined"], row["step"] - found.step)
        padded = torch.cat([found.outer.detach(), torch.zeros(found.padded - found.outer.numel())])
        assert f"{hash_of(padded) & (2**64 - 1):016x}" == row["hash"], f"round {row['round']}"
    return found


def weights(out: Path, step: int) -> Tensor:
    saved = next(one for one in save.complete(out / "checkpoints") if one.step == step)
    reader = save.Reader(saved)
    return torch.cat([reader.whole(f"model/{name}").reshape(-1) for name in ("first.weight", "first.bias", "out.weight", "out.bias")])


def equal(plan: Path, out: Path, step: int) -> Replayed:
    """The checkpoint of that step is that of the reference, and no sample came twice or was left out in the order of a slot."""
    known = replayed(plan, out, step)
    assert known.step == step and torch.equal(weights(out, step), known.outer.detach())
    (saved,) = [one for one in save.complete(out / "checkpoints") if one.step == step]
    assert saved.about["used"] == known.used
    assert not (out / "run.lock").exists()
    return known
