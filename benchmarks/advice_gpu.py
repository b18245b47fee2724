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
LONGEST = 150


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
    """In this process, on its GPU."""
    import torch

    from foretell.prove.measure import WARM, _alone, _timed, built
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe

    given = {**QUESTIONS[row["question"]], **row["options"]}
    compile = given.pop("compile", "none")
    of_source = {key: given.pop(key) for key in ("model", "micro_batch", "seq", "overrides") if key in given}
    source, recipe = Source(**of_source), Recipe(**given, compile="model" if compile is True else compile)
    if recipe.compile != "none":  # compiling takes no time of the device's to speak of
        one = built(source, recipe)
        one()
        torch.cuda.synchronize()
    with _alone():
        if recipe.compile == "none":
            one = built(source, recipe)
        for _ in range(WARM + 1):
            one()
        torch.cuda.synchronize()
        found = _timed(one)
    return {**found, "samples": source.micro_batch * recipe.accumulate, "allocated": torch.cuda.max_memory_allocated()}


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
    bases = {row["question"]: row["measured"] for row in rows if not row["change"] and "seconds" in row["measured"]}
    shown = []
    for row in rows:
        base, now = bases.get(row["question"]), row["measured"]
        if row["change"] and base is not None and "seconds" in now:
            gain = now["samples"] / now["seconds"] / (base["samples"] / base["seconds"])
            shown.append((row, gain))
            print(f"{row['question']:22} {row['flag'][:70]:70} said {row['speedup']:5.2f}  measured {gain:5.2f}")
    single = [(row["speedup"], gain) for row, gain in shown if row["joins"] == 1]
    right = sum(gain > 1 for _, gain in single)
    near = sum(abs(said - gain) <= 0.10 * max(1.0, gain) for said, gain in single)
    print(f"{len(single)} single changes: {right} are faster, {near} within 10 points; {len(rows) - len(bases) - len(shown)} not run")


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
        rows = [json.loads(line) for line in given.measure.read_text().splitlines()]
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
