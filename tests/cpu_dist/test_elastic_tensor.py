"""A run goes over from shards to a tensor axis, and back: the planner uses none on CPUs, so the test hands over the second plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.process.supervise.elastic import Elastic
from foretell.runtime.process.supervise.keep import Keeper, Supervision
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.train_cases import PLAN, ROOT, TINY, losses, ten_steps

DATA = '''
import os, time
import torch

class Tokens:
    """A quarter of a second for a rank's samples of a step, so that there is time to say another number."""
    def __len__(self): return 4096
    def __getitem__(self, i):
        time.sleep(float(os.environ.get("SLEEP", "0")))
        drawn = torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": drawn[:-1], "targets": drawn[1:]}

def data(split): return Tokens() if split == "train" else None
'''
STEPS = 40
RUN: dict[str, Any] = {"steps": STEPS, "lr": 1e-3, "schedule": "constant", "warmup": 0, "save_every": 3}


@pytest.mark.slow(reason="ranks that change are in test_elastic.py, a checkpoint of shards resumed with a tensor axis in test_checkpoint.py")
def test_shards_become_a_tensor_axis_and_shards_again(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dp_shard 4 → tp 2 → dp_shard 4 on gloo, as a file says; losses are those of a run that nothing changed, within 1e-6."""
    (tmp_path / "mine.py").write_text(DATA)
    source = {**PLAN.model, "overrides": {**TINY, "dropout": 0.0}}
    plan = PLAN.with_(model=source, mesh=Mesh(dp_shard=4), micro_batch=2, accumulate=1, clip=0.5)
    asked = {**RUN, "data": str(tmp_path / "mine.py")}
    ranks(4).run(ten_steps, str(tmp_path / "twin"), plan, asked, False)
    plans.write(plan, tmp_path / "plan.json")

    def plan_for(plan: Plan, ranks: Sequence[int]) -> Plan:
        assert list(ranks) in ([2], [3], [1]), ranks
        return plan.with_(mesh=Mesh(tp=2), accumulate=4)

    there, out, said = tmp_path / "there", tmp_path / "run", list[str]()
    for name, value in (("PYTHONPATH", str(ROOT)), ("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", ""), ("SLEEP", "0.05")):
        monkeypatch.setenv(name, value)
    flags = ["--lr", "1e-3", "--schedule", "constant", "--warmup", "0", "--save-every", "3", "--device", "cpu", "--data", asked["data"]]
    words = ["run", str(tmp_path / "plan.json"), "--steps", str(STEPS), *flags, "--max-restarts", "1", "--out", str(out)]

    def say() -> None:
        for step, world in ((8, "2"), (18, "4")):
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline and (not (out / "log.jsonl").exists() or len(losses(out)) < step):
                time.sleep(0.05)
            there.write_text(world)

    threading.Thread(target=say, daemon=True).start()
    elastic = Elastic(plan, plan_for, out, said.append, there)
    ended = Keeper(words, 4, out, how=Supervision(restarts=1, elastic=True, ranks=there), say=said.append, elastic=elastic).run()
    assert ended.status == 0, (ended, said)
    found = [(row["before"], row["ranks"], row["mesh"]["tp"]) for row in rows(out) if row["event"] == "resized"]
    assert found == [(4, 2, 2), (2, 4, 1)], said
    assert [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses(out)] == pytest.approx([loss for _, loss in losses(tmp_path / "twin")], rel=1e-6)
