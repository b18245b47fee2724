"""Activations kept, computed again or moved to host memory: seconds and activation peak of GPT, BERT and T5 shapes on one device.

    python benchmarks/activations.py --predict SAID.json            what foretell says of them; needs no GPU
    python benchmarks/activations.py --predicted SAID.json          every shape and way, each in a process of its own, beside that
    python benchmarks/activations.py --shapes gpt --ways keep,host  some of them
    python benchmarks/activations.py --smoke                        tiny models, on a CPU too

Ways: keep; recompute; host: all blocks but the last two are moved; part: as many of the first blocks as are said to cost at most
five percent (half of them where nothing was said). All run through `runtime.parallel.apply`, as a plan's run does. The activation peak is the
highest allocated memory of the steady steps less what is allocated between two steps.
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
GIB = 2**30
DEVICE = "H200"
SLOWER = 1.05
"""How much longer a step may take for `part`."""


def sources(options: argparse.Namespace) -> dict[str, Any]:
    from foretell.trace.load.model import Source

    dim, layers, words = options.dim, options.layers, options.words
    heads, seq = max(1, dim // 128), options.tokens
    return {
        "gpt": Source(model="gpt2", overrides={"layers": layers, "dim": dim, "heads": heads, "context": seq, "vocab_size": words},
                      micro_batch=options.batch, seq=seq),
        "bert": Source(model="bert-base", overrides={"layers": layers, "dim": dim, "heads": heads, "context": seq, "vocab_size": words},
                       micro_batch=options.batch, seq=seq),
        "t5": Source(model="t5-base", overrides={"layers": layers // 2, "dim": dim, "heads": heads, "head_dim": dim // heads,
                     "ffn": 4 * dim, "context": seq, "vocab_size": words}, micro_batch=options.batch, seq=seq),
    }  # fmt: skip


def plan_for(way: str, blocks: list[str], options: argparse.Namespace, part: int) -> Any:
    from foretell.plan.blocks import compress
    from foretell.plan.types import Plan, Residency

    count = {"keep": 0, "recompute": len(blocks), "host": max(1, len(blocks) - 2), "part": part}[way]
    mode = "recompute" if way == "recompute" else "host"
    chosen = compress({path: Residency(mode=mode) for path in blocks[:count]})
    return Plan(model={}, hardware=DEVICE, precision=options.precision, micro_batch=options.batch, blocks=chosen)


# ---------------------------------------------------------------------- said


def say(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """What is predicted of every way, and how many blocks `part` moves."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.lower.blocks import blocks_of
    from foretell.plan.recipe import model_of
    from foretell.search.traces.needed import Traces
    from foretell.simulate.plan import Options, predict_plan

    about = model_of(sources(options)[shape])
    known = Traces(capability=(9, 0))
    asked = plan_for("keep", [], options, 0).with_(model=about)
    traces = {**known.of(asked, ["keep"]), **known.of(asked, ["recompute"])}
    blocks = list(blocks_of(traces["keep"]))

    def cost(way: str, part: int = 0) -> dict[str, Any]:
        plan = plan_for(way, blocks, options, part).with_(model=about)
        found = predict_plan(traces, plan, parse(DEVICE), Options(profile_of=find_profile))
        memory, seconds = found.worst.memory, found.time.step_seconds if found.time else None
        return {"seconds": seconds, "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "host": memory.host_bytes,
                "verdict": found.verdict}  # fmt: skip

    said = {way: cost(way) for way in ("keep", "recompute", "host")}
    part, limit = 0, SLOWER * (said["keep"]["seconds"] or 0.0)
    for count in range(1, len(blocks)):
        found = cost("part", count)
        if found["seconds"] is None or found["seconds"] > limit:
            break
        part, said["part"] = count, found
    return {"count": part, **said}


# ---------------------------------------------------------------------- measured


def one(shape: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    import resource

    import torch

    from foretell.runtime.offload import saved
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start
    from foretell.trace.fold.blocks import find_blocks
    from foretell.trace.load.model import load

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if options.smoke:
        saved.LEAST = 4096
    torch.manual_seed(0)
    with torch.device(device):
        workload = load(sources(options)[shape])
    blocks = find_blocks(workload.model)
    part = options.part if options.part else max(1, len(blocks) // 2)
    plan = plan_for(way, blocks, options, part)
    job = apply(workload, plan, start(plan), learning_rate=1e-4)

    def steps(count: int) -> tuple[list[float], list[Any]]:
        seconds, losses = [], []
        for number in range(count):
            torch.manual_seed(number)
            began = time.perf_counter()
            losses.append(job.train_step([workload.batch]).loss.item())
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds, losses

    warm, losses = steps(2)
    resident = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = job.away.moved if job.away is not None else None
    seconds, more = steps(options.steps)
    found = {
        "shape": shape, "way": way, "moved_blocks": part if way == "part" else max(1, len(blocks) - 2) if way == "host" else 0,
        "blocks": len(blocks), "seconds": sorted(seconds)[len(seconds) // 2], "all": seconds, "warm": warm, "losses": [*losses, *more],
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    if job.away is not None and before is not None:
        moved, pieces = job.away.moved, job.away.hosts.pieces
        found |= {"down": (moved.down - before.down) // options.steps, "up": (moved.up - before.up) // options.steps,
                  "forwarded": (moved.forwarded - before.forwarded) // options.steps, "arena": job.away.hosts.nbytes,
                  "arenas": len(pieces), "pin_seconds": sum(piece.arena.seconds for piece, _ in pieces)}  # fmt: skip
    if cuda:
        top = torch.cuda.max_memory_allocated()
        found |= {"resident": resident, "allocated": top, "activations": top - resident, "reserved": torch.cuda.max_memory_reserved(),
                  "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0)}  # fmt: skip
    if options.timeline and cuda:
        from offload import timeline

        found |= timeline(lambda: job.train_step([workload.batch]), 0.01)
    job.close()
    return found


# ---------------------------------------------------------------------- all of them


def told(row: dict[str, Any], kept: dict[str, Any] | None) -> str:
    if "error" in row:
        return f"{row['shape']:5s} {row['way']:10s} {row['error'][-700:]}"
    said = row.get("said") or {}
    words = [f"{row['shape']:5s} {row['way']:10s} {row['moved_blocks']}/{row['blocks']} moved, {row['seconds']:.3f} s"]
    if said.get("seconds"):
        words.append(f"(said {said['seconds']:.3f})")
    if kept is not None and "error" not in kept:
        words.append(f"{100 * (row['seconds'] / kept['seconds'] - 1):+.1f} %")
    if "activations" in row:
        words.append(f"activations {row['activations'] / GIB:.2f} GiB")
        if kept is not None and kept.get("activations"):
            words.append(f"{100 * (row['activations'] / kept['activations'] - 1):+.1f} %")
        words.append(f"allocated {row['allocated'] / GIB:.2f}" + (f" (said {said['allocated'] / GIB:.2f})" if said else ""))
        words.append(f"reserved {row['reserved'] / GIB:.2f}" + (f" (said {said['reserved'] / GIB:.2f})" if said else ""))
    if "down" in row:
        words.append(f"down {row['down'] / GIB:.2f} up {row['up'] / GIB:.2f} forwarded {row['forwarded'] / GIB:.2f} "
                     f"arena {row['arena'] / GIB:.2f} in {row['arenas']}, pinned in {row['pin_seconds']:.1f} s")  # fmt: skip
    words.append(f"loss {row['losses'][0]:.6f} … {row['losses'][-1]:.6f}, {row['process_seconds']} s")
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="gpt,bert,t5")
    parser.add_argument("--ways", default="keep,recompute,part,host")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--words", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--precision", default="bf16-master")
    parser.add_argument("--part", type=int, default=0, help="blocks that `part` moves; 0: as said, or half")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--timeline", type=int, default=0, help="1: copies and kernels of two more steps, in pieces of 10 ms")
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--predicted", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "activations.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.layers, options.dim, options.words, options.batch, options.tokens = 4, 128, 256, 2, 64
    if options.one:
        print("ROW " + json.dumps(one(*options.one.split(":"), options)), flush=True)
        os._exit(0)
    if options.predict:
        options.predict.write_text(json.dumps({shape: say(shape, options) for shape in options.shapes.split(",")}, indent=1))
        print(options.predict.read_text())
        return
    from memory import append, machine

    said = json.loads(options.predicted.read_text()) if options.predicted else {}
    about = {**machine(), "layers": options.layers, "dim": options.dim, "batch": options.batch, "tokens": options.tokens,
             "precision": options.precision}  # fmt: skip
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    for shape in options.shapes.split(","):
        kept = None
        for way in options.ways.split(","):
            known = said.get(shape, {})
            if way == "part" and known and not known["count"]:
                print(f"{shape:5s} part: moving even one block is said to cost more than {SLOWER - 1:.0%}", flush=True)
                continue
            row = measured(shape, way, known.get("count", 0), options, env)
            row = {**row, "said": known.get(way), **about}
            append(options.out, row)
            print(told(row, kept), flush=True)
            kept = row if way == "keep" else kept


def measured(shape: str, way: str, part: int, options: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """A row of one process, or what it said when it failed."""
    began = time.perf_counter()
    more = ["--part", str(part)] if part and not options.part else []
    row: dict[str, Any]
    try:
        done = subprocess.run([sys.executable, __file__, "--one", f"{shape}:{way}", *sys.argv[1:], *more], env=env, capture_output=True, text=True,
                              timeout=options.timeout)  # fmt: skip
        rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        row = json.loads(rows[0][4:]) if rows else {"shape": shape, "way": way, "error": (done.stderr or done.stdout)[-1500:]}
    except subprocess.TimeoutExpired:
        row = {"shape": shape, "way": way, "error": f"took longer than {options.timeout:.0f} s"}
    return {**row, "process_seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
