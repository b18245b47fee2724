"""What is alive on the GPU when a step needs the most: the largest tensors, by the line that made them.

    python benchmarks/at_peak.py configs/limits-wrong.jsonl          a GPU; prints peaks and tensors of every configuration

For looking at one configuration whose memory was predicted wrong, beside `foretell fit --explain`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
LEAST = 32 * 2**20
FRAMES = 7


def alive_at_peak(events: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """The most that was allocated at once, counted from the first event, and what was alive then."""
    alive: dict[int, dict[str, Any]] = {}
    now = most = 0
    then: list[dict[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, then = now, list(alive.values())
        elif event["action"] == "free_requested" and alive.pop(event["addr"], None) is not None:
            now -= event["size"]
    return most, then


def look(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from cases import build_step, run_steps

    step = build_step(config)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    run_steps(step)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    most, then = alive_at_peak(events)
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    print(config["model"], "allocated", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.max_memory_reserved(),
          "device", total - free, "retries", stats["num_alloc_retries"], "recorded", most, flush=True)  # fmt: skip
    for event in sorted(then, key=lambda one: -one["size"]):
        if event["size"] >= LEAST:
            frames = [f"{Path(one['filename']).name}:{one['line']}:{one['name']}" for one in event["frames"] if "/torch/_" not in one["filename"]]
            print("   ", round(event["size"] / 2**20, 1), "MiB", " < ".join(frames[:FRAMES]), flush=True)
    return {}


def main() -> None:
    from cases import warm_up
    from memory import in_child, read_configs

    warm_up()
    for config in read_configs(Path(sys.argv[1])):
        print(in_child(look, config, timeout=90).get("error", ""), flush=True)


if __name__ == "__main__":
    main()
