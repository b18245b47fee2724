"""Replicas in processes of their own, killed with SIGKILL and joined anew at random moments; hashes compared after each round.

    python benchmarks/diloco_churn.py              sixty kills, about a minute

Three to five replicas are alive at a time. Each appends the number and the hash of every round it was in to a file of its own; what a
killed one has written by then counts too. A row goes to results/diloco.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first step of an optimizer imports, once for all that are forked
from torch import nn

from foretell.plan.types import Sync
from foretell.runtime.parallel.sync.frames import Gone
from foretell.runtime.parallel.sync.hub import Hub
from foretell.runtime.parallel.sync.outer import Outer
from foretell.runtime.parallel.sync.peer import HubMean, LeftBehind

RESULTS = Path(__file__).resolve().parent / "results" / "diloco.jsonl"
SYNC = Sync(every=4, format="int8")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--kills", type=int, default=60)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    torch.set_num_threads(1)
    row = churn(given.kills, random.Random(given.seed))
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=2))


def churn(kills: int, chance: random.Random) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        read, write = os.pipe()
        hub = os.fork()
        if hub == 0:
            serve(write, where)
        port = int(os.read(read, 16))
        alive: dict[int, int] = {}
        count = killed = 0
        while killed < kills:
            while len(alive) < 3 or (len(alive) < 5 and chance.random() < 0.6):
                alive[started(port, count, where)] = count
                count += 1
            time.sleep(chance.uniform(0.1, 1.5))
            victim = chance.choice(list(alive))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            del alive[victim]
            killed += 1
        time.sleep(3)
        for one in alive:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
        os.kill(hub, signal.SIGTERM)
        os.waitpid(hub, 0)
        return {"case": "churn", "kills": killed, "replicas_started": count, **judged(where), "seconds": round(time.monotonic() - began, 1)}


def judged(where: Path) -> dict[str, Any]:
    """What replicas and hub have written, compared."""
    hashes: dict[int, set[int]] = {}
    seen = 0
    for path in where.glob("replica-*.txt"):
        for line in path.read_text().splitlines():
            number, _, value = line.partition(" ")
            if value.endswith("."):  # a line that was cut off says nothing
                hashes.setdefault(int(number), set()).add(int(value[:-1]))
                seen += 1
    rounds = json.loads((where / "hub.json").read_text())
    different = [number for number, found in hashes.items() if len(found) > 1 or found != {rounds[number - 1]["hash"]}]
    sizes = [len(one["replicas"]) for one in rounds]
    if different:
        raise SystemExit(f"replicas ended round {different[0]} with different weights")
    return {
        "rounds": len(rounds), "hashes_compared": seen, "rounds_with_different_hashes": len(different),
        "rounds_by_replicas": {str(size): sizes.count(size) for size in sorted(set(sizes))},
        "longest_round_seconds": round(max(one["seconds"] for one in rounds), 2),
    }  # fmt: skip


def serve(tell: int, where: Path) -> None:
    """The hub, until it is asked to end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    hub = Hub(sync=SYNC, grace_seconds=5.0)
    os.write(tell, str(hub.start()[1]).encode())
    signal.sigwait([signal.SIGTERM])
    hub.close()
    (where / "hub.json").write_text(json.dumps([vars(one) for one in hub.rounds]))
    os._exit(0)


def started(port: int, number: int, where: Path) -> int:
    """A replica, forked with torch imported."""
    pid = os.fork()
    if pid == 0:
        try:
            live(port, number, where / f"replica-{number}.txt")
        except Gone:
            pass
        except BaseException as error:
            print(f"replica {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(0)
    return pid


def live(port: int, number: int, path: Path) -> None:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made: list[HubMean] = []
    outer = Outer(SYNC, list(model.parameters()), 1, lambda elements: made.append(HubMean(("127.0.0.1", port), elements, SYNC)) or made[0])
    outer.take_over(*made[0].join(outer.begin))
    step = 0
    with path.open("a", buffering=1) as file:
        while True:
            x = torch.randn(16, 64)
            (model(x) - x.cumsum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            try:
                outer.stepped(step)
            except LeftBehind:
                outer.take_over(*made[0].join(outer.begin))
            for one in outer.take_done():
                file.write(f"{made[0].round} {one.hash}.\n")


if __name__ == "__main__":
    main()
