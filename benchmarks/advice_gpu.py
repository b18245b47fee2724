"""What `foretell plan advise` promises against what it brings on the GPU of this machine.

    python benchmarks/advice_gpu.py --predict FILE               no GPU: 24 questions, the first three changes of each and all together
    python benchmarks/advice_gpu.py --measure FILE --out ROWS    run each question as it is and with each change, in a plain loop
    python benchmarks/advice_gpu.py --tell ROWS                  gains beside promises

Every run is a process of its own; compiling goes on beside other runs, timing is done alone. Rows that --out has are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QUESTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2", "micro_batch": 32},
    "gpt2-fp32": {"model": "gpt2", "micro_batch": 8, "precision": "fp32", "optimizer": "adamw"},
    "gpt2-short": {"model": "gpt2", "micro_batch": 1, "seq": 128, "optimizer": "adamw"},
    "gpt2-medium-recompute": {"model": "gpt2-medium", "micro_batch": 8, "recompute": "full"},
    "gpt2-accumulate": {"model": "gpt2", "micro_batch": 1, "accumulate": 8},
    "llama3-1b": {"model": "llama3-1b", "micro_batch": 1, "seq": 2048, "optimizer": "adamw"},
    "bert-base-fp32": {"model": "bert-base", "micro_batch": 16, "precision": "fp32", "optimizer": "adamw"},
    "bert-large": {"model": "bert-large", "micro_batch": 8, "optimizer": "adamw"},
    "t5-small": {"model": "t5-small", "micro_batch": 16, "optimizer": "adamw"},
    "resnet50": {"model": "resnet50", "micro_batch": 64, "optimizer": "momentum"},
    "resnet50-fp32": {"model": "resnet50", "micro_batch": 64, "optimizer": "momentum", "precision": "fp32"},
    "resnet50-large": {"model": "resnet50", "micro_batch": 256, "optimizer": "momentum"},
    "vit-b16": {"model": "vit-b16", "micro_batch": 64, "optimizer": "adamw"},
    "vit-l16-fp32": {"model": "vit-l16", "micro_batch": 8, "precision": "fp32"},
    "convnext-base": {"model": "convnext-base", "micro_batch": 32, "optimizer": "adamw"},
    "unet-fp32": {"model": "unet", "micro_batch": 8, "precision": "fp32", "optimizer": "adam"},
    "dit-b2": {"model": "dit-b2", "micro_batch": 32, "optimizer": "adamw"},
    "lstm": {"model": "lstm-lm", "micro_batch": 32, "optimizer": "adam"},
    "mamba": {"model": "mamba-130m", "micro_batch": 4, "seq": 512},
    "scaling-mlp": {"model": "scaling-mlp-b12", "micro_batch": 64, "precision": "fp32"},
    "hf-roberta": {"model": "hf:roberta", "micro_batch": 8, "seq": 256, "optimizer": "adamw"},
    "hf-opt": {"model": "hf:opt", "micro_batch": 8, "seq": 512, "overrides": {"num_hidden_layers": 6}, "optimizer": "adamw"},
    "hf-gpt2-fp32": {"model": "hf:gpt2", "micro_batch": 4, "seq": 512, "precision": "fp32", "optimizer": "adamw"},
    "tnt": {"model": "tnt-s", "micro_batch": 32, "optimizer": "adamw"},
}
TOP = 3
PARALLEL = 6
LONGEST = 200
BLOCKS = 5
BLOCK_SECONDS = 0.25
PACERS = ("llama-tiny", "resnet-tiny", "bert-tiny")


def predicted(name: str) -> list[dict[str, Any]]:
    from foretell import api

    question = dict(QUESTIONS[name])
    answer, advice = api.advise(question.pop("model"), hardware="H200", **question)
    assert answer.time is not None and answer.throughput is not None
    about = {"question": name, "unit": answer.throughput.unit}
    base = {"change": "", "options": {}, "seconds": answer.time.step_seconds, "per_second": answer.throughput.per_second, "speedup": 1.0}
    rows = [{**about, **base}]
    for gain in [*advice.gains[:TOP], *([advice.joint] if advice and advice.joint else [])] if advice else []:
        rows.append({
            **about, "change": gain.change, "flag": gain.flag, "options": gain.options, "seconds": gain.step_seconds,
            "per_second": gain.per_second, "speedup": gain.speedup, "maths": gain.maths, "joins": gain.joins,
        })  # fmt: skip
    return rows


def measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """In this process, on its GPU: the question as it is and with the change in turn, with a small step whose pace is the host's
    beside each, so that a machine that slows down in between slows both."""
    import torch

    from foretell.plan.precision import read
    from foretell.prove.measure import WARM, _alone, built
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe

    def made(options: Mapping[str, Any]) -> tuple[Any, int]:
        given = {**QUESTIONS[row["question"]], **options}
        if "precision" in given:
            given["precision"] = read(given["precision"], False)
        compile = given.pop("compile", "none")
        of_source = {key: given.pop(key) for key in ("model", "micro_batch", "seq", "overrides") if key in given}
        source, recipe = Source(**of_source), Recipe(**given, compile="model" if compile is True else compile)
        one = built(source, recipe)
        one()
        torch.cuda.synchronize()
        return one, source.micro_batch * recipe.accumulate

    high = torch.get_float32_matmul_precision()  # torch.compile asks for it when it makes its kernels, eager ops at each call
    plain, samples = made({})
    torch.set_float32_matmul_precision(high)
    changed, more = made(row["options"])
    low = torch.get_float32_matmul_precision()
    pacers = []
    for name in PACERS:
        pacers.append(built(Source(model=name, micro_batch=2), Recipe(precision="bf16-autocast", optimizer="adamw-fused")))
    with _alone():
        torch.cuda.reset_peak_memory_stats()
        found: dict[str, list[float]] = {"base": [], "seconds": [], **{f"pacer {name}": [] for name in PACERS}}
        for block in range(-1, BLOCKS):
            turns = [("base", plain, high), ("seconds", changed, low), *((f"pacer {n}", one, high) for n, one in zip(PACERS, pacers, strict=True))]
            for name, one, how in turns:
                torch.set_float32_matmul_precision(how)
                for _ in range(WARM if block < 0 else 1):
                    one()
                torch.cuda.synchronize()
                if block >= 0:
                    found[name].append(_block(one, BLOCK_SECONDS if not name.startswith("pacer") else 0.05))
    middle = {name: statistics.median(each) for name, each in found.items()}
    return {
        **middle, "gain": statistics.median(b / c for b, c in zip(found["base"], found["seconds"], strict=True)) * more / samples,
        "samples": more, "base_samples": samples, "blocks": found,
    }  # fmt: skip


def _block(one: Any, seconds: float) -> float:
    """Seconds of a step as a loop runs it, over a short while."""
    import torch

    began = time.perf_counter()
    one()
    torch.cuda.synchronize()
    count = max(3, min(200, int(seconds / (time.perf_counter() - began))))
    began = time.perf_counter()
    for _ in range(count):
        one()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def run(row: dict[str, Any], out: Path, about: Mapping[str, Any], *, last: bool) -> bool:
    """Whether there is a row now: one that ran out of memory beside others is run again, alone."""
    command = [sys.executable, __file__, "--one", json.dumps(row)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr.strip().splitlines()[-1][:200]}
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        found = {"error": type(error).__name__}
    if "memory" in str(found.get("error", "")).lower() and not last:
        return False
    with out.open("a") as stream:
        stream.write(json.dumps({**row, "measured": found, **about}) + "\n")
    print(f"{row['question']:22} {row.get('flag', '')[:60]:60} {found.get('seconds', found.get('error'))}", flush=True)
    return True


def tell(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    shown = []
    for row in rows:
        now = row["measured"]
        if "gain" in now:
            shown.append((row, now["gain"]))
            print(f"{row['question']:22} {row['flag'][:70]:70} said {row['speedup']:5.2f}  measured {now['gain']:5.2f}")
    single = [(row["speedup"], gain) for row, gain in shown if row["joins"] == 1]
    right = sum(gain > 1 for _, gain in single)
    near = sum(abs(said - gain) <= 0.10 * max(1.0, gain) for said, gain in single)
    print(f"{len(single)} single changes: {right} are faster, {near} within 10 points; {len(rows) - len(shown)} not run")
    joint = [(row["speedup"], gain) for row, gain in shown if row["joins"] > 1]
    print(f"{len(joint)} joint changes: {sum(gain > 1 for _, gain in joint)} are faster, "
          f"{sum(abs(said - gain) <= 0.10 * max(1.0, gain) for said, gain in joint)} within 10 points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--tell", type=Path)
    parser.add_argument("--one")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further run is begun")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(json.loads(given.one))))
    elif given.predict:
        done = {json.loads(line)["question"] for line in given.predict.read_text().splitlines()} if given.predict.exists() else set()
        for name in given.only.split(",") if given.only else QUESTIONS:
            if name in done:
                continue
            rows = predicted(name)
            with given.predict.open("a") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in rows))
            print(name, *(f"{row['speedup']:.2f} {row.get('flag', '')};" for row in rows[1:]), flush=True)
    elif given.measure:
        import torch

        about = {
            "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "commit": os.environ.get("COMMIT", ""),
        }  # fmt: skip
        rows = [row for row in map(json.loads, given.measure.read_text().splitlines()) if row["change"]]
        began = time.monotonic()

        def one(row: dict[str, Any], last: bool) -> bool:
            return time.monotonic() - began > given.seconds or run(row, given.out, about, last=last)

        with ThreadPoolExecutor(PARALLEL) as pool:
            done = list(pool.map(lambda row: one(row, False), rows))
        for row, there in zip(rows, done, strict=True):
            there or one(row, True)
    elif given.tell:
        tell(given.tell)


if __name__ == "__main__":
    main()
