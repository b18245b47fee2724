"""How much longer ops take on a GPU whose cores a collective holds, and how much later a collective ends that finds the cores taken.

    python benchmarks/beside_messages.py --out benchmarks/results/beside_messages.jsonl        a minute, on a GPU with Triton

A kernel of so many thread blocks stands in for a collective, as in `foretell run box`: it holds a core with each block (`hold`), and may
move bytes all the while (`copy`). Each op is timed alone and beside it, in one process, many times in turn; rows give the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HELD = (0, 2, 4, 8, 16, 24, 32)
"""Thread blocks of the stand-in."""
ROUNDS = 7
ALONE = 2e-3
"""Seconds of an op's repetitions that are timed at once, about."""


def products() -> Iterator[tuple[str, dict[str, Any], Callable[[], object]]]:
    shapes = [
        (512, 1024, 1024), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 768, 768), (4096, 2304, 768), (4096, 3072, 768), (4096, 768, 3072),
        (8192, 768, 768), (2048, 4096, 4096), (4096, 4096, 4096), (4096, 6144, 4096), (4096, 14336, 4096), (4096, 4096, 14336),
        (8192, 4096, 4096), (8192, 14336, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (4096, 50304, 768), (1000, 1500, 2000),
        (3000, 5000, 1100), (8192, 1024, 4096), (16384, 2048, 8192), (2048, 1280, 5120), (1536, 1536, 8192),
    ]  # fmt: skip
    for m, n, k in shapes:
        a, b = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
        yield "gemm", {"m": m, "n": n, "k": k, "dtype": "bfloat16"}, lambda a=a, b=b: a @ b
    for side in (1024, 4096, 8192):
        a, b = (torch.randn(side, side, device="cuda") for _ in range(2))
        yield "gemm", {"m": side, "n": side, "k": side, "dtype": "float32"}, lambda a=a, b=b: a @ b


def others() -> Iterator[tuple[str, dict[str, Any], Callable[[], object]]]:
    for batch, heads, seq, width in ((4, 12, 1024, 64), (8, 12, 1024, 64), (1, 32, 4096, 128), (2, 32, 2048, 128), (1, 32, 8192, 128)):
        q, k, v = (torch.randn(batch, heads, seq, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            about = {"batch": batch, "heads": heads, "seq": seq, "width": width, "backend": backend}

            def forward(q: Any = q, k: Any = k, v: Any = v, backend: str = backend) -> torch.Tensor:
                with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            out = forward()
            grad = torch.randn_like(out)
            yield "attention", {**about, "pass": "forward"}, forward
            yield "attention", {**about, "pass": "backward"}, lambda o=out, g=grad, x=(q, k, v): torch.autograd.grad(o, x, g, retain_graph=True)
    for rows, columns in ((4096, 768), (8192, 4096), (32768, 4096)):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        w = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
        about = {"rows": rows, "columns": columns}
        yield "memory", {**about, "op": "add"}, lambda x=x: x + x
        yield "memory", {**about, "op": "gelu"}, lambda x=x: F.gelu(x)
        yield "memory", {**about, "op": "layer_norm"}, lambda x=x, w=w, c=columns: F.layer_norm(x, (c,), w, w)
        yield "memory", {**about, "op": "sum"}, lambda x=x: x.sum(0)
        yield "memory", {**about, "op": "softmax"}, lambda x=x: torch.softmax(x, -1)
    for channels, side in ((64, 56), (256, 28), (512, 14)):
        x = torch.randn(64, channels, side, side, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        w = torch.randn(channels, channels, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        yield "convolution", {"channels": channels, "side": side}, lambda x=x, w=w: F.conv2d(x, w, padding=1)


def stand_ins() -> dict[str, Callable[[int, float], None]]:
    from beside_messages_kernels import copying

    from foretell.runtime.box import kernels

    source, target = (torch.zeros(64 << 20, dtype=torch.int64, device="cuda") for _ in range(2))

    def hold(blocks: int, seconds: float) -> None:
        kernels.hold[(blocks,)](round(seconds * 1e9), num_warps=kernels.WARPS)

    def copy(blocks: int, seconds: float) -> None:
        copying[(blocks,)](source, target, source.numel(), round(seconds * 1e9), BLOCK=kernels.BLOCK, num_warps=kernels.WARPS)

    return {"hold": hold, "copy": copy}


def timed(op: Callable[[], object], times: int, beside: Callable[[], None] | None, messages: torch.cuda.Stream) -> float:
    """Seconds of one run of the op."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if beside is not None:
        with torch.cuda.stream(messages):
            beside()
        time.sleep(3e-4)  # it is under way
    begin.record()
    for _ in range(times):
        op()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def graph_of(op: Callable[[], object], times: int) -> Callable[[], object]:
    """The op so many times as one launch, so that the host does not matter."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        op()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            op()
    return graph.replay


def slowdowns(out: Any, about: dict[str, Any]) -> None:
    messages, hogs = torch.cuda.Stream(priority=-1), stand_ins()
    for hog in hogs.values():
        hog(1, 1e-5)
    for source in (products, others):
        for kind, what, op in source():
            for _ in range(3):
                op()
            once = timed(op, 10, None, messages)
            times = max(1, min(200, round(ALONE / once)))
            run = op
            if what.get("pass") != "backward":
                run = graph_of(op, times)
            count = 1 if run is not op else times
            found: dict[tuple[str, int], list[float]] = {}
            for _ in range(ROUNDS):
                for name, hog in hogs.items():
                    for blocks in HELD:
                        if name == "copy" and not blocks:
                            continue
                        length = 4 * ALONE + 8 * once * times
                        beside = (lambda hog=hog, blocks=blocks, length=length: hog(blocks, length)) if blocks else None
                        each = timed(run, count, beside, messages) / (times if run is not op else 1)
                        found.setdefault((name, blocks), []).append(each)
            alone = statistics.median(found["hold", 0])
            for (name, blocks), seconds in found.items():
                row = {"what": "slowdown", "kind": kind, **what, "stand_in": name, "blocks": blocks, "seconds": statistics.median(seconds)}
                row["slower"] = round(row["seconds"] / alone, 4)
                out.write(json.dumps({**row, **about}) + "\n")
            slower = {f"{name}{blocks}": round(statistics.median(each) / alone, 3) for (name, blocks), each in found.items() if blocks}
            print(kind, what, f"{alone * 1e6:.1f} us", slower, flush=True)


def rates(out: Any, about: dict[str, Any]) -> None:
    """Bytes a second that the copying stand-in moves, alone."""
    hogs = stand_ins()
    from foretell.runtime.box import kernels

    for blocks in HELD[1:]:
        source, target = (torch.zeros(16 << 20, dtype=torch.int64, device="cuda") for _ in range(2))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            begin.record()
            kernels.spread[(blocks,)](source, target, source.numel(), 1, 0, BLOCK=kernels.BLOCK, num_warps=kernels.WARPS)
            end.record()
            torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        row = {"what": "rate", "blocks": blocks, "bytes_per_second": 2 * source.nbytes / seconds}
        out.write(json.dumps({**row, **about}) + "\n")
        print(row, flush=True)
    del hogs


def delays(out: Any, about: dict[str, Any]) -> None:
    """How long a collective of 200 µs takes that is asked for while products run one after the other."""
    hogs = stand_ins()
    for priority in (0, -1):
        messages = torch.cuda.Stream(priority=priority)
        for m, n, k in ((4096, 768, 768), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192)):
            a, b = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
            once = timed(lambda a=a, b=b: a @ b, 10, None, messages)
            run = graph_of(lambda a=a, b=b: a @ b, max(4, round(4e-3 / once)))
            for blocks in (8, 16, 32):
                took = []
                for _ in range(ROUNDS):
                    torch.cuda.synchronize()
                    run()
                    time.sleep(5e-4)
                    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    with torch.cuda.stream(messages):
                        begin.record()
                        hogs["hold"](blocks, 200e-6)
                        end.record()
                    torch.cuda.synchronize()
                    took.append(begin.elapsed_time(end) / 1e3)
                row = {"what": "delay", "m": m, "n": n, "k": k, "product_seconds": once, "blocks": blocks, "priority": priority}
                row |= {"seconds": statistics.median(took), "asked": 200e-6}
                out.write(json.dumps({**row, **about}) + "\n")
                print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": date.today().isoformat()}
    with arguments.out.open("w") as out:
        rates(out, about)
        slowdowns(out, about)
        delays(out, about)


if __name__ == "__main__":
    main()
