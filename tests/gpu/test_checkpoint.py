"""Checkpoints from a CUDA device: copied on a stream of their own while the next step goes on, and exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoint import store
from foretell.checkpoint.read import Reader
from foretell.checkpoint.saver import SavedCheckpoint
from foretell.plan.types import Plan
from foretell.runtime.parallel import ranks as members
from foretell.runtime.parallel.apply import apply
from foretell.runtime.process.control import Control
from foretell.runtime.train import save
from foretell.runtime.train.prepare import build
from foretell.runtime.train.run import run

pytestmark = pytest.mark.gpu

PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": {"layers": 8, "dim": 1024, "heads": 16, "dropout": 0.1}}, hardware="auto",
    micro_batch=4, precision="bf16-mixed",
)  # fmt: skip


class Quiet:
    def step(self, text: str, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def test_what_is_saved_is_of_the_moment_though_steps_go_on(tmp_path: Path) -> None:
    """Saved without waiting at every step, each held against a copy that was waited for."""
    here = members.start(PLAN, device="cuda")
    workload = build(PLAN, 0)
    job = apply(workload, PLAN, here, learning_rate=1e-2)
    team = save.Members(Control(here))
    saver = save.Saver(tmp_path, team, team, keep=9, pin=True)
    wanted: list[dict[str, Any]] = []
    for step in range(4):
        loss = job.backward([workload.batch])
        saver.before_update()
        job.update(loss)
        saver.wait()
        torch.cuda.synchronize()
        wanted.append({piece.name: piece.tensor.cpu().clone() for piece in save.pieces(job)})
        saver.begin(step, save.pieces(job), save.own_state(job), {"plan": {}, "data": {}}, extra=save.extra(job))
    saver.before_update()
    saver.wait()
    done = saver.poll()
    assert done is not None and isinstance(done.result, SavedCheckpoint)
    for step, tensors in enumerate(wanted):
        reader = Reader(store.look(tmp_path / store.folder_name(step)))
        assert len(tensors) > 100 and any(name.endswith("exp_avg") for name in tensors)
        for name, value in tensors.items():
            assert torch.equal(reader.whole(name), value), (step, name)


def test_a_run_that_saves_on_the_way_resumes_where_it_was(tmp_path: Path) -> None:
    asked = {"steps": 8, "data": str(Path(json.__file__).parent), "lr": 1e-3, "schedule": "constant", "save_every": 2, "keep": 9}
    run(PLAN, asked, screen=Quiet(), out=tmp_path / "a", device="cuda")
    kept = store.complete(tmp_path / "a" / "checkpoints")
    assert [one.step for one in kept] == [8, 6, 4, 2] and all(not store.problems(one.path) for one in kept)
    rows = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    stalls = [row["stall_seconds"] for row in rows if row["event"] == "save" and row["step"] < 8]
    assert max(stalls[1:]) < 0.3, stalls
    first = {row["step"]: row["loss"] for row in rows if row["event"] == "step"}
    for one in kept[:2]:
        one.path.rename(tmp_path / one.path.name)
    run(PLAN, {}, screen=Quiet(), out=tmp_path / "a", resume=True, device="cuda")
    rows = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    again = {row["step"]: row["loss"] for row in rows if row["event"] == "step"}
    assert again[5] == first[5]
    assert all(again[step] == pytest.approx(first[step], rel=2e-2) for step in first)
