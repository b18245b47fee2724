"""No wrong "fits" of a server: what is said at limits around the need, and whether every request then gets its last token.

    python benchmarks/serve_fit.py predict --on H200 --out sealed/serve_fit.json      no GPU needed
    python benchmarks/serve_fit.py measure sealed/serve_fit.json --out results/serve_fit.jsonl     on the GPU; rows that are there are kept
    python benchmarks/serve_fit.py compare sealed/serve_fit.json results/serve_fit.jsonl

A case is a shape, a dtype, pages, sequences and tokens of a step, and a device that plain cudaMalloc makes as small as a limit drawn within
10 % of what was predicted to be needed. At once as many requests as may run come, each with its share of all pages, and are answered to
their last token, with every token drawn at a temperature and log probabilities told. Shapes share their model; `--no-ballast` measures
peaks alone. `--configs FILE` takes other cases, `--shapes tiny` on a CPU is a dry run. All of them take about 9 minutes of an H200.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving_runs import MODEL, Rows, finished, freed, model_of, on_gpu, prompts, read_sealed, sealed, words_of

GIB = 1 << 30
KINDS: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    "qwen2-0.5b": (("bf16", 2048, 64, 512), ("bf16", 8192, 128, 1024), ("bf16", 4096, 32, 2048), ("bf16", 6000, 256, 1024),
                   ("fp16", 4096, 64, 512), ("fp32", 2048, 32, 512)),
    "llama-1b": (("bf16", 2048, 64, 512), ("bf16", 8192, 128, 1024), ("bf16", 4096, 32, 4096), ("bf16", 6000, 200, 1024), ("fp16", 3000, 48, 512)),
    "llama-3b": (("bf16", 1024, 32, 256), ("bf16", 4096, 64, 512), ("bf16", 6144, 128, 1024), ("bf16", 3000, 16, 2048)),
    "llama3-8b": (("bf16", 1024, 32, 256), ("bf16", 4096, 64, 512), ("bf16", 8192, 128, 1024), ("bf16", 5000, 32, 4096), ("fp16", 2048, 96, 512)),
    "qwen2-14b": (("bf16", 1024, 32, 256), ("bf16", 3000, 64, 512), ("bf16", 5000, 96, 1024)),
}  # fmt: skip
"""Shape → dtype, pages, running, tokens of a step."""
DRAWS = ((0.9, 0.97), (0.97, 1.05), (1.05, 1.1))
"""Of the need: a limit is drawn between each two."""
SECONDS = {"qwen2-0.5b": 4, "llama-1b": 4, "llama-3b": 6, "llama3-8b": 9, "qwen2-14b": 12, "tiny": 1}
"""Of a case, about, and 15 to build and compile a shape."""
PAGE = 16


def kinds(shapes: list[str]) -> list[tuple[str, tuple[str, int, int, int]]]:
    return [(shape, kind) for shape in shapes for kind in KINDS.get(shape, (("fp32", 48, 6, 64),))]


def question(shape: str, kind: tuple[str, int, int, int], hardware: str, context: int) -> Any:
    from foretell.api.serving.forecast import ServingAsked

    dtype, pages, running, tokens = kind
    return ServingAsked(
        model=MODEL, hardware=hardware, overrides={"shape": shape, "context": context}, precision=dtype, pages=pages, running=running, tokens=tokens
    )


def predict(hardware: str, out: Path, shapes: list[str], seed: int) -> None:
    from foretell.api.serving.forecast import served_model
    from foretell.quantities import NO

    draw, rows = random.Random(seed), []
    for shape, kind in kinds(shapes):
        dtype, pages, running, tokens = kind
        context = pages * PAGE // running
        asked = question(shape, kind, hardware, context)
        model = served_model(asked)
        layout = replace(asked.layout, pages=pages)
        found = model.costs(layout).largest(pages)
        for low, high in DRAWS:
            limit = int(found.memory.device_bytes * draw.uniform(low, high))
            device = replace(model.cluster.device, memory_bytes=limit)
            small = replace(model, cluster=replace(model.cluster, device=device)).costs(layout).largest(pages)
            rows.append({
                "shape": shape, "dtype": dtype, "pages": pages, "running": running, "tokens": tokens, "limit": limit, "verdict": small.verdict,
                "fits": small.verdict != NO, "device_bytes": found.memory.device_bytes, "reserved_bytes": found.memory.reserved_bytes,
            })  # fmt: skip
            print(rows[-1], flush=True)
    seconds = sum(SECONDS.get(row["shape"], 10) for row in rows) + 15 * len({row["shape"] for row in rows})
    print(f"{len(rows)} cases, {sum(row['fits'] for row in rows)} said to fit; about {seconds} s on the device", flush=True)
    sealed(out, hardware, rows, seed=seed)


# ---------------------------------------------------------------------- on the device


class Ballast:
    """Device memory that is nobody's, by plain cudaMalloc, until no more than `limit` bytes are left to this process."""

    def __init__(self, limit: int) -> None:
        import torch

        path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line)
        self.cudart, self.taken = ctypes.CDLL(path), []
        free, total = torch.cuda.mem_get_info()
        left = total - limit
        self.bytes, self.room = 0, free - left
        """Bytes that remain beside what this process holds; below zero: it holds more than the limit already."""
        while left > 0 and self.room > 0:
            pointer = ctypes.c_void_p()
            chunk = min(left, 8 * GIB)
            if self.cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(chunk)) != 0:
                self.room = -1
                break
            self.taken.append(pointer)
            self.bytes += chunk
            left -= chunk

    def free(self) -> None:
        for pointer in self.taken:
            self.cudart.cudaFree(pointer)


def run(made: Any, row: dict[str, Any], ballast: bool) -> dict[str, Any]:
    """Whether all are answered; peaks, and the pages that the engine got."""
    import torch

    freed()
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    held = Ballast(row["limit"]) if ballast and on_gpu() else None
    found: dict[str, Any] = {"ran": False}
    try:
        if held is not None and held.room <= 0:
            return {"ran": False, "why": "weights and context alone are above the limit"}
        found |= answered(made, row)
        if on_gpu():
            free, total = torch.cuda.mem_get_info()
            beside = total - free - torch.cuda.memory_reserved() - (held.bytes if held is not None else 0)
            found |= {"reserved": torch.cuda.max_memory_reserved(), "context": beside}
    except torch.OutOfMemoryError as error:
        found["why"] = str(error)[:160]
    except RuntimeError as error:
        if "memory" not in str(error).lower() and "alloc" not in str(error).lower():
            raise
        found["why"] = str(error)[:160]
    finally:
        if held is not None:
            held.free()
    return found


def answered(made: Any, row: dict[str, Any]) -> dict[str, Any]:
    from foretell.serve.engine import ServingEngine, StepLimits
    from foretell.serve.sampling import Sampling

    limits = StepLimits(running=row["running"], tokens=max(row["tokens"], row["running"]))
    engine = ServingEngine(made, pages=row["pages"], limits=limits, share=False)
    try:
        each = row["pages"] * PAGE // row["running"] // PAGE * PAGE
        steps = row["running"] * each // (limits.tokens - row["running"] + 1) + 8  # until the last prompt is through all must generate
        most = min(each // 2, steps)
        how = [Sampling(most=most, temperature=0.9, top_p=0.9, seed=number, logprobs=5) for number in range(row["running"])]
        prompt = prompts(row["running"], each - most, each - most, words_of(row["shape"]), seed=1)
        together, made_of = 0, [engine.submit(one, way) for one, way in zip(prompt, how, strict=True)]
        while not engine.idle:
            engine.step()
            together = max(together, sum(one.length > one.prompt for one in engine.scheduler.running))
        finished()
        got = engine.runner.pool.keys[0].shape[0] // PAGE
        whole = all(len(one.ids) == most for one in made_of)
        return {"ran": whole, "together": together, "pages_got": got, "notes": engine.runner.notes, "preemptions": engine.scheduler.preemptions}
    finally:
        with suppress(Exception):
            engine.close()


def measure(path: Path, out: Path, ballast: bool) -> None:
    rows, cases = Rows(out), read_sealed(path)
    for shape, dtype in dict.fromkeys((row["shape"], row["dtype"]) for row in cases):
        mine = [row for row in cases if (row["shape"], row["dtype"]) == (shape, dtype)]
        mine = [row for row in mine if not rows.has(**key_of(row), ballast=ballast)]
        if not mine:
            continue
        made = model_of(shape, max(row["pages"] * PAGE // row["running"] for row in mine), dtype)
        warm = {**mine[0], "pages": 4 * mine[0]["running"]}
        run(made, warm, False)  # compiled code and libraries are there before the first is measured
        for row in mine:
            begun = time.perf_counter()
            found = run(made, row, ballast)
            rows.add(**key_of(row), **found, ballast=ballast, seconds=round(time.perf_counter() - begun, 1))
        del made
        freed()


def key_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("shape", "dtype", "pages", "running", "tokens", "limit")}


def compare(path: Path, measured: Path) -> None:
    known = {tuple(key_of(row).values()): row for row in read_sealed(path)}
    wrong = refused = close = fits = 0
    offs = []
    rows = Rows(measured).known
    for row in rows:
        told = known.get(tuple(key_of(row).values()))
        if told is None:
            continue
        fits += told["fits"]
        if told["fits"] and not row["ran"]:
            wrong += 1
            print(f"WRONG FIT: {row}")
        if "reserved" in row:
            offs.append(told["device_bytes"] / (row["reserved"] + row["context"]) - 1)
            print(f"{' '.join(map(str, key_of(row).values()))}: {told['verdict']}, ran {row['ran']}, peak {offs[-1]:+.2%}, "
                  f"pages {row['pages_got']} of {row['pages']}, {row['together']} of {row['running']} at once")  # fmt: skip
            near = told["limit"] * 0.95 >= row["reserved"] + row["context"]
            close += near
            refused += near and not told["fits"]
    sizes = sorted(map(abs, offs))
    print(f"{len(rows)} cases, {fits} said to fit: {wrong} ran out of memory; {refused} of {close} that use at most 95 % were refused")
    if sizes:
        print(f"device peak: median {statistics.median(sizes):.2%}, worst {sizes[-1]:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "compare"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shapes", default=",".join(KINDS))
    parser.add_argument("--on", default="H200")
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--no-ballast", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.what == "predict":
        predict(asked.on, asked.out or Path("serve_fit.json"), asked.shapes.split(","), asked.seed)
    elif asked.what == "measure":
        measure(asked.files[0], asked.out or Path("serve_fit.jsonl"), not asked.no_ballast)
    else:
        compare(*asked.files)


if __name__ == "__main__":
    main()
