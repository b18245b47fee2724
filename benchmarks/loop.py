"""What the training loop costs besides the steps: foretell's loop and bare steps of the same job, turn by turn.

    python benchmarks/loop.py [--model gpt2] [--micro-batch 32] [--compile model] [--turns 6] [--steps 30]

A bare turn calls `backward` and `update` on one batch over and over and waits once at its end. A turn of the loop reads
text, schedules the rate, reads every loss, writes the log and the line of the screen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from foretell.plan.types import Plan
from foretell.runtime.parallel import ranks
from foretell.runtime.process.control import Control
from foretell.runtime.train import folder, log, train


class Screen:
    def __init__(self) -> None:
        self.stream = Path("/dev/null").open("w")  # noqa: SIM115

    def step(self, text: str, step: int) -> None:
        self.stream.write("\r" + text)
        self.stream.flush()

    def say(self, text: str) -> None:
        self.stream.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2" if torch.cuda.is_available() else "gpt-tiny")
    parser.add_argument("--micro-batch", type=int, default=32 if torch.cuda.is_available() else 8)
    parser.add_argument("--compile", default="model" if torch.cuda.is_available() else "none")
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--data", default=str(Path(json.__file__).parents[1]))
    asked = parser.parse_args()
    plan = Plan(
        model={"model": asked.model}, hardware="auto", micro_batch=asked.micro_batch, compile=asked.compile, clip=asked.clip,
        precision="bf16-mixed" if torch.cuda.is_available() else "fp32", predicted={"step_seconds": 0.1, "flops_per_step": 1e12},
    )  # fmt: skip
    here = ranks.start(plan)
    with tempfile.TemporaryDirectory() as place:
        settings = folder.RunSettings(steps=1, data=asked.data, warmup=0, schedule="constant", no_save=True)
        folder.begin(Path(place) / "run", plan, settings)
        run = train._prepared(plan, settings, here, folder.Folder(path=Path(place) / "run"), Control(here), Screen(), "")
        run.log = log.RunLog(run.folder.path)
        rows = []
        for turn in range(asked.turns + 1):
            bare = bare_turn(run, asked.steps)
            loop = loop_turn(run, asked.steps)
            if turn:  # the first one compiles
                rows.append((bare, loop))
    bare, loop = (statistics.median(row[side] for row in rows) for side in (0, 1))
    between = statistics.median(run.tally.columns["between_seconds"])
    pairs = sorted(loop / bare - 1 for bare, loop in rows)
    found = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "model": asked.model, "micro_batch": asked.micro_batch, "compile": asked.compile, "turns": asked.turns,
        "steps": asked.steps, "bare_seconds": bare, "loop_seconds": loop, "overhead": statistics.median(pairs),
        "overhead_range": [pairs[0], pairs[-1]], "between_seconds": between,
        "data_seconds": statistics.median(run.tally.data_seconds),
    }  # fmt: skip
    print(json.dumps(found))


def wait(run: train.TrainingRun) -> None:
    if run.ranks.device.type == "cuda":
        torch.cuda.synchronize()


def bare_turn(run: train.TrainingRun, steps: int) -> float:
    batches = run.feed.at(0)
    wait(run)
    began = time.perf_counter()
    for _ in range(steps):
        run.job.update(run.job.backward(batches))
    wait(run)
    return (time.perf_counter() - began) / steps


def loop_turn(run: train.TrainingRun, steps: int) -> float:
    run.settings = replace(run.settings, steps=run.step + steps)
    run.clock.pause()
    wait(run)
    began = time.perf_counter()
    run._steps()
    wait(run)
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
