"""Two replicas over a slow link: every step summed, or stepping alone and joined every so many steps (DiLoCo), predicted and measured.

    python benchmarks/diloco.py                    all cases, a quarter of an hour of CPU time; done ones are not run again
    python benchmarks/diloco.py --only int8        one of them
    python benchmarks/diloco.py --mbit 50 --delay 0.1

A ~1M GPT on two processes of one thread each, each in a network namespace of its own: `tbf` shapes what leaves it, a relay in user space
delays every packet (`slow_link.py`). Every case is `foretell run` as users start it on two machines. Rows go to results/diloco.jsonl.

What a row says: `rate` in tokens a second of both replicas over whole rounds; `alone_seconds`, the median step in which no round ends, so
that `compute_rate` is what the same processes at the same time would reach without a link; `share`, the one over the other; loss on
held-out text after all steps. Predictions are those of the plan for `2x1xCPU@50Mbit/100ms`, its compute slowed by as much as this CPU's
steps took longer than its profile says just then (`pace`); the link's part is not touched.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import slow_link

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "diloco.jsonl"
TEXT = str(Path(json.__file__).parent.parent / "asyncio")
"""Text that every Python has."""
MODEL, MICRO = "gpt-tiny", 8
TRAIN = ["--save-every", "0", "--eval-batches", "32"]
TRAINED = "small steps, loss, every step"
"""Whose weights at its end others begin with; it is run anew for them where its folder is gone."""
Case = dict[str, Any]
SETTINGS: dict[str, Any] = {
    f"H {every}, outer {rate:g}, momentum {momentum:g}": {"every": every, "outer": {"lr": rate, "momentum": momentum}}
    for every, rate, momentum in ((10, 0.7, 0.9), (10, 1.0, 0.0), (10, 1.0, 0.3), (5, 1.0, 0.0), (5, 1.0, 0.3), (2, 1.0, 0.0))
}
"""Of rounds whose loss alone is compared: no link between them."""


def cases(steps: int) -> dict[str, Case]:
    """Name → the words of its plan, its steps and whether it is on the slow link."""
    return {
        "every step": {"sync": None, "steps": 24, "link": True},
        "loss, every step": {"sync": None, "steps": steps, "link": False},
        "int8": {"sync": {"every": 50, "format": "int8"}, "steps": steps, "link": True},
        "fp32": {"sync": {"every": 50}, "steps": 150, "link": True},
        "int8, beside": {"sync": {"every": 20, "format": "int8", "delay": 5}, "steps": 100, "link": True},
        "small steps, every step": {"sync": None, "steps": 24, "link": True, "micro": 2},
        "small steps, loss, every step": {"sync": None, "steps": steps, "link": False, "micro": 2},
        "small steps, int8, beside": {
            "sync": {"every": 20, "outer": {"lr": 0.7, "momentum": 0.3}, "format": "int8", "delay": 10}, "steps": steps, "link": True, "micro": 2,
        },
        "usual rate, loss, every step": {"sync": None, "steps": steps, "link": False, "micro": 2, "lr": "3e-4"},
        "usual rate, int8": {"sync": {"every": 20, "format": "int8"}, "steps": steps, "link": True, "micro": 2, "lr": "3e-4"},
        "pair, int8": {"sync": {"every": 50, "format": "int8"}, "steps": 150, "link": True},
        "pair, every step": {"sync": None, "steps": 24, "link": True},
        **{f"small steps, loss, {name}": {"sync": sync, "steps": steps, "link": False, "micro": 2} for name, sync in SETTINGS.items()},
        **{
            f"from trained, {name}": {"sync": sync, "steps": steps, "link": link, "micro": 2, "lr": "1e-3", "seed": 1, "from": TRAINED}
            for name, sync, link in (("loss, every step", None, False), ("int8", {"every": 20, "format": "int8"}, True))
        },
        "small steps, loss, H 5, 3e-3": {"sync": SETTINGS["H 5, outer 1, momentum 0"], "steps": steps, "link": False, "micro": 2, "lr": "3e-3"},
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", help="one case")
    asked.add_argument("--mbit", type=float, default=50.0)
    asked.add_argument("--delay", type=float, default=0.1, help="seconds, one way")
    asked.add_argument("--steps", type=int, default=1000)
    asked.add_argument("--out", default="build/diloco", help="scratch")
    asked.add_argument("--again", action="store_true", help="run what has a row already")
    given = asked.parse_args()
    if why := slow_link.missing():
        raise SystemExit(f"no slow link here: {why}")
    slow_link.enter()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    done = {row["case"] for row in rows()} if not given.again else set()
    for name, case in cases(given.steps).items():
        if name not in done and given.only in (None, name):
            row = measured(name, case, given)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row, indent=2), flush=True)
    print(summary(rows()))


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


# --- a case ----------------------------------------------------------------------------------------------------------


def measured(name: str, case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """One run, and what was predicted of it."""
    scratch, begins = scratch_of(name, given), []
    if before := case.get("from"):
        if not list((scratch_of(before, given) / "run" / "checkpoints").glob("step-*")):
            measured(before, cases(given.steps)[before], given)
        begins = ["--init-from", str(scratch_of(before, given) / "run")]
    subprocess.run(["rm", "-rf", str(scratch)], check=True)
    scratch.mkdir(parents=True)
    on = f"2x1xCPU@{given.mbit:g}Mbit/{1e3 * given.delay:g}ms"
    path = scratch / "plan.json"
    path.write_text(json.dumps(plan(case, on)))
    words = [
        sys.executable, "-m", "foretell", "run", str(path), "--data", TEXT, "--steps", str(case["steps"]), "--lr", case.get("lr", "2e-3"), *TRAIN,
        "--device", "cpu", "--out", str(scratch / "run"), "--seed", str(case.get("seed", 0)), *begins, *([] if name == TRAINED else ["--no-save"]),
    ]  # fmt: skip
    began, cpu = time.monotonic(), os.times()
    with ExitStack() as stack:
        ends = stack.enter_context(slow_link.SlowLink(ends=2, bits_per_second=1e6 * given.mbit, delay_seconds=given.delay))
        processes = []
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": slow_link.address(0), "MASTER_PORT": "29517",
                   "GLOO_SOCKET_IFNAME": slow_link.DEVICE, "OMP_NUM_THREADS": "1"}  # fmt: skip
            if not case["link"]:
                env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            start = ends.start if case["link"] else lambda _, words, **more: subprocess.Popen(words, **more)
            log = (scratch / f"rank-{rank}.txt").open("wb")
            processes.append(start(rank, words, env=env, stdout=log, stderr=log))
        failed = [process.wait() for process in processes]
    if failed[0] or any(one not in (0, -signal.SIGABRT) for one in failed):  # torch 2.13 may abort in a rank's exit, its run over
        raise SystemExit(f"{name}: a rank failed, see {scratch}/rank-*.txt")
    after = os.times()
    return {
        "case": name, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "on": on if case["link"] else "one machine",
        "sync": case["sync"], "micro_batch": case.get("micro", MICRO), "lr": case.get("lr", "2e-3"),
        "steps": case["steps"], "exits": failed,
        **read(scratch / "run", case), **predicted(path, scratch / "run", case, on),
        "wall_seconds": round(time.monotonic() - began, 1), "cores": os.cpu_count(), "load": [round(one, 2) for one in os.getloadavg()],
        "cpu_seconds": round(after.children_user + after.children_system - cpu.children_user - cpu.children_system, 1),
    }  # fmt: skip


def scratch_of(name: str, given: argparse.Namespace) -> Path:
    return Path(given.out).resolve() / name.replace(" ", "-").replace(",", "")


def plan(case: Case, on: str) -> dict[str, Any]:
    sync = case["sync"]
    found = {"version": 1, "model": {"model": MODEL}, "hardware": on, "mesh": {"dp_replicate": 2}, "precision": "fp32",
             "micro_batch": case.get("micro", MICRO)}  # fmt: skip
    return found if sync is None else {**found, "sync": sync}


def read(run: Path, case: Case) -> dict[str, Any]:
    """What a run's log says."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["seconds"] for row in log if row["event"] == "step"}
    joins = {row["step"]: row for row in log if row["event"] == "round"}
    every = case["sync"]["every"] if case["sync"] else 1
    delay = case["sync"].get("delay", 0) if case["sync"] else 0
    skipped = every if case["sync"] else 4
    kept = {step: value for step, value in seconds.items() if step > skipped}
    ends = {step + delay for step in joins} | (set(joins) if delay else set())
    steps = [value for step, value in kept.items() if step not in ends]
    tokens = json.loads((run / "measurement.json").read_text())["per_step"]
    found: dict[str, Any] = {
        "tokens_per_step": tokens, "mean_seconds": statistics.fmean(kept.values()), "rate": tokens / statistics.fmean(kept.values()),
        "losses": [row["loss"] for row in log if row["event"] == "step"][-1], "eval_loss": next(row["loss"] for row in log if row["event"] == "eval"),
    }  # fmt: skip
    if case["sync"]:
        alone = statistics.fmean(steps)
        found |= {
            "alone_seconds": alone, "compute_rate": tokens / alone, "share": alone * len(kept) / sum(kept.values()),
            "round_seconds": statistics.fmean(row["seconds"] for row in joins.values()),
            "message_seconds": statistics.fmean(row["message_seconds"] for row in joins.values()), "rounds": len(joins),
        }  # fmt: skip
    return found


def predicted(path: Path, run: Path, case: Case, on: str) -> dict[str, Any]:
    """Of the plan and of the same plan that sums gradients in every step, at the pace of this CPU now."""
    if not case["link"] or not case["sync"]:
        return {}
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.plan import file
    from foretell.plan.types import Mesh
    from foretell.search.traces.needed import Traces
    from foretell.simulate.plan import Options, predict_plan

    asked, cluster, traces = file.read(path), parse(on), Traces(None)
    trace = traces.of(asked, ["keep"])
    alone = predict_plan(trace, asked.with_(mesh=Mesh(), sync=None), cluster, Options(profile_of=find_profile))
    assert alone.time is not None
    pace = read(run, case)["alone_seconds"] / alone.time.step_seconds
    how = Options(profile_of=find_profile, pace=pace)
    joined, every = (predict_plan(trace, one, cluster, how) for one in (asked, asked.with_(sync=None)))
    assert joined.time is not None and every.time is not None and joined.rounds is not None
    return {
        "pace": pace, "predicted": {
            "step_seconds": joined.time.step_seconds, "every_step_seconds": every.time.step_seconds,
            "speed_up": every.time.step_seconds / joined.time.step_seconds, **joined.rounds.to_json(),
        },
    }  # fmt: skip


def summary(found: list[dict[str, Any]]) -> str:
    """Each case in a line, beside the per-step one and the loss of it."""
    by_name = {row["case"]: row for row in found}
    lines = []
    for name, row in by_name.items():
        if "rate" not in row:
            continue
        kind = next((one for one in ("small steps, ", "usual rate, ", "pair, ", "from trained, ") if name.startswith(one)), "")
        every, loss = by_name.get(f"{kind}every step"), by_name.get(f"{kind}loss, every step")
        loss = loss if loss is not None and loss["steps"] == row["steps"] else None
        text = f"{name}: {row['rate']:,.0f} tokens/s, held-out loss {row['eval_loss']:.4f}"
        if "share" in row and row.get("predicted"):
            text += f", {row['share']:.1%} of compute alone (predicted {row['predicted']['share']:.1%})"
            if every:
                ratio = every["mean_seconds"] / row["mean_seconds"]
                text += f", {ratio:.1f}x of every step (predicted {row['predicted']['speed_up']:.1f}x)"
            if loss:
                text += f", loss {row['eval_loss'] / loss['eval_loss'] - 1:+.2%} at equal tokens"
        lines.append(text)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
