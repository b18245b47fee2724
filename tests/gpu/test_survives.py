"""A CUDA device that runs out of memory, and samples that are no numbers: the run goes on as if they had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.run import run
from tests.cpu_dist.test_bad_steps import MODEL, RUN, numbers
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.test_train_faults import everything, same
from tests.cpu_dist.train_cases import Quiet, every_line, losses

pytestmark = pytest.mark.gpu
HOST = {"rest": "host"}
WIDE = '''
import os
import torch
from torch import nn

class Net(nn.Module):
    """Activations of 512 MiB a sample; from the fourth step on somebody else takes all memory but ROOM bytes."""
    def __init__(self):
        super().__init__()
        self.first, self.seen, self.taken = nn.Linear(4, 16), 0, None
    def forward(self, x):
        self.seen += len(x) if self.training and type(x) is torch.Tensor else 0
        if self.seen > 36 and self.taken is None and os.environ.get("ROOM"):
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            self.taken = torch.empty(free - int(os.environ["ROOM"]), dtype=torch.uint8, device=x.device)
        return self.first(x).repeat(1, 2**23).relu().mean(1, keepdim=True)

class Points:
    def __len__(self): return 96
    def __getitem__(self, i): return {"x": torch.full((4,), i / 96) ** torch.arange(1, 5)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output - batch["x"].sum(1, keepdim=True)).square().mean()
'''


def planned(folder: Path, model: str, **changes: Any) -> Plan:
    (folder / "mine.py").write_text(model)
    return Plan(model={"model": str(folder / "mine.py")}, hardware="auto", precision="fp32", optimizer="adamw-fused", **changes)


def test_the_device_runs_out_of_memory_and_the_curve_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 samples do not fit beside what another program took, nor 3; one does."""
    every_line(monkeypatch)
    plan = planned(tmp_path, WIDE, micro_batch=6, accumulate=2)
    asked = {"steps": 7, "lr": 1e-3, "schedule": "constant", "warmup": 0, "save_every": 0, "data": None}
    run(plan, asked, screen=Quiet(), out=tmp_path / "twin", device="cuda")
    monkeypatch.setenv("ROOM", str(5 * 2**29))
    screen = Quiet()
    assert run(plan, asked, screen=screen, out=tmp_path / "run", device="cuda").step == 7
    told = [line for line in screen.said if "device memory ran out" in line]
    assert told and told[0].startswith("step 4: ")
    kept = plans.read(tmp_path / "run" / "plan.json")
    assert kept.micro_batch < 6 and kept.micro_batch * kept.accumulate == 12
    found, twin = losses(tmp_path / "run"), losses(tmp_path / "twin")
    assert found[:3] == twin[:3] and [loss for _, loss in found] == pytest.approx([loss for _, loss in twin], rel=1e-4)


@pytest.mark.parametrize("moved", [{}, {"states": HOST}], ids=["kept", "states"])
def test_a_bad_step_is_undone_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: dict[str, Any]) -> None:
    """Batch norm's statistics, dropout's numbers and what lies in host memory too; the twin ended there and was resumed."""
    plan = planned(tmp_path, MODEL, micro_batch=4, accumulate=2, **moved)
    monkeypatch.setenv("NAN_AT", str(numbers(plan, 5)[1]))
    with pytest.raises(RunFailed, match="the loss of step 5 is nan"):
        run(plan, RUN, screen=Quiet(), out=tmp_path / "twin", device="cuda")
    run(plan, {}, screen=Quiet(), out=tmp_path / "twin", resume=True, device="cuda")
    assert run(plan, {**RUN, "bad_steps": 1}, screen=Quiet(), out=tmp_path / "run", device="cuda").step == 9
    assert same(everything(tmp_path / "twin", 9), everything(tmp_path / "run", 9))
    assert rows(tmp_path / "run")
