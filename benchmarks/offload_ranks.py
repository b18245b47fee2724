"""Bytes of one rank whose states are in host memory, on one GPU: the other ranks are not there, and messages go nowhere.

    python benchmarks/offload_ranks.py --predict SAID.json          what foretell says of every case; needs no GPU
    python benchmarks/offload_ranks.py --predicted SAID.json        every case, each in a process of its own, beside that

The plan is applied by `runtime.parallel.apply` as a run does it, in PyTorch's fake process group. Tensors, streams and the allocator are real; what
others would have sent is whatever lay there, so losses mean nothing, and seconds are those of a step whose messages take none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
GIB = 2**30
ALL, HALF = {"blocks.*": "host", "rest": "host"}, {"blocks.24-47": "host"}
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"mesh": {"dp_shard": 4}, "precision": "bf16-mixed", "states": ALL},
    "mixed-none": {"mesh": {"dp_shard": 4}, "precision": "bf16-mixed"},
    "master": {"mesh": {"dp_shard": 4}, "precision": "bf16-master", "states": ALL},
    "master-half": {"mesh": {"dp_shard": 2}, "precision": "bf16-master", "states": HALF, "blocks": "recompute"},
    "split-again": {"mesh": {"dp_shard": 4}, "precision": "bf16-master", "state_format": "split", "states": ALL, "blocks": "recompute",
                    "accumulate": 2},
    "replicas": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "precision": "bf16-master", "states": ALL, "blocks": "recompute"},
    "unclipped": {"mesh": {"dp_shard": 8}, "precision": "bf16-mixed", "states": ALL, "clip": None, "blocks": "recompute"},
}  # fmt: skip


def plan_of(case: str, options: argparse.Namespace) -> Any:
    from foretell.plan.types import Mesh, Plan, Residency

    asked = dict(CASES[case])
    mesh, mode = Mesh(**asked.pop("mesh")), asked.pop("blocks", None)
    blocks = {"blocks.*": Residency(mode=mode)} if mode else {}
    if options.smoke and "states" in asked and asked["states"] is HALF:
        asked["states"] = {"blocks.1": "host"}
    return Plan(model={}, hardware="8xH200", micro_batch=options.batch, mesh=mesh, blocks=blocks, **asked)


def source(options: argparse.Namespace) -> Any:
    from foretell.trace.load.model import Source

    return Source(model="gpt-tiny" if options.smoke else "gpt2-xl", micro_batch=options.batch)


def say(case: str, options: argparse.Namespace, known: Any) -> dict[str, Any]:
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.plan.recipe import model_of
    from foretell.simulate.plan import Options, predict_plan
    from foretell.simulate.time import step as plan_time

    plan = plan_of(case, options).with_(model=model_of(source(options)))
    mode = next((one.mode for one in plan.blocks.values()), "keep")
    plan_time.comm_time_over = lambda fabrics: lambda op: 0.0  # messages go nowhere
    found = predict_plan(known.of(plan, [mode]), plan, parse("8xH200"), Options(profile_of=find_profile))
    memory = found.worst.memory
    return {"seconds": found.time.step_seconds if found.time else None, "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes,
            "host": memory.host_bytes, "verdict": found.verdict}  # fmt: skip


def one(case: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from foretell.runtime.offload import shards
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import Ranks, form
    from foretell.trace.load.model import load

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    plan = plan_of(case, options)
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=plan.mesh.world)
    shards.agreed = lambda ranks: None  # type: ignore[assignment]
    ranks = Ranks(rank=0, world=plan.mesh.world, local_rank=0, device=device, mesh=form(plan.mesh, device.type), sizes=plan.mesh)
    torch.manual_seed(0)
    workload = load(source(options))
    batch = torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, workload.batch)
    job = apply(workload, plan, ranks, learning_rate=1e-4)
    del workload
    batches = [batch] * plan.accumulate
    seconds = []
    for number in range(2 + options.steps):
        if number == 2 and cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        job.train_step(batches)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    arena = job.moved.arena if job.moved is not None else None
    found = {"seconds": sorted(seconds[2:])[options.steps // 2], "all": seconds, "arena": arena.nbytes if arena is not None else 0}
    if cuda:
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=90)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--predicted", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "offload_ranks.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("ROW " + json.dumps(one(options.one, options)), flush=True)
        os._exit(0)
    cases = options.cases.split(",")
    if options.predict:
        from foretell.search.traces.needed import Traces

        known = Traces(capability=(9, 0))
        options.predict.write_text(json.dumps({case: say(case, options, known) for case in cases}, indent=1))
        print(options.predict.read_text())
        return
    from memory import append, machine

    said = json.loads(options.predicted.read_text()) if options.predicted else {}
    env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    for case in cases:
        began = time.perf_counter()
        asked = [sys.executable, __file__, "--one", case, *sys.argv[1:]]
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=options.timeout)
        rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        row = json.loads(rows[0][4:]) if rows else {"error": (done.stderr or done.stdout)[-1500:]}
        row = {"case": case, **row, "said": said.get(case), **machine(), "process_seconds": round(time.perf_counter() - began, 1)}
        append(options.out, row)
        print(told(row), flush=True)


def told(row: dict[str, Any]) -> str:
    said = row.get("said") or {}
    if "error" in row:
        return f"{row['case']} {row['error'][-700:]}"
    words = [row["case"]]
    for name in ("allocated", "reserved", "seconds"):
        if name in row and said.get(name):
            scale = GIB if name != "seconds" else 1
            words.append(f"{name} {row[name] / scale:.3f} said {said[name] / scale:.3f} ({said[name] / row[name] - 1:+.1%})")
    return ", ".join([*words, f"arena {row['arena'] / GIB:.2f} in {row['process_seconds']} s"])


if __name__ == "__main__":
    main()
