"""Faults of a supervised run at random points, each compared with a run that nothing hurt.

    python benchmarks/chaos.py                        # every class, 1, 2 and 4 ranks; goes on where it was stopped
    python benchmarks/chaos.py --trials 3 --worlds 1,2 --only kill,hang
    python benchmarks/chaos.py --torchft PYTHON       # torchft, by an interpreter that has it
    python benchmarks/chaos.py --summary

A trial is one run of the same small model (batch norm, dropout, samples that draw random numbers) with one fault. It is good when
the command ended as documented, every loss and every checksum of the last checkpoint (weights, optimizer, buffers) are those of the
twin, the position in the data is the same, and no process is left. Seconds are from the fault until the next step is in the log.
The faults are those of `foretell chaos` (foretell/runtime/chaos), and one more that only this model can have: a sample that raises.
Rows go to benchmarks/results/chaos.jsonl; `torchrun` rows are torchrun's own restart of a bare DDP loop in the same session.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretell.runtime.chaos.campaign import tried
from foretell.runtime.chaos.faults import FAULTS, FaultClass, kill
from foretell.runtime.chaos.trial import MARK, ChaosRequest, Trial, marked

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "chaos.jsonl"
STEPS, SAVE_EVERY = 60, 5
LIMIT_SECONDS = 150.0

MODEL = '''
import os, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 128), nn.BatchNorm1d(128), nn.Dropout(0.2)
        self.second, self.out = nn.Linear(128, 128), nn.Linear(128, 1)
    def forward(self, x):
        time.sleep(0.02)
        return self.out(self.drop(self.norm(self.second(torch.relu(self.first(x))))))

class Points:
    def __len__(self): return 4096
    def __getitem__(self, i):
        if str(i) in os.environ.get("RAISES", "").split():
            raise ValueError("broken")
        return {"x": torch.full((4,), i / 4096) + torch.rand(4)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


# --- what only this model can have -----------------------------------------------------------------------------------


def bad_sample(world: int) -> int:
    """One that comes early in the steps in which faults come."""
    import numpy as np

    from foretell.runtime.data.samples import shuffled

    return int(shuffled(4096, 0, 0, np.array([4 * world * (SAVE_EVERY + 7)]))[0])


def with_bad_sample(trial: Trial) -> None:
    words, env = ["--bad-samples", "1"], {"RAISES": str(bad_sample(trial.request.world))}
    trial.flags += words
    trial.twin_flags += words
    trial.env |= env
    trial.twin_env |= env


CLASSES = {**FAULTS, "sample": FaultClass(does=kill, prepares=with_bad_sample)}


def request(world: int, work: Path) -> ChaosRequest:
    environment = (("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", ""))
    return ChaosRequest(
        plan=work / f"{world}.json", world=world, work=work, steps=STEPS, save_every=SAVE_EVERY, words=("--device", "cpu", "--lr", "1e-2"),
        environment=environment, limit_s=LIMIT_SECONDS,
    )  # fmt: skip


def run_trial(name: str, world: int, seed: int, work: Path) -> dict[str, Any]:
    return tried(name, seed, request(world, work), kind=CLASSES[name], per_step=4 * world).to_json()


# --- torchrun --------------------------------------------------------------------------------------------------------

TORCHRUN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 1)))
optimizer, path, first = torch.optim.AdamW(model.parameters()), sys.argv[1], 0
if os.path.exists(path + "/state"):
    state = torch.load(path + "/state")
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"]); first = state["step"]
for step in range(first, 100000):
    time.sleep(0.02)
    model(torch.rand(4, 4)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    if dist.get_rank() == 0:
        if step % 5 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + "/draft")
            os.replace(path + "/draft", path + "/state")
        os.write(os.open(path + "/steps", os.O_CREAT | os.O_WRONLY | os.O_APPEND), f"{os.getpid()} {step}\\n".encode())
"""


def torchrun(world: int, seed: int, work: Path) -> dict[str, Any]:
    """Seconds from kill -9 of a rank of a bare DDP loop to the next step, restarted by torchrun."""
    folder = work / f"torchrun-{world}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.py").write_text(TORCHRUN)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", MARK: str(folder)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--max-restarts=3",
             str(folder / "train.py"), str(folder)]  # fmt: skip
    child = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    seconds: float | None = None

    def steps() -> list[list[str]]:
        return [line.split() for line in (folder / "steps").read_text().splitlines()] if (folder / "steps").exists() else []

    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(steps()) < 20 + seed and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = {env["RANK"]: pid for pid, env in marked(str(folder)) if "RANK" in env}
        first, at = steps()[-1][0], time.monotonic()
        os.kill(ranks[str(world - 1)], signal.SIGKILL)
        while steps()[-1][0] == first and time.monotonic() < deadline:
            time.sleep(0.004)
        seconds = time.monotonic() - at if steps()[-1][0] != first else None
    finally:
        for pid, _ in marked(str(folder)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
    return {"fault": "torchrun", "ranks": world, "seed": seed, "seconds": round(seconds, 3) if seconds is not None else None}


# --- torchft ---------------------------------------------------------------------------------------------------------

TORCHFT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 1))
plain = torch.optim.AdamW(model.parameters())
def state(): return {"model": model.state_dict(), "optimizer": plain.state_dict()}
def load(found): model.load_state_dict(found["model"]); plain.load_state_dict(found["optimizer"])
manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=1, state_dict=state, load_state_dict=load, rank=0,
                  world_size=1, store_addr="127.0.0.1", store_port=int(os.environ["MASTER_PORT"]), replica_id="group" + sys.argv[2],
                  timeout=timedelta(seconds=20))
wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
while True:
    time.sleep(0.02)
    optimizer.zero_grad()
    wrapped(torch.rand(4, 4)).square().mean().backward()
    optimizer.step()
    row = f"{sys.argv[2]} {manager.num_participants()} {time.monotonic()}\\n"
    os.write(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND), row.encode())
"""


def torchft(python: str, seed: int, work: Path) -> dict[str, Any]:
    """Seconds from kill -9 of one of two replica groups to the next step of the other, and until both are together again."""
    folder = work / f"torchft-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.py").write_text(TORCHFT)
    first = 29600 + 10 * seed
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{first}", MARK: str(folder)}
    said = (folder / "said").open("wb")
    house = [str(Path(python).with_name("torchft_lighthouse")), "--min_replicas", "1", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50",
             "--heartbeat_timeout_ms", "2000", "--bind", f"127.0.0.1:{first}"]  # fmt: skip

    def start(group: int, port: int) -> subprocess.Popen[bytes]:
        words = [python, str(folder / "train.py"), str(folder / "steps"), str(group)]
        return subprocess.Popen(words, env={**env, "MASTER_PORT": str(port)}, stdout=said, stderr=said)

    def steps() -> list[list[str]]:
        return [line.split() for line in (folder / "steps").read_text().splitlines()] if (folder / "steps").exists() else []

    def until(found: Any) -> float | None:
        deadline = time.monotonic() + 60
        while not (at := found()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return at or None

    children = [subprocess.Popen(house, env=env, stdout=said, stderr=said), start(0, first + 1), start(1, first + 2)]
    try:
        until(lambda: sum(row[0] == "0" and row[1] == "2" for row in steps()) >= 20 + seed)
        children[2].kill()
        at = time.monotonic()
        children.append(start(1, first + 3))
        alone = until(lambda: next((float(row[2]) for row in steps() if row[0] == "0" and float(row[2]) > at + 0.05), 0.0))
        both = until(lambda: next((float(row[2]) for row in steps() if row[0] == "1" and float(row[2]) > at and row[1] == "2"), 0.0))
    finally:
        for child in children:
            child.kill()
            child.wait()
        said.close()
    return {"fault": "torchft", "ranks": 2, "seed": seed, "seconds": round(alone - at, 3) if alone else None,
            "together_again": round(both - at, 3) if both else None}  # fmt: skip


# --- all of it -------------------------------------------------------------------------------------------------------


def prepare(work: Path, worlds: list[int]) -> None:
    from foretell.plan import file
    from foretell.plan.types import Mesh, Plan

    work.mkdir(parents=True, exist_ok=True)
    (work / "mine.py").write_text(MODEL)
    for world in worlds:
        plan = Plan(model={"model": str(work / "mine.py"), "seq": 32}, hardware="CPU", micro_batch=2, accumulate=2, precision="fp32",
                    mesh=Mesh(dp_shard=world))  # fmt: skip
        file.write(plan, work / f"{world}.json")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def surroundings() -> dict[str, Any]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count(), "commit": commit,
            "load": round(os.getloadavg()[0], 1)}  # fmt: skip


def at_a_time(jobs: int, work: Path, out: Path) -> int:
    """The same command in so many processes, each with every so manieth trial."""
    words = [sys.executable, *sys.argv, "--jobs", "1"]
    children = [subprocess.Popen([*words, "--part", f"{one + 1}/{jobs}", "--work", str(work / str(one))]) for one in range(jobs)]
    try:
        found = [child.wait() for child in children]
    except KeyboardInterrupt:
        found = [child.wait() for child in children]
    print(f"all of it\n{summary(rows_of(out))}")
    return max(found)


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'fault':12} {'trials':>6} {'good':>5}  seconds to the next step: median, worst"]
    for name in [*CLASSES, "torchrun", "torchft"]:
        some = [row for row in rows if row["fault"] == name]
        seconds = [row["seconds"] for row in some if row["seconds"] is not None]
        if some:
            told = f"{statistics.median(seconds):6.2f} {max(seconds):6.2f}" if seconds else "     -      -"
            lines.append(f"{name:12} {len(some):6} {sum(row.get('good', True) for row in some):5}  {told}")
    return "\n".join(lines)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--trials", type=int, default=7, help="of each class and number of ranks")
    ask.add_argument("--worlds", default="1,2,4")
    ask.add_argument("--only", default="")
    ask.add_argument("--minutes", type=float, default=60.0)
    ask.add_argument("--jobs", type=int, default=2, help="trials at a time: half of one is waiting")
    ask.add_argument("--part", default="1/1", help=argparse.SUPPRESS)
    ask.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foretell-chaos")
    ask.add_argument("--out", type=Path, default=RESULTS)
    ask.add_argument("--beside", default="", help="what else this machine does meanwhile: goes into the rows")
    ask.add_argument("--torchft", metavar="PYTHON", help="an interpreter that has torchft: its two replica groups, one of them killed")
    ask.add_argument("--summary", action="store_true")
    asked = ask.parse_args()
    if asked.summary:
        print(summary(rows_of(asked.out)))
        return 0
    worlds, about = [int(one) for one in asked.worlds.split(",")], surroundings()
    names = ["torchft"] if asked.torchft else [name for name in asked.only.split(",") if name] or [*CLASSES, "torchrun"]
    worlds = [2] if asked.torchft else worlds
    if asked.jobs > 1 and not asked.torchft:
        return at_a_time(asked.jobs, asked.work, asked.out)
    part, parts = (int(one) for one in asked.part.split("/"))
    prepare(asked.work, worlds)
    known = {(row["fault"], row["ranks"], row["seed"]) for row in rows_of(asked.out)}
    deadline, bad = time.monotonic() + 60 * asked.minutes, 0
    for seed in range(asked.trials):
        for number, (world, name) in enumerate((world, name) for world in worlds for name in names):
            if number % parts == part - 1:
                if (name, world, seed) in known or time.monotonic() > deadline:
                    continue
                if name == "torchft":
                    row = torchft(asked.torchft, seed, asked.work)
                else:
                    row = torchrun(world, seed, asked.work) if name == "torchrun" else run_trial(name, world, seed, asked.work)
                bad += not row.get("good", True)
                row |= {**about, "load": round(os.getloadavg()[0], 1), **({"beside": asked.beside} if asked.beside else {})}
                with asked.out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                how = "good" if row.get("good", True) else f"BAD {row['problem']}"
                print(f"{name:12} {world} ranks, seed {seed}: {how} {row['seconds']}", flush=True)
    print(summary(rows_of(asked.out)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
