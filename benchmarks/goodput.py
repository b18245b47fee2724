"""Goodput of a run that is killed every 60 s, beside the prediction and the arithmetic limit.

    python benchmarks/goodput.py                     # 2 ranks, kill -9 of one of them every 60 s, 9 times
    python benchmarks/goodput.py --every 60 --kills 9 --ranks 2 --beside "other jobs"
    python benchmarks/goodput.py --summary

The run is `foretell run --mtbf 60s --max-restarts N`, or with `--memory-every STEPS` instead of --mtbf. The first three kills are for
measuring what goodput follows from: the seconds
of a step, of a checkpoint and of a restart. Then it is predicted, and the kills after are for the measured share: steps that count
between the checkpoints from which the run went on after the third and the last kill, at the pace of steps beside which nothing is
saved, by the time between these kills. The limit is that share for checkpoints of this cost, written at once, and restarts of no
time. `--cost` is of a checkpoint, roughly: it makes the model larger. Rows go to benchmarks/results/goodput.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretell.plan import file
from foretell.plan.types import Mesh, Plan
from foretell.report.goodput import figures
from foretell.runtime.chaos.trial import ChaosRequest, Trial, log, rows_of
from foretell.simulate.goodput import FailureCosts, Goodput, KnownSeconds, goodput, measured_costs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "goodput.jsonl"
STEPS = 1_000_000
FIRST = 3
"""Kills before the prediction."""
ROWS_A_SECOND = 1_300_000
"""Of the table, that make a checkpoint cost about a second on this machine."""

MODEL = '''
import time
import torch
from torch import nn

class Net(nn.Module):
    """A table that is saved and not trained, and steps that mostly wait: their seconds are alike, whoever else computes."""
    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.table.weight.requires_grad_(False)
        self.first, self.out = nn.Linear(64, 128), nn.Linear(128, 1)
    def forward(self, x):
        time.sleep(0.1)
        return self.out(torch.relu(self.first(self.table(x).mean(1))))

class Points:
    def __len__(self): return 65536
    def __getitem__(self, i): return {"x": torch.arange(i, i + 8)}

def model(rows): return Net(rows)
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


def prepared(work: Path, ranks: int, cost: float, mtbf: float, memory_every: int) -> Trial:
    shutil.rmtree(work, ignore_errors=True)
    (work / "trial").mkdir(parents=True)
    (work / "mine.py").write_text(MODEL)
    source = {"model": str(work / "mine.py"), "overrides": {"rows": int(ROWS_A_SECOND * cost)}, "seq": 32}
    file.write(Plan(model=source, hardware="CPU", micro_batch=2, precision="fp32", mesh=Mesh(dp_replicate=ranks)), work / "plan.json")
    often = ("--memory-every", str(memory_every)) if memory_every else ("--mtbf", f"{mtbf:g}s")
    words = ("--device", "cpu", *often, "--max-restarts", "1000")
    environment = (("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", ""))
    asked = ChaosRequest(
        plan=work / "plan.json", world=ranks, work=work, steps=STEPS, words=words, environment=environment, limit_s=300.0,
    )  # fmt: skip
    return Trial(asked, work / "trial")


def killed(trial: Trial, at: float, rng: random.Random) -> dict[str, float]:
    """kill -9 of a rank at that time; when it was, and after which step the run goes on."""
    while time.monotonic() < at:
        assert trial.child is not None and trial.child.poll() is None, trial.said
        time.sleep(0.005)
    trial.rng = rng
    trial.hit(trial.one(), signal.SIGKILL)
    trial.trains_again()
    assert trial.again_from is not None and trial.resumed is not None
    print(f"kill in step {trial.at_step + 1}: training again after {trial.resumed:.2f} s, from step {trial.again_from}", flush=True)
    return {"at": trial.at, "from": trial.again_from, "seconds": trial.resumed}


def costs_of(out: Path) -> FailureCosts:
    nothing = KnownSeconds(seconds=0.0, how="assumed")
    return measured_costs(figures(out), FailureCosts(step=None, checkpoint=nothing, written=nothing, restart=nothing))


def predicted_of(costs: FailureCosts, every: float, memory_every: int) -> Goodput:
    """At the interval that loses the least, or at the one that was asked for."""
    return goodput(costs, every, memory_every * costs.step.seconds if memory_every and costs.step is not None else None)


def measured(ranks: int, every: float, kills: int, cost: float, work: Path, memory_every: int = 0) -> dict[str, Any]:
    trial, rng = prepared(work, ranks, cost, every, memory_every), random.Random("goodput")
    asked = trial.request
    try:
        trial.start(str(asked.plan), "--steps", str(STEPS), "--schedule", "constant", "--out", str(trial.out))
        trial.reach(1)
        first, found = time.monotonic(), list[dict[str, float]]()
        predicted: Goodput | None = None
        for number in range(1, kills + 1):
            found.append(killed(trial, first + number * every, rng))
            if number == FIRST:
                predicted = predicted_of(costs_of(trial.out), every, memory_every)
        assert predicted is not None and trial.child is not None
        trial.child.send_signal(signal.SIGTERM)
        trial.end()
        afterwards = figures(trial.out)
        saves = [row for row in rows_of(log(trial.out)) if row.get("event") == "save" and row.get("bytes")]
    finally:
        trial.clean()
    pace = figures(trial.out, int(found[FIRST - 1]["from"]))["step"][0]
    wall, steps = found[-1]["at"] - found[FIRST - 1]["at"], int(found[-1]["from"] - found[FIRST - 1]["from"])
    share = steps * pace / wall
    hindsight = predicted_of(costs_of(trial.out), every, memory_every)
    return {
        **({"memory_every": memory_every} if memory_every else {}),
        "ranks": ranks, "every_seconds": every, "kills": kills - FIRST, "steps": steps, "wall_seconds": round(wall, 1), "goodput": round(share, 4),
        "predicted": round(predicted.share, 4), "limit": round(predicted.limit, 4), "of_limit": round(share / predicted.limit, 4),
        "points_off": round(100 * (predicted.share - share), 2), "predicted_afterwards": round(hindsight.share, 4),
        "restart_seconds": [round(one["seconds"], 2) for one in found], "checkpoint_bytes": saves[-1]["bytes"] if saves else None,
        **{f"{name}_seconds": round(value, 4) for name, (value, _) in afterwards.items() if name != "restart"},
        "assumed_before": {name: round(getattr(predicted.costs, name).seconds, 4) for name in ("step", "checkpoint", "written", "restart")},
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    lines = ["ranks  kills  goodput  predicted  limit  of the limit  points off  load"]
    for row in rows:
        lines.append(f"{row['ranks']:5}  {row['kills']:5}  {100 * row['goodput']:5.1f} %  {100 * row['predicted']:7.1f} %"
                     f"  {100 * row['limit']:4.1f} %  {100 * row['of_limit']:10.1f} %  {row['points_off']:+10.1f}  {row['load']}")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    ask.add_argument("--kills", type=int, default=9)
    ask.add_argument("--ranks", type=int, default=2)
    ask.add_argument("--cost", type=float, default=0.3)
    ask.add_argument("--memory-every", type=int, default=0, help="steps between checkpoints in memory, and none on disk")
    ask.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foretell-goodput")
    ask.add_argument("--out", type=Path, default=RESULTS)
    ask.add_argument("--beside", default="", help="what else this machine does meanwhile: goes into the row")
    ask.add_argument("--summary", action="store_true")
    asked = ask.parse_args()
    if not asked.summary:
        if asked.kills <= FIRST:
            ask.error(f"--kills {asked.kills}: the first {FIRST} are for measuring; give more")
        import torch

        row = measured(asked.ranks, asked.every, asked.kills, asked.cost, asked.work, asked.memory_every)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        row |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count(), "commit": commit,
                "load": round(os.getloadavg()[2], 1), **({"beside": asked.beside} if asked.beside else {})}  # fmt: skip
        with asked.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    with contextlib.suppress(FileNotFoundError):
        print(summary([json.loads(line) for line in asked.out.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
