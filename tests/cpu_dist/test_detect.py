"""Slow, stuck and desynchronised ranks of real runs over gloo, named while they run and afterwards."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foretell.plan.types import Mesh, Plan
from foretell.runtime.detect import hangs, layout, recorder
from foretell.runtime.detect.links import transfers
from foretell.runtime.detect.probe import LinkProbe
from foretell.runtime.detect.records import positions_of, read_all, step_table
from foretell.runtime.parallel import ranks as members
from foretell.runtime.process.blame import HANG_VARIABLE
from foretell.runtime.process.control import Control
from foretell.runtime.process.pool import RankFailure
from foretell.runtime.process.progress import Progress
from foretell.runtime.train.run import run
from tests.cpu_dist.train_cases import PLAN, Quiet, write_own

WAIT = timedelta(seconds=60)
FAULTS = """
import time
import torch.distributed as dist

class Faulty(Net):
    calls = 0
    def forward(self, x, mark):
        rank, since, how = os.environ.get("FAULT", "::").split(":")
        Faulty.calls += 1
        if rank == os.environ.get("RANK", "0") and Faulty.calls >= int(since):
            if how == "late": time.sleep(0.01)
            if how == "flips" and Faulty.calls == int(since):
                with torch.no_grad(): next(self.parameters()).to_local().view(torch.int32)[0] ^= 1 << 20
            if how == "desync" and Faulty.calls == int(since): dist.all_reduce(torch.zeros(3))
        return super().forward(x, mark)

def model():
    Faulty.calls = 0
    return Faulty()
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    path = Path(write_own(tmp_path, monkeypatch))
    path.write_text(path.read_text().replace("def model(): return Net()\n", "") + FAULTS)
    return PLAN.with_(model={"model": str(path)}, mesh=Mesh(dp_shard=2), accumulate=1)


class Kept(Quiet):
    """What a rank says, in a file: one that is stuck in a collective says why, and its process is ended."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def say(self, text: str) -> None:
        super().say(text)
        with self.path.open("a") as stream:
            stream.write(text + "\n")


def _run(rank: int, world: int, out: str, plan: Plan, fault: str, steps: int) -> list[str]:
    torch.set_num_threads(1)
    os.environ.update({"FAULT": fault, HANG_VARIABLE: "2"})
    screen = Kept(Path(f"{out}.rank{rank}"))
    try:
        run(plan, {"steps": steps, "lr": 1e-3, "no_save": True}, screen=screen, out=Path(out), device="cpu")
    finally:
        del os.environ["FAULT"], os.environ[HANG_VARIABLE]
    return screen.said


@pytest.mark.slow(reason="a run of many steps; slow ranks are named in tests/pure/test_detect.py, and what a run is told below")
def test_a_slow_rank_is_named_in_the_run_and_in_its_log(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    """Ten milliseconds of sleep a step, more than everything else of it."""
    out = tmp_path / "run"
    said, other = ranks(2).run(_run, str(out), plan, "1:1:late", 100)
    (line,) = [line for line in said if line.startswith("slow rank")]
    assert line.startswith("slow rank: rank 1: it works ") and "the time, " in line and "h of every 24 h on 2 ranks" in line
    assert not [line for line in other if line.startswith("slow rank")]
    (row,) = [row for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if row["event"] == "finding"]
    assert row["kind"] == "slow rank" and row["ranks"] == [1] and row["step"] <= 100 and row["text"] == line
    rings = read_all(out)
    table = step_table([ring.steps for ring in rings], after=20)
    own, waited = table.own.mean(axis=1), table.waited.mean(axis=1)
    assert own[1] - own[0] > 0.008 and waited[0] - waited[1] > 0.006
    ops = {layout.OPS[op] for op in rings[0].records["op"]}
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= ops  # FSDP2's
    assert {ring.header.rank: {group.name for group in ring.groups.values()} >= {"dp_shard", "control"} for ring in rings} == {0: True, 1: True}
    assert transfers(rings) and (out / layout.FOLDER / layout.HISTORY).read_text().count("excess")
    assert {path.stat().st_mode & 0o777 for path in (out / layout.FOLDER).iterdir()} == {0o600}


def test_ranks_that_call_different_collectives_are_named_with_both(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks(2).run(_run, str(tmp_path / "run"), plan, "1:6:desync", 50)
    told = (tmp_path / "run.rank0").read_text()  # it speaks for all: said before its process is ended, or raised as that of rank 1 is
    said = f"{failed.value}\n" + "\n".join(line for line in told.splitlines() if line.startswith("error: "))
    assert "the ranks are desynchronised: at collective " in said and " of dp_shard rank 0 called all_gather" in said, (said, told)
    assert "rank 1 called all_reduce (float32, 12 B)" in said and "foretell has a bug" not in said
    found = hangs.read_hang(positions_of(read_all(tmp_path / "run")))
    assert found is not None and found.kind == hangs.DESYNC and set(found.culprits) == {0, 1}  # the same, from what is left of it


def _tags(rank: int, world: int, out: str) -> list[Any]:
    """Rank 0 sends under one tag and rank 1 receives under another: both are in it, and nobody comes out before both have been asked."""
    control = Control(members.start(PLAN.with_(mesh=Mesh(dp_shard=2)), device="cpu"))
    Path(out).mkdir(exist_ok=True)
    made = recorder.CollectiveRecorder(control.ranks, Progress(), Path(out), session="one")
    asked: list[Any] = []
    told = Path(out, "told")

    def ask() -> None:
        while not made.position().blocked:
            time.sleep(0.05)
        time.sleep(1.0)
        asked.append(made.position().to_json())
        told.touch()

    with recorder.recording(made):
        dist.all_reduce(torch.zeros(5))
        if rank == 0:
            sent = dist.isend(torch.zeros(4), 1, tag=1)
            while not told.exists():
                time.sleep(0.05)
            asked.append(made.position().to_json())
            dist.isend(torch.zeros(4), 1, tag=2).wait(WAIT)
            sent.wait(WAIT)
        else:
            received = dist.irecv(torch.zeros(4), 0, tag=2)
            thread = threading.Thread(target=ask)
            thread.start()
            received.wait(WAIT)
            thread.join()
            dist.irecv(torch.zeros(4), 0, tag=1).wait(WAIT)
    members.stop()
    return asked[0]


def test_a_hang_inside_of_communication_is_told_from_one_outside(ranks: Any, tmp_path: Path) -> None:
    told = ranks(2).run(_tags, str(tmp_path / "run"))
    positions = {rank: hangs.RankPosition.from_json(json.loads(json.dumps(one))) for rank, one in enumerate(told)}
    assert None not in positions.values()
    found = hangs.read_hang(positions)  # type: ignore[arg-type]
    assert found is not None and found.kind == hangs.INSIDE and found.waiting == (1,), found
    assert "p2p 1 of world from rank 0 to rank 1 (float32, 16 B)" in found.problem


def _probed(rank: int, world: int) -> tuple[list[list[float]], list[str], int]:
    """Rank 1 asks from aside; both probe after the same step."""
    control = Control(members.start(PLAN.with_(mesh=Mesh(dp_shard=2)), device="cpu"))
    found: list[str] = []
    probe = LinkProbe(control, lambda reading: found.append(reading.kind))
    at = 0
    for step in range(1, 60):
        if (rank, step) == (1, 30):
            probe.ask()
        before = len(found)
        probe.stepped(step)
        at = step if len(found) > before else at
        control.should_stop(step, False, 1.0)
    control.finish()
    assert probe.before is not None
    return probe.before.tolist(), found, at


def test_all_ranks_probe_their_links_after_the_same_step_when_one_asks(ranks: Any) -> None:
    (seconds, found, at), other = ranks(2).run(_probed)
    assert other == (seconds, found, at) and len(found) == 1 and 30 < at < 40
    assert seconds[0][0] == seconds[1][1] == 0 and all(0 < one < 1 for one in (seconds[0][1], seconds[1][0]))


def test_a_flipped_bit_of_one_replica_is_named_with_the_weight(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    out = tmp_path / "run"
    said, *_ = ranks(3).run(_run, str(out), plan.with_(mesh=Mesh(dp_replicate=3)), "1:5:flips", 40)
    (line,) = [line for line in said if line.startswith("different replica")]
    assert " rank 1 holds other values of layers.0.inner.weight" in line and " than ranks 0, 2, which agree; resume from" in line, said
