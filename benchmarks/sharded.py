"""One rank of FSDP2 on a real GPU: its memory predicted without a GPU, then measured with a fake process group.

    python benchmarks/sharded.py                     the five cases below, on the GPU at hand
    python benchmarks/sharded.py --configs F.jsonl   your own, one JSON object a line
    python benchmarks/sharded.py --predict-only      no GPU needed; prints, writes nothing
    python benchmarks/sharded.py --limits 4          no wrong "fits": each case under four limits drawn around its need;
                                                     with --predict-only the verdicts alone, written before any is run
    python benchmarks/sharded.py --device cpu        dry run: three steps of the first case with a short batch on the
                                                     CPU, shards of the weights predicted and counted; writes nothing

The fake process group has as many ranks as the case says and this process is rank 0 of them. Its collectives move no
data, so the values are nonsense, but every buffer is allocated, freed and shared between streams as in a real run.
What NCCL itself takes is not in these rows, nor is device memory: only what PyTorch's allocator hands out and reserves.

A case has the keys of benchmarks/memory.py and `world`, the number of ranks. `precision` is not one of them: weights
and gradients are fp32 shards, compute is bf16. Blocks are sharded one by one, then the root.

With --limits, PyTorch's allocator may reserve no more than the limit (`set_per_process_memory_fraction`), for 60 steps or
28 seconds. The verdict is that of an H200 with so much memory besides what context and NCCL take. Rows go to
results/sharded_limits.jsonl.

Rows of kind `fsdp` go to results/memory.jsonl, one by one. A case that is in the file already is not measured again:
to measure these five anew, give another file with --out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import memory  # noqa: E402

CASES: list[dict[str, Any]] = [
    {"model": "gpt2", "micro_batch": 8, "seq": 1024, "world": 8},
    {"model": "llama3-1b", "micro_batch": 2, "seq": 2048, "world": 8},
    {"model": "gpt2-medium", "micro_batch": 8, "seq": 1024, "world": 4, "optimizer": "adamw-foreach", "recompute": "full"},
    {"model": "gpt2", "micro_batch": 8, "seq": 1024, "world": 8, "accumulate": 2},
    {"model": "llama3-8b", "micro_batch": 1, "seq": 2048, "world": 64, "recompute": "full"},
]  # fmt: skip
SHORT = {"micro_batch": 1, "seq": 32}
"""The batch of a dry run."""


def parts(case: dict[str, Any], precision: str, shards: int = 1) -> tuple[Any, Any]:
    source, recipe = memory.parts({**memory.DEFAULTS, **case})
    return source, replace(recipe, precision=precision, shards=shards)


def sharded_trace(case: dict[str, Any]) -> Any:
    from foretell.lower.fsdp.sharded import shard
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(case, "fsdp-bf16", case["world"])
    return shard(capture(lambda: load(source), recipe), case["world"])


def predict(case: dict[str, Any]) -> dict[str, Any]:
    """Peaks of one rank predicted on fake tensors; runs in a process that sees no GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from foretell.hardware import overhead, parse
    from foretell.simulate.memory.memory import predict_memory

    cluster = parse(f"H200:{min(case['world'], 8)}")
    try:
        found = predict_memory(sharded_trace(case), cluster, overhead(cluster.device, "2.11")).memory
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"allocated": found.allocated_bytes, "reserved": found.reserved_bytes}


# ---------------------------------------------------------------- the real rank


def build_step(case: dict[str, Any], device: str) -> Any:
    """Sharded on the meta device, so that the whole model is never in memory; then storage for the shards alone."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from foretell.trace.fold.blocks import find_blocks
    from foretell.trace.load.model import load
    from foretell.trace.record.step import Step, Workload

    source, recipe = parts(case, "fp32")
    with torch.device("meta"):
        workload = load(source)
    step = Step(workload, recipe, device_type=device)
    mesh = init_device_mesh(device, (case["world"],))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for path in find_blocks(step.model):
        fully_shard(step.model.get_submodule(path), mesh=mesh, mp_policy=policy)
    fully_shard(step.model, mesh=mesh, mp_policy=policy)
    step.model.to_empty(device=device)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.to_local().fill_(0.01)
        for buffer in step.model.buffers():
            buffer.fill_(1 if buffer.is_floating_point() else 0)

    def real(value: Any) -> Any:
        return torch.zeros_like(value, device=device) if isinstance(value, torch.Tensor) else value

    step.workload = Workload(step.model, torch.utils._pytree.tree_map(real, workload.batch), workload.loss)
    step.create_optimizer()
    return step


def run_step(step: Any) -> None:
    for _ in range(step.recipe.accumulate):
        step.micro_batch()
    step.update()
    step.zero_grad()


def start(case: dict[str, Any], device: str) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=case["world"], store=FakeStore())
    return build_step(case, device)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Peaks of three steps, and those of the first alone."""
    import torch

    def peaks() -> list[int]:
        torch.cuda.synchronize()
        return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]

    step = start(case, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run_step(step)
    first = peaks()
    run_step(step)
    run_step(step)
    allocated, reserved = peaks()
    return {"allocated": allocated, "reserved": reserved, "first_step": first}


def dry_run(case: dict[str, Any]) -> dict[str, Any]:
    """The same steps on the CPU, which keeps no count of peaks: bytes of the shards only."""
    step = start(case, "cpu")
    for _ in range(3):
        run_step(step)
    return {"shards": sum(p.to_local().nbytes for p in step.model.parameters())}


# ---------------------------------------------------------------- near a limit


def draw(case: dict[str, Any]) -> dict[str, Any]:
    """Verdicts at limits drawn between 0.9 and 1.06 times what would be reserved; runs in a process that sees no GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from foretell.hardware import overhead, parse
    from foretell.simulate.memory.memory import predict_memory

    count = case.pop("draws")
    cluster = parse(f"H200:{min(case['world'], 8)}")
    extra = overhead(cluster.device, "2.11")
    beside = extra.context_bytes + extra.nccl_for(cluster)
    trace = sharded_trace(case)
    reserved = predict_memory(trace, cluster, extra).memory.reserved_bytes
    chance = random.Random(memory.key_of(case))
    found = []
    for limit in sorted(int(reserved * chance.uniform(0.9, 1.06)) for _ in range(count)):
        device = cluster.device.with_memory(limit + beside, "a limit")
        found.append([limit, predict_memory(trace, replace(cluster, device=device), extra).verdict])
    return {"reserved": reserved, "verdicts": found}


def run_in(case: dict[str, Any], limit: int) -> dict[str, Any]:
    """Whether 60 steps, or as many as 28 seconds take, get through where the allocator may reserve so much."""
    import torch

    torch.cuda.init()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    step = start(case, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps, ran, until = 0, True, time.monotonic() + 28
    try:
        while steps < 60 and time.monotonic() < until:
            run_step(step)
            torch.cuda.synchronize()
            steps += 1
    except torch.OutOfMemoryError:
        ran = False
    stats = torch.cuda.memory_stats()
    return {"ran": ran, "steps": steps, "retries": stats["num_alloc_retries"], "reserved": torch.cuda.max_memory_reserved()}


def limits(chosen: list[dict[str, Any]], count: int, out: Path, predict_only: bool) -> None:
    """Verdicts first, all of them; then the runs, each row written as it is known."""
    if not out.exists():
        for case, said in zip(chosen, memory.predict_all([{**one, "draws": count} for one in chosen], "sharded.draw"), strict=True):
            for limit, verdict in said["verdicts"]:
                memory.append(out, {"case": case, "reserved_predicted": said["reserved"], "limit": limit, "verdict": verdict})
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in [] if predict_only else rows:
        if "ran" not in row:
            row |= {**memory.in_child(run_in, row["case"], row["limit"], timeout=120), **memory.machine()}
            out.write_text("".join(json.dumps(one) + "\n" for one in rows))
    told = [row for row in rows if "ran" in row]
    said = [row for row in told if row["verdict"] != "no"]
    print(f"{len(told)} runs, {len(said)} said to fit, {sum(not row['ran'] for row in said)} of them ran out; "
          f"{len(told) - len(said)} refused, {sum(row['ran'] for row in told if row['verdict'] == 'no')} of them ran")  # fmt: skip


# ---------------------------------------------------------------- rows


def compare(left: list[dict[str, Any]], out: Path, predict_only: bool) -> None:
    predicted = memory.predict_all(left, "sharded.predict") if left else []
    about = memory.machine()
    for case, said in zip(left, predicted, strict=True):
        name = " ".join([case["model"], *(f"{key}={value}" for key, value in case.items() if key != "model")])
        if predict_only:
            print(f"{name}: {said}", flush=True)
            continue
        row: dict[str, Any] = {"key": "fsdp " + memory.key_of(case), "name": name, "predicted": said, **about}
        answer = memory.in_child(measure, case, timeout=300)
        row |= {"failed" if "error" in answer else "measured": answer, "kind": "fsdp"}
        memory.append(out, row)
        print(f"{name}\n{row.get('failed') or memory.summary([row]) or said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, help="cases, one JSON object a line")
    parser.add_argument("--out", type=Path, help="results file (JSON lines)")
    parser.add_argument("--limits", type=int, default=0, metavar="N", help="N limits of memory for each case")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    lines = options.configs.read_text().splitlines() if options.configs else []
    chosen = [json.loads(line) for line in lines if line.strip()] or CASES
    if options.device == "cpu":
        case = {**chosen[0], **SHORT}
        trace = sharded_trace(case)
        kept = [trace.storages[number] for number in trace.resident]
        predicted = sum(storage.nbytes for storage in kept if storage.role == "parameter")
        print(f"{case}: {predicted} bytes of shards predicted, {memory.in_child(dry_run, case, timeout=300)}")
        return
    if not options.predict_only and memory.machine()["device"] == "no GPU":
        sys.exit("there is no GPU here to measure on; try --predict-only or --device cpu")
    if options.limits:
        limits(chosen, options.limits, options.out or HERE / "results" / "sharded_limits.jsonl", options.predict_only)
        return
    out = options.out or HERE / "results" / "memory.jsonl"
    done = set() if options.predict_only else memory.done_keys(out)
    compare([case for case in chosen if "fsdp " + memory.key_of(case) not in done], out, options.predict_only)


if __name__ == "__main__":
    main()
