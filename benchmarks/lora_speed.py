"""LoRA on Llama 3.1 8B beside peft: each way of running it, what breaks torch.compile's graphs, and where the time goes.

    python benchmarks/lora_speed.py                 on a GPU with peft installed; adds rows to results/lora_speed.jsonl; ≤ 90 s on an H200
    python benchmarks/lora_speed.py --tiny          a tiny shape on this machine's CPU
    python benchmarks/lora_speed.py --only blocks   one way

Rank 32 on weights in bf16, 2 × 2,048 tokens, AdamW fused, clipped: as `lora_long.py speed`, whose plan is used. In turn, each on a
model of its own: peft's adapters, eager; foretell's, eager; compiled block by block; compiled block by block with recompute; and as
the plan has it, where that is none of these. A way that would begin after --seconds is left out. Last the products of an adapter
alone: in fp32, and as sums of three products in bf16 whose factors add up to the same fp32 numbers, which has fp32's precision but not
its last bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import lora_long  # noqa: E402

ROWS = HERE / "results" / "lora_speed.jsonl"
BATCH, WARM_UP, STEPS, SHOWN = "2", 3, 8, 14
SHAPES = {"q, out": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096)}
"""Inputs and outputs of the layers that have an adapter."""


def plan_of(tiny: bool) -> Any:
    """The plan as predicted for this model, without the shapes of its weights."""
    from foretell.plan import file

    place = Path(tempfile.gettempdir()) / "lora_long_tiny.json" if tiny else lora_long.PREDICTED
    known = json.loads((place if place.exists() else lora_long.PREDICTED).read_text())["speed"][BATCH]
    plan = file.from_json(known["plan"])
    return plan.with_(model={name: value for name, value in plan.model.items() if name not in ("shapes", "digest")}), known["seq"]


def ways(plan: Any) -> dict[str, Any]:
    """Name → plan; None stands for peft."""
    from foretell.plan.types import Residency

    found = {
        "peft": None, "eager": plan.with_(compile="none", blocks={}), "blocks": plan.with_(compile="blocks", blocks={}),
        "blocks, recompute": plan.with_(compile="blocks", blocks={"blocks.*": Residency(mode="recompute")}),
    }  # fmt: skip
    return found if any(plan == one for one in found.values()) else {**found, "as planned": plan}


def built(plan: Any, usual: Any, seq: int, device: Any) -> Callable[[Any], Any]:
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start

    workload = lora_long.plain_model(usual, device)
    if plan is None:
        return lora_long.with_peft(workload)  # type: ignore[no-any-return]
    example = lora_long.tokens(workload.model.vocab_size, int(BATCH), seq, device)
    job = apply(replace(workload, batch=example), plan, start(plan), learning_rate=1e-4)
    return lambda batch: job.train_step([batch]).loss


def one_way(name: str, plan: Any, usual: Any, seq: int, device: Any) -> dict[str, Any]:
    """Seconds of steps, what the compiler could not follow, and the kernels of one step."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    began, cuda = time.perf_counter(), device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    step = built(plan, usual, seq, device)
    batch = lora_long.tokens(512, int(BATCH), seq, device)
    for _ in range(WARM_UP):
        loss = step(batch)
    wait()
    warm = time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS if cuda else 2):
        at = time.perf_counter()
        loss = step(batch)
        wait()
        seconds.append(round(time.perf_counter() - at, 5))
    row = {
        "way": name, "compile": "none" if plan is None else plan.compile, "batch": int(BATCH), "seq": seq, **lora_long._about(),
        "warm_up_seconds": round(warm, 1), "seconds": seconds, "loss": float(loss),
        "tokens_per_second": round(int(BATCH) * seq / statistics.median(seconds)),
        "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else 0, "graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": dict(counters["graph_break"]), "frames_skipped": sum(counters["unimplemented"].values()),
    }  # fmt: skip
    if cuda:
        row["kernels"] = kernels(step, batch)
    return row


def kernels(step: Callable[[Any], Any], batch: Any) -> list[tuple[str, int, int]]:
    """The longest of one step: name, microseconds, calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step(batch)
    every = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)[:SHOWN]
    return [(one.key[:90], round(one.self_device_time_total), one.count) for one in every]


# ---------------------------------------------------------------------- products alone


def products(rows: int, rank: int) -> dict[str, Any]:
    """Microseconds of the six products of an adapter: in fp32, from inputs in bf16 that are cast first; and in pieces of bf16."""
    import torch

    found = {}
    for name, (inputs, outputs) in SHAPES.items():
        x, g = torch.randn(rows, inputs, device="cuda").bfloat16(), torch.randn(rows, outputs, device="cuda").bfloat16()
        a, b = torch.randn(rank, inputs, device="cuda"), torch.randn(outputs, rank, device="cuda")
        wide, grad, small = x.float(), g.float(), torch.randn(rows, rank, device="cuda")
        a3, b3, s3 = (torch.cat(pieces(one), side) for one, side in ((a, 0), (b, 1), (small, 1)))

        def exact(left: Any, right: Any) -> Any:
            return torch.mm(left, right, out_dtype=torch.float32)

        found[name] = {
            "cast x": timed(lambda x=x: x.float()),
            "x A": [timed(lambda w=wide, a=a: w @ a.t()), timed(lambda x=x, a3=a3: exact(x, a3.t()))],
            "small B": [timed(lambda s=small, b=b: s @ b.t()), timed(lambda s3=s3, b3=b3: exact(s3.repeat(1, 2), b3.repeat(1, 2).t()))],
            "gradient B": [timed(lambda g=grad, b=b: g @ b), timed(lambda g=g, b3=b3: exact(g, b3))],
            "of B": [timed(lambda g=grad, s=small: g.t() @ s), timed(lambda g=g, s3=s3: exact(g.t(), s3))],
            "of A": [timed(lambda s=small, w=wide: s.t() @ w), timed(lambda s3=s3, x=x: exact(s3.t(), x))],
            "of x": [timed(lambda s=small, a=a: s @ a), timed(lambda s3=s3, a3=a3: s3.repeat(1, 2) @ a3.repeat(2, 1))],
        }
    return found


def pieces(x: Any) -> list[Any]:
    """Three numbers in bf16 that add up to one in fp32."""
    first = x.bfloat16()
    second = (x - first).bfloat16()
    return [first, second, (x - first - second).bfloat16()]


def timed(run: Callable[[], Any], times: int = 20) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        run()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / times * 1e3, 1)


# ---------------------------------------------------------------------- rows


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="", metavar="NAME", help="ways that have this in their name")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    began, cuda = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch._dynamo.config.automatic_dynamic_shapes = False
    plan, seq = plan_of(options.tiny)
    for name, way in ways(plan).items():
        if options.only not in name or (time.perf_counter() - began > options.seconds):
            continue
        try:
            _write(one_way(name, way, plan, seq, device), options)
        except ImportError as error:
            print(f"{name}: {error}", flush=True)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    if cuda and not options.only and time.perf_counter() - began < options.seconds:
        _write({"way": "products", **lora_long._about(), "microseconds": products(int(BATCH) * seq, lora_long.RANK)}, options)


def _write(row: dict[str, Any], options: Any) -> None:
    print(json.dumps(row), flush=True)
    if not options.tiny:
        with options.out.open("a") as rows:
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
