"""A plan's placement, for real: processes become the ranks that the plan puts on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from foretell.plan import file as plans
from foretell.plan.types import Mesh, Pipeline, Plan

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from foretell.plan.file import read
from foretell.runtime import ranks
started = int(os.environ["RANK"])
me = ranks.start(read(sys.argv[1]), device="cpu", timeout_s=60)
every = [None] * me.world
dist.all_gather_object(every, (started, me.rank, me.coordinate("pp"), me.coordinate("dp_shard"), os.environ["RANK"]))
if me.is_first:
    print(json.dumps(every))
ranks.stop()
"""


def test_processes_take_the_places_of_the_plan(tmp_path: Path) -> None:
    order = (2, 0, 3, 1)
    plan = Plan(
        model={"model": "gpt-tiny"}, hardware="CPU", mesh=Mesh(pp=2, dp_shard=2), placement=order, accumulate=2,
        pipeline=Pipeline(cuts=("blocks.1",)), precision="fp32",
    )  # fmt: skip
    plans.write(plan, tmp_path / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "plan.json")], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4
    found = json.loads("".join(said))
    assert json.loads(said[order[0]]), "the process that is rank 0 speaks"
    for rank, (process, became, stage, shard, told) in enumerate(found):
        assert (process, became, stage, shard, told) == (order[rank], rank, rank // 2, rank % 2, str(rank))
