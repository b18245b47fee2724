"""Slow ranks and slow links of real runs over gloo: named or not, after how many steps, and how often without a reason.

    python benchmarks/stragglers.py clean --pieces 6          a thousand steps each, in which nobody is slow
    python benchmarks/stragglers.py slow --pieces 4           five times a piece, a drawn rank works a fifth of a step longer for 100 steps
    python benchmarks/stragglers.py intermittent --pieces 4   twice a piece, a drawn rank sleeps 50 ms in every tenth of 450 steps
    python benchmarks/stragglers.py link --pieces 3           once a piece, the network is limited (tbf, in a network of its own)
    python benchmarks/stragglers.py cost                      what recording and hashing take
    python benchmarks/stragglers.py replay                    what was kept of earlier runs (STRAGGLERS_TRACES), by the limits of now
    python benchmarks/stragglers.py report                    all of it, from the rows

Every piece is a run of `foretell` with its detector, and one row of results/stragglers.jsonl; it can be stopped between two of them.
Faults are drawn from the number of the piece. Rows say by which limits they were made: they were drawn on the first rows, and those that
follow with other limits are sealed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretell.plan.types import Mesh, Plan
from foretell.runtime.detect.detector import StragglerWatch
from foretell.runtime.detect.findings import RunFacts
from foretell.runtime.detect.links import LinkLimits
from foretell.runtime.detect.records import StepTable, read_all, step_table
from foretell.runtime.detect.slow import LIMITS
from foretell.runtime.process.pool import Pool
from foretell.runtime.train.run import run

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results" / "stragglers.jsonl"
STEPS = 1000
TRACES = os.environ.get("STRAGGLERS_TRACES", "")
"""A folder for what each step took, from which limits may be drawn."""
MODEL = '''
import json, os, time
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x): return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.out = nn.Linear(width, 1)
        self.faults, self.calls = json.loads(os.environ.get("FAULTS", "[]")), 0
        self.before, self.recent, self.longer = time.perf_counter(), [], 0.0
    def forward(self, x):
        self.calls += 1
        now = time.perf_counter()
        self.recent, self.before = [*self.recent[-39:], now - self.before], now
        for rank, first, last, sleep, every in self.faults:
            if self.calls == first:  # of a step as it is just now: how busy the machine is changes from minute to minute
                self.longer = sorted(self.recent)[len(self.recent) // 2] * sleep if sleep < 1 else sleep / 1e3
            if str(rank) == os.environ.get("RANK", "0") and first <= self.calls < last and self.calls % every == 0:
                time.sleep(self.longer)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).clone()

class Points:
    def __len__(self): return 4096
    def __getitem__(self, i): return {"x": torch.full((16, 128), i / 4096)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


class Silent:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def one_run(rank: int, world: int, out: str, model: str, faults: list[Any], steps: int, record: bool, replicate: bool) -> dict[str, Any]:
    """One piece, on every rank."""
    torch.set_num_threads(1)
    os.environ["FAULTS"], os.environ["FORETELL_RECORD"] = json.dumps(faults), "1" if record else "0"
    mesh = Mesh(dp_replicate=world) if replicate else Mesh(dp_shard=world)
    plan = Plan(model={"model": model}, hardware="CPU", mesh=mesh, micro_batch=8, precision="fp32")
    done = run(plan, {"steps": steps, "lr": 1e-4, "no_save": True}, screen=Silent(), out=Path(out), device="cpu")
    measured = done.measurement
    return {} if measured is None else {"step_seconds": measured.step_seconds, "p10_seconds": measured.p10_seconds}


def piece(
    pool: Pool, world: int, faults: list[Any], *, steps: int = STEPS, record: bool = True, replicate: bool = False, beside: str | None = None
) -> dict[str, Any]:
    """What was found in one run, and what its steps took."""
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        path = Path(folder, "own.py")
        path.write_text(MODEL)
        out = Path(folder, "run")
        found = pool.ranks(world).run(one_run, str(out), str(path), faults, steps, record, replicate, timeout_s=1200)[0]
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        told = [row for row in rows if row["event"] == "finding"]
        rings = read_all(out)
        table = step_table([ring.steps for ring in rings], after=20)
        if TRACES:
            columns = {name: getattr(table, name) for name in ("steps", "whole", "waited", "own", "data", "other", "delayed")}
            np.savez(Path(TRACES, f"{time.time():.0f}.npz"), faults=json.dumps(faults), findings=json.dumps(told), **columns)
        seconds = [row["seconds"] for row in rows if row["event"] == "step"][20:]
        return {
            **found, "findings": [{name: row[name] for name in ("kind", "step", "told_step", "ranks", "cost", "text")} for row in told],
            "median_seconds": statistics.median(seconds), "mean_seconds": statistics.fmean(seconds),
            "collectives_a_step": sum(1 for row in rings[0].records if row["step"] == steps - 2) if rings else 0,
            "delayed_share": float(table.delayed.sum() / table.whole.sum()) if len(table) else None,
        }  # fmt: skip


def drawn(kind: str, number: int, world: int) -> list[list[Any]]:
    """Faults of a piece: rank, first and last step, sleep (a share of the step before, or milliseconds), in every so manieth step."""
    dice = random.Random(f"{kind} {number}")
    if kind == "slow":
        starts = [60 + 190 * turn + dice.randrange(10) for turn in range(5)]  # between two of them what was told is forgotten
        return [[dice.randrange(world), first, first + 100, 0.2, 1] for first in starts]
    if kind == "intermittent":
        ranks = dice.sample(range(world), 2)  # of one rank twice, the second time would be the same finding still
        return [[rank, first, first + 450, 50, 10] for rank, first in zip(ranks, (30 + dice.randrange(10), 515 + dice.randrange(10)), strict=True)]
    return []


def judged(kind: str, faults: list[list[Any]], findings: list[dict[str, Any]], patience: int) -> dict[str, Any]:
    """Which faults were named, after how many steps, and what was told that was none."""
    trials, used = [], set()
    for rank, first, last, seconds, _ in faults:
        right = [place for place, one in enumerate(findings)
                 if "slow rank" in one["kind"] and one["ranks"] == [rank] and first <= one["told_step"] <= last + 40]  # fmt: skip
        used.update(right)
        after = findings[right[0]]["told_step"] - first if right else None
        in_time = after is not None and after <= patience
        trials.append({"rank": rank, "first": first, "sleep": seconds, "named_after_steps": after, "in_time": in_time})
    wrong = [one["text"] for place, one in enumerate(findings) if place not in used]
    return {"trials": trials, "false_alarms": wrong}


class LimitedNetwork:
    """Limits the loopback device once a run has done so many steps: this process is alone in its network (`unshare -rn`)."""

    def __init__(self, folder: Path, step: int, rate: str) -> None:
        self.folder, self.at, self.rate, self.limited = folder, step, rate, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self._stop.wait(0.05):
            logs = list(self.folder.glob("*/run/log.jsonl"))
            if logs and logs[0].read_text().count('"event": "step"') >= self.at:
                limits = ["rate", self.rate, "burst", "256kb", "latency", "400ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)
                self.limited = True
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.limited:
            subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def about(kind: str, number: int, world: int) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit, "torch": torch.__version__, "device": f"CPU, {os.cpu_count()} cores, gloo",
        "machine": "shared with other processes", "load_average": round(os.getloadavg()[0], 1), "kind": kind, "piece": number, "ranks": world,
        "limits": asdict(LIMITS) if kind != "link" else asdict(LinkLimits()),
    }  # fmt: skip


def write(row: dict[str, Any]) -> None:
    with ROWS.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps({name: row[name] for name in row if name not in ("limits", "findings")}), flush=True)


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("clean", "slow", "intermittent", "link", "cost", "replay", "report"))
    parser.add_argument("--pieces", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    if asked.kind in ("report", "replay"):
        return report() if asked.kind == "report" else replay()
    if asked.kind == "link" and "STRAGGLERS_INSIDE" not in os.environ:
        inside = {**os.environ, "STRAGGLERS_INSIDE": "1"}
        os.execvpe("unshare", ["unshare", "-rn", "sh", "-c", 'ip link set lo mtu 1500 up && exec "$@"', "sh", sys.executable, *sys.argv], inside)
    done = {(row["kind"], row["piece"], row["ranks"]) for row in known()}
    pool = Pool(largest=asked.ranks, preload=["torch", "foretell.runtime.train.run"])
    if asked.kind == "cost":
        return cost(pool, asked.ranks, asked.pieces)
    numbers = [number for number in range(1000) if (asked.kind, number, asked.ranks) not in done][: asked.pieces]
    for number in numbers:
        faults = drawn(asked.kind, number, asked.ranks)
        if asked.kind == "link":
            link(pool, number, asked.ranks)
            continue
        found = piece(pool, asked.ranks, faults)
        patience = 100 if asked.kind == "slow" else 500
        write({**about(asked.kind, number, asked.ranks), "steps": STEPS, **found, **judged(asked.kind, faults, found["findings"], patience)})
    pool.close()


def link(pool: Pool, number: int, world: int) -> None:
    """The network slows down in the middle of a run, for good."""
    dice = random.Random(f"link {number}")
    rate, at, steps = dice.choice(("200mbit", "300mbit", "400mbit")), 150 + dice.randrange(30), 450
    with tempfile.TemporaryDirectory() as folder:
        network = LimitedNetwork(Path(folder), at, rate)
        try:
            found = piece(pool, world, [], steps=steps, beside=folder)
        finally:
            network.close()
    told = [(one["kind"], one["told_step"]) for one in found["findings"]]
    right = [step - at for kind, step in told if kind == "slow link" and step > at]
    write({**about("link", number, world), "steps": steps, "rate": rate, "limited_after": at, **found, "told": told,
           "named_after_steps": right[0] if right else None, "right": bool(right) and not any("slow rank" in kind for kind, _ in told)})  # fmt: skip


def cost(pool: Pool, world: int, pieces: int) -> None:
    """Runs with and without recording in turns; what a record and a hash take by themselves."""
    with_, without = [], []
    for _ in range(pieces):
        with_.append(piece(pool, world, [], steps=300)["median_seconds"])
        without.append(piece(pool, world, [], steps=300, record=False)["median_seconds"])
    one = pool.ranks(world).run(calls)[0]
    write({**about("cost", 0, world), "with_seconds": with_, "without_seconds": without, **one})
    pool.close()


def calls(rank: int, world: int) -> dict[str, Any]:
    """CPU seconds that recording adds to one collective, and to one step: the same calls around nothing."""
    from foretell.runtime.detect import recorder as recorders
    from foretell.runtime.detect.replicas import bit_sums
    from foretell.runtime.parallel.ranks import Ranks
    from foretell.runtime.process.progress import STEP, Progress

    class Group:
        group_name = "0"

    progress = Progress()
    progress.at(STEP)
    here = Ranks(rank=rank, world=world, local_rank=rank, device=torch.device("cpu"), mesh=None, sizes=Mesh())
    with tempfile.TemporaryDirectory() as folder:
        recorder = recorders.CollectiveRecorder(here, progress, Path(folder))
        each, step = recorders.own_cost(recorder, Group(), torch.zeros(1000))
    weights = [torch.randn(1024, 1024) for _ in range(64)]
    times = []
    for _ in range(7):
        began = time.thread_time()
        bit_sums(weights)
        times.append(time.thread_time() - began)
    nbytes = sum(one.nbytes for one in weights)
    return {"record_seconds": each, "step_record_seconds": step, "hash_bytes_per_second": nbytes / statistics.median(times)}


def relevant(row: dict[str, Any]) -> str:
    """The limits that decide for its kind."""
    slow, spikes = "slow" in row["kind"], row["kind"] == "intermittent"
    kept = {name: value for name, value in row["limits"].items() if not (slow and "spike" in name) and not (spikes and "spike" not in name)}
    return json.dumps(kept)


def replay() -> None:
    """What was recorded in STRAGGLERS_TRACES, judged again by the limits of now: a row."""
    trials, wrong, steps, clean = [], [], 0, 0
    for path in sorted(Path(TRACES).glob("*.npz")):
        content = np.load(path)
        table = StepTable(*(content[name] for name in ("steps", "whole", "waited", "own", "data", "other", "delayed")))
        faults = json.loads(str(content["faults"]))
        found, _ = StragglerWatch(["same"] * len(table.own), RunFacts(world=len(table.own), places={})).steps(table)
        told = [{"kind": one.kind, "ranks": list(one.ranks), "told_step": one.step, "text": one.text} for one in found]
        now = judged("", faults, told, 500 if faults and faults[0][4] > 1 else 100)
        trials += now["trials"]
        wrong += now["false_alarms"]
        steps += len(table)
        clean += len(table) - sum(last - first for _, first, last, _, _ in faults)
    write({**about("replay", 0, 2), "steps": steps, "clean_steps": clean, "trials": trials, "false_alarms": wrong})


def report() -> None:
    rows = known()
    groups = dict.fromkeys((row["kind"], relevant(row)) for row in rows if row["kind"] != "cost")
    for kind, limits in sorted(groups, key=lambda group: (group[0], group[1])):
        those = [row for row in rows if row["kind"] == kind and relevant(row) == limits]
        trials = [trial for row in those for place, trial in enumerate(row.get("trials", []))
                  if kind != "intermittent" or not place or trial["rank"] != row["trials"][place - 1]["rank"]]  # fmt: skip
        after = sorted(trial["named_after_steps"] for trial in trials if trial["named_after_steps"] is not None)
        step = statistics.median(row.get("median_seconds", 0.0) for row in those)
        wrong = sum(len(row.get("false_alarms", [])) for row in those)
        now = limits == relevant({"kind": kind, "limits": asdict(LinkLimits() if kind == "link" else LIMITS)})
        line = f"{kind}{'' if now else ' (other limits than now)'}: {sum(row['steps'] for row in those):,} steps of {1e3 * step:.1f} ms"
        if trials:
            line += f", {sum(trial['in_time'] for trial in trials)} of {len(trials)} named in time"
            line += f", after {after[len(after) // 2]} steps ({after[0]} to {after[-1]})" if after else ""
        if kind == "link":
            line += f", {sum(row['right'] for row in those)} of {len(those)} told from a slow rank"
        else:
            line += f", {wrong} false alarms"
        print(line)
    for row in rows:
        if row["kind"] == "cost":
            print(f"cost: a record {1e6 * row['record_seconds']:.1f} µs, a step's row {1e6 * row['step_record_seconds']:.1f} µs, "
                  f"hash {row['hash_bytes_per_second'] / 1e9:.1f} GB/s")  # fmt: skip


if __name__ == "__main__":
    main()
