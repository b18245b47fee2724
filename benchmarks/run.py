"""`foretell run` beside a training loop written by hand: tokens a second, in turns, in one process.

    python benchmarks/run.py                 plan and run GPT 124M and 1.3B on the GPU at hand
    python benchmarks/run.py --plan-only     choose the plans and keep them in configs/, on any machine
    python benchmarks/run.py --size tiny     a small one, on a CPU as well: does it work at all

The loop by hand is what its author would write: torch.compile of the model, bf16 autocast, fused AdamW. foretell runs
the plan its own chooser made for the same batch, through its whole training loop: data, schedule, log, clocks. Both
train models of their own; they take turns of some steps each, so that clocks and neighbours are the same for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
MODEL = "benchmarks/models/plain_gpt.py:model"
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "dim": 64, "heads": 2, "context": 64, "vocab_size": 256, "samples": 4, "steps": 100},
    "124M": {"layers": 12, "dim": 768, "heads": 12, "context": 1024, "vocab_size": 50304, "samples": 32, "steps": 40},
    "1.3B": {"layers": 24, "dim": 2048, "heads": 16, "context": 2048, "vocab_size": 50304, "samples": 8, "steps": 15},
}
TURNS = 6


def source_of(size: dict[str, Any]) -> Any:
    from foretell.trace.load.model import Source

    overrides = {name: size[name] for name in ("layers", "dim", "heads", "context", "vocab_size")}
    return Source(model=MODEL, overrides=overrides, seq=size["context"], micro_batch=size["samples"])


def plan_of(name: str) -> Any:
    """The plan that foretell's chooser makes for this batch, without clipping, as the loop by hand."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.plan import file
    from foretell.search.solve.choose import SearchConstraints, choose
    from foretell.simulate.plan import Options

    kept = HERE / "configs" / f"run-{name}.json"
    if kept.exists():
        return file.read(kept)
    size = SIZES[name]
    hardware = "auto" if name == "tiny" else "H200"
    wishes = SearchConstraints(global_batch=size["samples"], clip=None, ranks=(1,))
    plan = choose(source_of(size), parse(hardware), hardware, wishes, options=Options(profile_of=find_profile)).plan
    if name != "tiny":
        file.write(plan, kept)
    return plan


class ByHand:
    """What a user would write."""

    def __init__(self, size: dict[str, Any], device: str, compile: bool) -> None:
        import torch

        from foretell.trace.load.model import load

        torch.manual_seed(0)
        with torch.device(device):
            made = load(source_of(size))
        self.device, self.model, self.batch = device, made.model.to(device), made.batch
        self.called = torch.compile(self.model) if compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def steps(self, count: int) -> None:
        import torch

        for _ in range(count):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.called(**self.batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Foretold:
    """foretell's own loop, some steps at a time."""

    def __init__(self, plan: Any, device: str) -> None:
        from foretell.runtime.parallel import ranks
        from foretell.runtime.process.control import Control
        from foretell.runtime.process.signals import Signals
        from foretell.runtime.train import folder, log, train

        joined = ranks.start(plan, device=device)
        settings = folder.RunSettings(steps=10**6, no_save=True, schedule="constant", warmup=0)
        where = Path(tempfile.mkdtemp()) / "run"
        folder.begin(where, plan, settings)
        self.run = train._prepared(plan, settings, joined, folder.Folder(path=where), Control(joined), _Silent(), "")
        self.run.signals = Signals()
        self.run.log = log.RunLog(where, [], last_step=0)

    def steps(self, count: int) -> None:
        self.run.settings = replace(self.run.settings, steps=self.run.step + count)
        self.run._steps()

    def overhead(self) -> float:
        """Share of a step between two steps, by the run's own clock."""
        from foretell.runtime.observe import measure

        columns = self.run.tally.columns
        pairs = list(zip(columns["between_seconds"], columns["seconds"], strict=True))[measure.SKIP_MOST :]
        return statistics.median(between / whole for between, whole in pairs)


class _Silent:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


def measure(name: str, device: str) -> dict[str, Any]:
    import torch
    from memory import machine

    size, plan = SIZES[name], plan_of(name)
    tokens = size["samples"] * size["context"]

    def timed(one: Any, count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        one.steps(count)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    began = time.perf_counter()
    hand = ByHand(size, device, compile=device == "cuda")
    timed(hand, 3)
    ready = time.perf_counter()
    own = Foretold(plan, device)
    timed(own, 6)
    done = time.perf_counter()
    found: dict[str, list[float]] = {"by_hand": [], "foretell": []}
    for turn in range(TURNS):
        pair = [("by_hand", hand), ("foretell", own)]
        for label, one in pair if turn % 2 == 0 else pair[::-1]:
            timed(one, 2)
            found[label].append(timed(one, size["steps"]))
    middle = {label: statistics.median(values) for label, values in found.items()}
    ratios = [a / b for a, b in zip(found["by_hand"], found["foretell"], strict=True)]
    predicted = plan.predicted.get("step_seconds")
    return {
        "name": name, "tokens_per_step": tokens, "turns": found, "seconds": middle,
        "tokens_per_second": {label: tokens / value for label, value in middle.items()},
        "ratio": statistics.median(ratios), "overhead": own.overhead(), "predicted_seconds": predicted,
        "ready_seconds": {"by_hand": round(ready - began, 1), "foretell": round(done - ready, 1)},
        "plan": {"compile": plan.compile, "precision": plan.precision, "micro_batch": plan.micro_batch, "accumulate": plan.accumulate},
        **machine(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), action="append", help="default: 124M and 1.3B")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "run.jsonl")
    options = parser.parse_args()
    for name in options.size or ["124M", "1.3B"]:
        if options.plan_only:
            plan = plan_of(name)
            print(name, plan.compile, plan.micro_batch, plan.accumulate, dict(plan.predicted))
            continue
        import torch

        row = measure(name, "cuda" if torch.cuda.is_available() else "cpu")
        with options.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{name}: by hand {row['tokens_per_second']['by_hand']:,.0f} tokens/s, foretell "
              f"{row['tokens_per_second']['foretell']:,.0f}, ratio {row['ratio']:.4f}, overhead {100 * row['overhead']:.2f} % "
              f"of a step, predicted {row['predicted_seconds']}")  # fmt: skip


if __name__ == "__main__":
    main()
