"""Faults of a supervised run at random points, each held against a run that nothing hurt.

    python benchmarks/chaos.py                        # every class, 1, 2 and 4 ranks; goes on where it was stopped
    python benchmarks/chaos.py --trials 3 --worlds 1,2 --only kill,hang
    python benchmarks/chaos.py --summary

A trial is one run of the same small model (batch norm, dropout, samples that draw random numbers) with one fault. It is good when
the command ended as documented, every loss and every checksum of the last checkpoint (weights, optimizer, buffers) are those of the
twin, the position in the data is the same, and no process is left. Seconds are from the fault until the next step is in the log.
Rows go to benchmarks/results/chaos.jsonl; `torchrun` rows are torchrun's own restart of a bare DDP loop in the same session.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretell.checkpoint import store
from foretell.runtime.process import proc

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "chaos.jsonl"
STEPS, SAVE_EVERY, FIRST = 60, 5, 8
"""Faults come after step FIRST."""
LIMIT_SECONDS = 150.0
MARK = "FORETELL_CHAOS"

MODEL = '''
import os, time
import torch
from torch import nn

if os.environ.get("SHIFT", "none none").split()[0] == os.environ.get("RANK", "0"):
    shift, real = float(os.environ["SHIFT"].split()[1]), time.time
    began = time.monotonic()
    time.time = lambda: real() + (shift if time.monotonic() - began > 1 else 0)  # it jumps under way

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


@dataclass
class Trial:
    """A run under way, and what was done to it."""

    world: int
    folder: Path
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)
    child: subprocess.Popen[str] | None = None
    at: float = 0.0
    """When the fault came, by the monotonic clock."""
    named: float | None = None
    """Seconds until the supervisor had told of it."""
    resumed: float | None = None
    said: str = ""
    statuses: list[int] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def start(self, *words: str) -> None:
        known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: self.folder.name, **self.env}
        command = [sys.executable, "-m", "foretell", "run", *words, "--device", "cpu", *self.flags]
        self.child = subprocess.Popen(command, env=known, stdout=subprocess.DEVNULL, stderr=open(self.folder / "said", "a"), text=True)  # noqa: SIM115

    def step(self) -> int:
        """The last one in the log."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            tail = (self.out / "log.jsonl").read_bytes()[-400:].splitlines()
            return max((json.loads(line)["step"] for line in tail[1:] if line.endswith(b"}")), default=0)
        return 0

    def reach(self, step: int) -> None:
        """Wait until that step is done, and a little longer."""
        self.until(lambda: self.step() >= step)
        time.sleep(self.rng.uniform(0, 0.06))

    def until(self, true: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or (self.child is not None and self.child.poll() is not None):
                raise TimeoutError("the run did not come so far")
            time.sleep(0.004)

    def pids(self) -> dict[int, int]:
        """Rank → its process; not the supervisor, nor loader processes. One that was forked says in its name which it is."""
        found: dict[int, int] = {}
        for pid in proc.children(self.child.pid) if self.child is not None else []:
            with contextlib.suppress(OSError):
                name = re.sub("^rank ([0-9]+) .*", r"\1", Path(f"/proc/{pid}/comm").read_text().strip())
                rank = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item).get("RANK", name)
                if rank.isdecimal() and proc.lives(pid):
                    found[int(rank)] = pid
        return found

    def hit(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.at = time.monotonic()
        os.kill(pid, number)

    def trains_again(self) -> None:
        """Wait for the first step after the fault: the process that goes on writes its first rows."""
        resumes = log(self.out).count('"event": "resume"') + log(self.out).count('"event": "start"')
        lines = len(log(self.out).splitlines())

        def again() -> bool:
            if self.named is None and (self.out / "faults.jsonl").exists():
                self.named = time.monotonic() - self.at
            text = log(self.out)
            begun = text.count('"event": "resume"') + text.count('"event": "start"') > resumes or len(text.splitlines()) < lines
            return begun and '"event": "step"' in text.splitlines()[-1]

        self.until(again)
        self.resumed = time.monotonic() - self.at

    def end(self) -> int:
        assert self.child is not None
        status = self.child.wait(LIMIT_SECONDS)
        self.statuses.append(status)
        return status

    def resume(self) -> None:
        """As a person would, or the next job."""
        self.start(str(self.out), "--resume")
        with contextlib.suppress(TimeoutError):
            self.trains_again()


def log(out: Path) -> str:
    with contextlib.suppress(OSError):
        return (out / "log.jsonl").read_text(errors="replace")
    return ""


def marked(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Processes of a trial, by a variable in their environment."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                env = dict(item.split("=", 1) for item in (path / "environ").read_bytes().decode(errors="replace").split("\0") if "=" in item)
                if env.get(MARK) == mark and (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    yield int(path.name), env


# --- the classes -----------------------------------------------------------------------------------------------------


def one(trial: Trial) -> tuple[int, int]:
    rank = trial.rng.choice(sorted(trial.pids()))
    return rank, trial.pids()[rank]


def kill(trial: Trial, point: int) -> None:
    """kill -9 of a rank."""
    trial.reach(point)
    trial.hit(one(trial)[1])
    trial.trains_again()


def kill_cold(trial: Trial, point: int) -> None:
    """kill -9 of a rank, no standby."""
    kill(trial, point)


def kill_saving(trial: Trial, point: int) -> None:
    """kill -9 of a rank while a checkpoint is written."""
    trial.reach(point)
    pids = trial.pids()
    trial.until(lambda: list((trial.out / "checkpoints").glob("*.partial")))
    trial.hit(pids[trial.rng.choice(sorted(pids))])
    trial.trains_again()


def kill_twice(trial: Trial, point: int) -> None:
    """kill -9 of a rank, and of another one while ranks start again."""
    trial.reach(point)
    old = trial.pids()
    trial.hit(old[trial.rng.choice(sorted(old))])
    trial.until(lambda: set(trial.pids().values()) - set(old.values()))
    time.sleep(trial.rng.uniform(0, 1.0))
    new = [pid for pid in trial.pids().values() if pid not in old.values()]
    trial.hit(trial.rng.choice(new))
    trial.trains_again()


def kill_all(trial: Trial, point: int) -> None:
    """kill -9 of every rank at once."""
    trial.reach(point)
    trial.at = time.monotonic()
    for pid in trial.pids().values():
        os.kill(pid, signal.SIGKILL)
    trial.trains_again()


def standby_killed(trial: Trial, point: int) -> None:
    """kill -9 of the standby process, then of a rank."""
    trial.reach(point)
    assert trial.child is not None
    for pid in proc.children(trial.child.pid):
        if pid not in trial.pids().values() and "standby" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    trial.hit(one(trial)[1])
    trial.trains_again()


def hang(trial: Trial, point: int) -> None:
    """SIGSTOP of a rank."""
    trial.reach(point)
    trial.hit(one(trial)[1], signal.SIGSTOP)
    trial.trains_again()


def damaged(trial: Trial, point: int) -> None:
    """A bit of the newest checkpoint flips, a file of it is cut or is gone; then kill -9 of a rank."""
    trial.reach(max(point, 2 * SAVE_EVERY + 2))
    newest = sorted(path for path in (trial.out / "checkpoints").glob("step-*") if not path.name.endswith(".partial"))[-1]
    file = trial.rng.choice(sorted(newest.iterdir()))
    content = bytearray(file.read_bytes())
    how = trial.rng.choice(("flip", "cut", "delete"))
    if how == "delete":
        file.unlink()
    else:
        content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
        file.write_bytes(content if how == "flip" else content[: trial.rng.randrange(len(content))])
    trial.hit(one(trial)[1])
    trial.trains_again()


def supervisor(trial: Trial, point: int) -> None:
    """kill -9 of the supervisor; its ranks save and leave, the run is resumed by hand."""
    trial.reach(point)
    assert trial.child is not None
    trial.hit(trial.child.pid)
    trial.end()
    deadline = time.monotonic() + 30
    while list(marked(trial.folder.name)) and time.monotonic() < deadline:
        time.sleep(0.02)
    trial.resume()


def sigterm(trial: Trial, point: int) -> None:
    """SIGTERM to the supervisor, or to one rank; it saves and leaves with 143, and is resumed."""
    trial.reach(point)
    assert trial.child is not None
    trial.hit(trial.rng.choice([trial.child.pid, *trial.pids().values()]), signal.SIGTERM)
    assert trial.end() == 143
    trial.resume()


def notice(trial: Trial, point: int) -> None:
    """A file appears that says that the machine goes away; it saves and leaves with 143, and is resumed."""
    trial.reach(point)
    trial.at = time.monotonic()
    (trial.folder / "gone").touch()
    assert trial.end() == 143
    trial.flags = [word for word in trial.flags if "gone" not in word and word != "--notice"]
    trial.resume()


def full_disk(trial: Trial, point: int) -> None:
    """No file may grow beyond 20 kB for a while, as on a disk that is full: checkpoints fail, training goes on."""
    trial.reach(point)
    pids = list(trial.pids().values())
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)) for pid in pids]
    trial.at = time.monotonic()
    trial.until(lambda: "was not saved" in (trial.folder / "said").read_text())
    for pid, limit in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def loader(trial: Trial, point: int) -> None:
    """kill -9 of a process that prepares samples."""
    trial.reach(point)
    ranks = trial.pids().values()
    workers = [pid for pid, _ in marked(trial.folder.name) if pid not in ranks and os.getsid(pid) in ranks]
    trial.hit(trial.rng.choice(workers))
    trial.until(lambda: "take its place" in (trial.folder / "said").read_text() or trial.step() == STEPS)
    trial.resumed = time.monotonic() - trial.at


def clock(trial: Trial, point: int) -> None:
    """The wall clock of a rank jumps by up to a day; and a rank is killed."""
    kill(trial, point)


def sample(trial: Trial, point: int) -> None:
    """A sample raises whenever it is asked for: set aside; and a rank is killed."""
    kill(trial, point)


@dataclass(frozen=True)
class FaultClass:
    does: Callable[[Trial, int], None]
    flags: tuple[str, ...] = ()
    status: int = 0


CLASSES = {
    "kill": FaultClass(kill), "kill-cold": FaultClass(kill_cold, ("--no-standby",)), "kill-saving": FaultClass(kill_saving),
    "kill-twice": FaultClass(kill_twice), "kill-all": FaultClass(kill_all), "standby": FaultClass(standby_killed), "hang": FaultClass(hang),
    "damaged": FaultClass(damaged), "supervisor": FaultClass(supervisor), "sigterm": FaultClass(sigterm), "notice": FaultClass(notice),
    "full-disk": FaultClass(full_disk), "loader": FaultClass(loader, ("--workers", "2")), "clock": FaultClass(clock), "sample": FaultClass(sample),
}  # fmt: skip


# --- a trial ---------------------------------------------------------------------------------------------------------


def settings(trial: Trial) -> list[str]:
    return [str(trial.folder.parent / f"{trial.world}.json"), "--steps", str(STEPS), "--lr", "1e-2", "--save-every", str(SAVE_EVERY),
            "--out", str(trial.out), "--max-restarts", "3"]  # fmt: skip


def left_behind(out: Path) -> dict[str, Any]:
    """What a run computed: losses by step, checksums of the last checkpoint, and where it was in the data."""
    rows = [json.loads(line) for line in log(out).splitlines()]
    saved = store.look(out / "checkpoints" / f"step-{STEPS:08d}")
    return {
        "losses": {str(row["step"]): row["loss"] for row in rows if row["event"] == "step"},
        "files": {name: file.crc32 for name, file in saved.files.items()},
        "data": {key: saved.about["data"][key] for key in ("seed", "epoch", "position")},
    }


def twin(work: Path, world: int, env: dict[str, str], flags: list[str]) -> dict[str, Any]:
    """What such a run leaves where nothing hurts it; shared by all trials of its kind."""
    folder = work / f"twin-{world}-{abs(hash((tuple(env.items()), tuple(flags)))) if env else 0}"
    done = folder / "twin.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trial = Trial(world, folder, [*flags, "--no-standby"], env)
        trial.start(*settings(trial))
        if trial.end() != 0:
            raise RuntimeError((folder / "said").read_text())
        done.write_text(json.dumps(left_behind(trial.out)))
    found: dict[str, Any] = json.loads(done.read_text())
    return found


def bad_sample(world: int) -> int:
    """One that comes in step FIRST + 4."""
    import numpy as np

    from foretell.runtime.data.samples import shuffled

    return int(shuffled(4096, 0, 0, np.array([4 * world * (FIRST + 4)]))[0])


def run_trial(name: str, world: int, seed: int, work: Path) -> dict[str, Any]:
    rng, kind = random.Random(f"{name} {world} {seed}"), CLASSES[name]
    folder = work / f"{name}-{world}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    env, flags, twin_env, twin_flags = {}, list(kind.flags), {}, []
    if name == "clock":
        env = {"SHIFT": f"{rng.randrange(world)} {rng.uniform(-86400, 86400):.0f}"}
    if name == "notice":
        flags += ["--notice", str(folder / "gone")]
    if name == "sample":
        env = twin_env = {"RAISES": str(bad_sample(world))}
        flags += ["--bad-samples", "1"]
        twin_flags = ["--bad-samples", "1"]
    trial, point = Trial(world, folder, flags, env, rng), rng.randint(FIRST, STEPS - 20)
    row: dict[str, Any] = {"fault": name, "ranks": world, "seed": seed, "step": point}
    wanted, problem, began = twin(work, world, twin_env, twin_flags), "", time.monotonic()
    try:
        trial.start(*settings(trial))
        kind.does(trial, point)
        if trial.end() != kind.status:
            problem = f"exit status {trial.statuses[-1]}"
        found = left_behind(trial.out)
        row |= {part: found[part] == wanted[part] for part in ("losses", "files", "data")}
    except (OSError, AssertionError, TimeoutError, KeyError, IndexError, ValueError, subprocess.TimeoutExpired) as error:
        problem = problem or f"{type(error).__name__}: {error}"
    time.sleep(0.3)
    left = [pid for pid, _ in marked(folder.name)]
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    same = all(row.get(part) for part in ("losses", "files", "data"))
    row |= {"named": round(trial.named, 3) if trial.named is not None else None}
    row |= {"seconds": round(trial.resumed, 3) if trial.resumed is not None else None, "whole_seconds": round(time.monotonic() - began, 1),
            "left": len(left), "problem": problem, "good": same and not problem and not left}  # fmt: skip
    if row["good"]:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        row["said"] = (folder / "said").read_text()[-1500:] if (folder / "said").exists() else ""
    return row


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
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", MARK: folder.name}
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
        ranks = {env["RANK"]: pid for pid, env in marked(folder.name) if "RANK" in env}
        first, at = steps()[-1][0], time.monotonic()
        os.kill(ranks[str(world - 1)], signal.SIGKILL)
        while steps()[-1][0] == first and time.monotonic() < deadline:
            time.sleep(0.004)
        seconds = time.monotonic() - at if steps()[-1][0] != first else None
    finally:
        for pid, _ in marked(folder.name):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
    return {"fault": "torchrun", "ranks": world, "seed": seed, "seconds": round(seconds, 3) if seconds is not None else None}


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


def summary(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'fault':12} {'trials':>6} {'good':>5}  seconds to the next step: median, worst"]
    for name in [*CLASSES, "torchrun"]:
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
    ask.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foretell-chaos")
    ask.add_argument("--out", type=Path, default=RESULTS)
    ask.add_argument("--beside", default="", help="what else this machine does meanwhile: goes into the rows")
    ask.add_argument("--summary", action="store_true")
    asked = ask.parse_args()
    if asked.summary:
        print(summary(rows_of(asked.out)))
        return 0
    worlds, about = [int(one) for one in asked.worlds.split(",")], surroundings()
    names = [name for name in asked.only.split(",") if name] or [*CLASSES, "torchrun"]
    prepare(asked.work, worlds)
    known = {(row["fault"], row["ranks"], row["seed"]) for row in rows_of(asked.out)}
    deadline, bad = time.monotonic() + 60 * asked.minutes, 0
    for seed in range(asked.trials):
        for world in worlds:
            for name in names:
                if (name, world, seed) in known or time.monotonic() > deadline:
                    continue
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
