"""Checkpoints: how long training waits and how long they take, beside PyTorch's; and whether any harm goes unseen.

    python benchmarks/checkpoint.py speed      1.2 GB of weights and Adam on two gloo ranks, beside DCP, in turns
    python benchmarks/checkpoint.py flips      600 bits flipped, one at a time, over every file of a checkpoint
    python benchmarks/checkpoint.py kills      kill -9 at 50 random moments of a save
    python benchmarks/checkpoint.py reshard    FSDP 2→1→4 and FSDP→TP→PP→2-D→FSDP, with 20 steps after each

Each appends a row to results/checkpoint.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from foretell.runtime.process.pool import Pool  # noqa: E402

RESULTS = HERE / "results" / "checkpoint.jsonl"
SIZES = {
    "1.2GB": {"layers": 14, "dim": 768, "heads": 12, "context": 64, "vocab_size": 256, "dropout": 0.0},
    "tiny": {"layers": 2, "dim": 64, "heads": 2, "context": 32, "vocab_size": 256, "dropout": 0.0},
}
TURNS = 5


def machine() -> dict[str, Any]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "torch": torch.__version__,
        "commit": os.environ.get("COMMIT") or commit.stdout.strip() or "unknown",
    }  # fmt: skip


# --- speed -----------------------------------------------------------------------------------------------------------


def speed(size: str, turns: int, folder: str | None) -> dict[str, Any]:
    """Two processes of their own, as torchrun starts them: DCP's own process cannot be a child of a daemon."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = Path(place) / "row.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", __file__]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run([*words, "speed", "--inner", str(out), "--size", size, "--turns", str(turns)], check=True, env=env)
        return json.loads(out.read_text())


def speed_rank(size: str, turns: int, out: Path) -> None:
    """One of the two ranks."""
    import torch
    import torch.distributed as dist

    from foretell.plan.types import Mesh, Plan
    from foretell.runtime.parallel import ranks as members
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.train.prepare import build

    overrides = SIZES[size]
    plan = Plan(
        model={"model": "gpt-tiny", "overrides": overrides, "seq": 16}, hardware="CPU", mesh=Mesh(dp_shard=2), precision="fp32"
    )
    here = members.start(plan, device="cpu")
    workload = build(plan, 0)
    job = apply(workload, plan, here)
    job.train_step([workload.batch])
    ways: dict[str, Any] = {
        "foretell": Ours(job, here, out.parent), "foretell without checksums": Ours(job, here, out.parent, checks=False),
        "dcp": Dcp(job, out.parent, "sync"), "dcp thread": Dcp(job, out.parent, "thread"),
        "dcp process": Dcp(job, out.parent, "process"),
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    before = {name: p.to_local().clone() for name, p in job.named_parameters()}
    for turn in range(turns + 1):
        for name, way in ways.items():
            dist.barrier()
            os.sync() if here.is_first else None
            dist.barrier()
            path = out.parent / f"{name.replace(' ', '-')}-{turn}"
            times = way.save(path)
            if name.startswith("foretell"):
                times["copy"] = times["stall"]  # when nothing is computed meanwhile
                times |= beside_a_step(way, job, workload.batch, path.with_name("beside"))
            dist.barrier()
            began = time.perf_counter()
            if name != "foretell without checksums":  # nothing there can be trusted: it is only written
                with torch.no_grad():
                    for p in job.parameters():
                        p.to_local().zero_()
                way.load(path)
            dist.barrier()
            times["load"] = time.perf_counter() - began
            assert all(torch.equal(p.to_local(), before[one]) for one, p in job.named_parameters()), name
            dist.barrier()
            if here.is_first:
                times["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                shutil.rmtree(path)
                shutil.rmtree(path.with_name("beside"), ignore_errors=True)
            if turn:
                found[name].append(times)
    told: list[Any] = [None] * here.world
    dist.all_gather_object(told, found)
    if here.is_first:
        out.write_text(json.dumps(summary(told)))
    members.stop()


def beside_a_step(way: Any, job: Any, batch: Any, path: Path) -> dict[str, float]:
    """What training waits for when it goes on with forward and backward, and how much longer those take."""

    def step() -> None:
        job.backward([batch])
        job.optimizer.zero_grad(set_to_none=True)

    def timed() -> None:
        began = time.perf_counter()
        step()
        spent.append(time.perf_counter() - began)

    spent: list[float] = []
    timed()
    stall = way.save(path, timed)["stall"]
    return {"stall": stall, "step": spent[0], "step_beside_a_save": spent[1]}


def summary(told: list[dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """The slowest rank of every turn, and the middle of the turns."""
    rows: dict[str, Any] = {}
    for name, turns in told[0].items():
        slowest = [
            {key: max(rank[name][turn].get(key, 0.0) for rank in told) for key in turns[turn]} for turn in range(len(turns))
        ]
        rows[name] = {key: statistics.median(turn[key] for turn in slowest) for key in slowest[0]}
        kept = [key for key in ("stall", "total", "load", "write") if key in slowest[0]]
        rows[name]["turns"] = {key: [round(turn[key], 4) for turn in slowest] for key in kept}
    pairs = zip(rows["foretell"]["turns"]["write"], rows["foretell without checksums"]["turns"]["write"], strict=True)
    rows["foretell without checksums"].pop("load")  # it is only written
    return {"what": "speed", "rows": rows, "checksum_share": statistics.median(a / b - 1 for a, b in pairs)}


class Ours:
    """foretell's saver on a job, as its training loop uses it."""

    def __init__(self, job: Any, here: Any, folder: Path, *, checks: bool = True) -> None:
        from foretell.runtime.process.control import Control
        from foretell.runtime.train import save

        self.job, self.save_, self.checks = job, save, checks
        self.teams = save.Members(Control(here)), save.Members(Control(here))
        self.known = {}
        self.savers: Any = None

    def save(self, path: Path, beside: Callable[[], None] | None = None) -> dict[str, float]:
        from foretell.checkpoint import saver, write

        save = self.save_
        if self.savers is None:
            self.savers = save.Saver(path, *self.teams)
            self.savers.warm(save.pieces(self.job), save.own_state(self.job))
            self.savers.wait()
        self.savers.folder = path
        plain, spent = write.write_file, []

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            done = plain(*args, **kwargs, checks=self.checks)
            spent.append(time.perf_counter() - began)
            return done

        saver.write_file = timed
        try:
            began = time.perf_counter()
            about = {"plan": {"mesh": {"dp_shard": 2}}, "data": {}}
            self.savers.begin(1, save.pieces(self.job), save.own_state(self.job), about, extra=save.extra(self.job))
            if beside is not None:
                beside()
            self.savers.before_update()  # without a step beside it, all of the copy is waited for
            stall = time.perf_counter() - began
            self.savers.wait()
        finally:
            saver.write_file = plain
        done = self.savers.poll()
        if self.checks:
            assert isinstance(done.result, save.SavedCheckpoint), done.result
        stall = stall if beside is None else done.stall_seconds
        return {"stall": stall, "total": done.seconds, "check": done.check_seconds, "write": spent[0]}

    def load(self, path: Path) -> None:
        from foretell.checkpoint.format import TensorMeta
        from foretell.runtime.train.take import stage, take

        save = self.save_
        known = {f"model/{name}": TensorMeta(tuple(p.shape), "float32") for name, p in self.job.named_parameters()}
        (newest,) = save.complete(path)
        take(stage(save.Reader(newest), self.job, known), self.job)


class Dcp:
    """PyTorch's own, as its tutorial uses it."""

    def __init__(self, job: Any, folder: Path, how: str) -> None:
        import torch.distributed as dist

        self.job, self.how = job, how
        self.group = dist.new_group(backend="gloo") if how != "sync" else None

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.job.parts[0], self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> dict[str, float]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        began = time.perf_counter()
        if self.how == "sync":
            dcp.save(self.state(), checkpoint_id=path)
            stall = time.perf_counter() - began
        else:
            kind = AsyncCheckpointerType.PROCESS if self.how == "process" else AsyncCheckpointerType.THREAD
            future = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group, async_checkpointer_type=kind)
            stall = time.perf_counter() - began
            (getattr(future, "upload_completion", None) or future).result()
        return {"stall": stall, "total": time.perf_counter() - began}

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.job.parts[0], self.job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# --- harm and resharding: what the tests do in small -----------------------------------------------------------------


def of_tests(name: str) -> Any:
    """A module of the tests."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, HERE.parent / "tests" / name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flips(count: int, folder: str | None) -> dict[str, Any]:
    """Bits of what two ranks saved, flipped one at a time; one rank tries to take it up."""
    tests = of_tests("cpu_dist/test_checkpoint.py")
    pool = Pool(largest=2)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        pool.ranks(2).run(tests.go, f"{place}/a", tests.PLANS["fsdp2"], tests.SETTINGS)
        pool.close()
        began = time.perf_counter()
        seen = tests.flipped(Path(place) / "a", tests.PLANS["one"], count, int(time.time()))
    return {"what": "flips", "count": count, "seen_and_named": seen, "seen": sum(seen.values()), "live_state_touched": False,
            "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def kills(count: int, folder: str | None) -> dict[str, Any]:
    tests = of_tests("pure/test_checkpoint_kill.py")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        left = tests.survive(Path(place), count, int(time.time()))
    return {"what": "kills", "count": count, "newest_verified_loaded": sum(left.values()), "left": left}


def reshard(folder: str | None, steps: int = 20) -> dict[str, Any]:
    """The chain of plans of the tests with more steps after each change."""
    tests = of_tests("cpu_dist/test_checkpoint.py")
    pool = Pool(largest=4)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = tests.carried(pool.ranks, Path(place), steps)
    pool.close()
    return {"what": "reshard", "chain": tests.CHAIN, "steps": steps, "state": "bit-equal after every load",
            "largest_relative_difference_of_losses": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "flips", "kills", "reshard"])
    parser.add_argument("--size", choices=list(SIZES), default="1.2GB", help="of what is saved in speed")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--count", type=int, default=0, help="flips (600) or kills (50)")
    parser.add_argument("--folder", default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--inner", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.inner:
        speed_rank(asked.size, asked.turns, asked.inner)
        return
    row = {
        "speed": lambda: {**speed(asked.size, asked.turns, asked.folder), "size": asked.size},
        "flips": lambda: flips(asked.count or 600, asked.folder),
        "kills": lambda: kills(asked.count or 50, asked.folder),
        "reshard": lambda: reshard(asked.folder),
    }[asked.what]()
    row = {**row, **machine()}
    with asked.out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
