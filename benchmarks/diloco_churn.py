"""`foretell run` with a quorum, its replicas killed with SIGKILL, or stopped, at random moments, and started again by its supervisor.

    python benchmarks/diloco_churn.py              sixty kills and six stops, some minutes
    python benchmarks/diloco_churn.py --kills 100  the same run goes on where it was left, until it has so many

Four replicas of a small model, two of which finish a round. Every hash that replicas and hub compared is in the log; after the last fault
the run is asked to stop, and one process plays its members round by round (`tests/cpu_dist/replayed.py`): its weights must have the
hash of every round, and those at the end the bits of the last checkpoint. A row goes to results/diloco.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from foretell.runtime.process import proc  # noqa: E402
from tests.cpu_dist.replayed import equal, plan_of, rounds, rows, words  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "diloco.jsonl"
REPLICAS, QUORUM, GRACE = 4, 2, 3.0
STEPS = 1_000_000
"""Nobody waits for the last one."""
STOP_EVERY = 11
"""One fault in so many is a SIGSTOP."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kills", type=int, default=66, help="faults, those of earlier calls included")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", default="build/churn", help="the run's folder is in it")
    given = asked.parse_args()
    folder = Path(given.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    faults = folder / "faults.jsonl"
    done = len(faults.read_text().splitlines()) if faults.exists() else 0
    began = time.monotonic()
    if done < given.kills:
        churn(folder, faults, range(done, given.kills), random.Random(f"{given.seed} {done}"))
    row = judged(folder, faults) | {"seconds": round(time.monotonic() - began, 1), "load": [round(one, 2) for one in os.getloadavg()]}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=2))


def churn(folder: Path, faults: Path, numbers: range, chance: random.Random) -> None:
    """A new run or the one that is there, and faults at random moments."""
    plan, out = plan_of(folder, REPLICAS, format="int8", quorum=QUORUM, grace=GRACE, momentum=0.3), folder / "run"
    more = ["--resume"] if (out / "plan.json").exists() else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLEEP": "0.03"}
    with (folder / "screen.txt").open("ab") as screen:
        run = subprocess.Popen([sys.executable, "-m", "foretell", *words(plan, out, STEPS, "--max-restarts", "20", *more)], cwd=folder, env=env,
                               stdout=screen, stderr=screen)  # fmt: skip
        try:
            before = len(rounds(out))
            while len(rounds(out)) < before + 2:
                time.sleep(0.1)
                assert run.poll() is None, f"the run did not start, see {folder}/screen.txt"
            for number in numbers:
                time.sleep(chance.uniform(0.1, 2.0))
                while not (alive := replicas_of(run.pid)):
                    assert run.poll() is None, f"the run ended, see {folder}/screen.txt"
                    time.sleep(0.05)
                pid, name = chance.choice(sorted(alive.items()))
                how = signal.SIGSTOP if number % STOP_EVERY == STOP_EVERY - 1 else signal.SIGKILL
                os.kill(pid, how)
                with faults.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"replica": name, "how": how.name, "alive": len(alive)}) + "\n")
            time.sleep(15)  # a stopped one is noticed, and all are back
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                status = run.wait(120)
            except subprocess.TimeoutExpired:
                run.kill()
                raise
    assert status == 143, f"the run ended with {status}, see {folder}/screen.txt"


def replicas_of(supervisor: int) -> dict[int, str]:
    """Replicas that run now, stopped ones left out."""
    found = {}
    for pid in proc.children(supervisor):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("replica ") and name != "replica hub" and proc.state(pid) not in ("", "Z", "X", proc.STOPPED):
            found[pid] = name
    return found


def judged(folder: Path, faults: Path) -> dict[str, Any]:
    """What the run wrote down, and one process that plays it."""
    out = folder / "run"
    found, told = rounds(out), rows(out, "faults.jsonl")
    known = equal(folder / "plan.json", out, found[-1]["step"])  # the hash of every round, and the bits of the checkpoint
    sizes = [row["alive"] for row in found]
    hurt = [json.loads(line)["how"] for line in faults.read_text().splitlines()]
    back = [row["seconds"] for row in told if row["event"] == "replica back"]
    assert all(row["differed"] == 0 for row in found), "a replica had other weights"
    assert sum(row["steps"] * len(row["replicas"]) for row in found) == sum(known.used), "steps that count, by slot and by round"
    return {
        "case": "churn of a run", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "replicas": REPLICAS, "quorum": QUORUM,
        "grace_seconds": GRACE, "kills": hurt.count("SIGKILL"), "stops": hurt.count("SIGSTOP"),
        "lost": sum(row["event"] == "replica lost" for row in told), "joins": sum(len(row["joined"]) for row in found) - REPLICAS,
        "rounds": len(found), "hashes_compared": sum(map(len, (row["replicas"] for row in found))), "hashes_that_differed": 0,
        "rounds_replayed_to_the_bit": len(found), "rounds_by_replicas": {str(size): sizes.count(size) for size in sorted(set(sizes))},
        "back_seconds": {"median": statistics.median(back), "most": max(back)},
        "longest_round_wait_seconds": round(max(row["seconds"] for row in found), 2),
        "steps_that_count": sum(known.used), "behind": [found[-1]["step"] - done for done in known.used],
    }  # fmt: skip


if __name__ == "__main__":
    main()
