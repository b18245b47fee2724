"""What today's code says of memory that was measured on an H200: stored predictions are those of their day, and rules change since.

    python benchmarks/memory_again.py                    peaks and limits of every stored case; writes data/memory_again.jsonl
    python benchmarks/memory_again.py --only resnet      cases with this in their name
    python benchmarks/memory_again.py --tell             what data/memory_again.jsonl has; nothing is predicted

Peaks: results/memory.jsonl and results/compiled.jsonl. Limits: results/limits.jsonl and results/limits_families.jsonl, where a run had
so much memory and no more. Predictions see no GPU; a case that was predicted by the same code is not predicted again. Without
torchvision and timm their models are left out, and said to be. Rows of LoRA are not here: they were measured with adapters that kept more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from memory import DEFAULTS, append, in_child, key_of, name_of  # noqa: E402

OUT = HERE / "data" / "memory_again.jsonl"
PEAKS, LIMITS = ("memory", "compiled"), ("limits", "limits_families")
ACCEPTED = ("fits", "tight")


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def config_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of a row; none of adapters, which kept more when they were measured, and of several ranks, which is none."""
    if "config" not in row and (row.get("kind") in ("peft", "nf4", "fsdp") or not row["key"].startswith("{")):
        return None
    config = {**DEFAULTS, **(row["config"] if "config" in row else json.loads(row["key"]))}
    return None if config["lora"] else config


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Key → configuration, and what was measured of it: peaks, and for each limit whether it ran."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name in (*PEAKS, *LIMITS):
        for row in rows_of(name):
            config = config_of(row)
            if config is None:
                continue
            known = found.setdefault(key_of(config), (config, {"peak": None, "limits": []}))[1]
            if name in PEAKS and "reserved" in (row.get("measured") or {}):
                known["peak"] = {what: row["measured"][what] for what in ("allocated", "reserved")}
                if config["mode"] == "graphs":  # a replay allocates nothing: what it holds shows while it is recorded
                    known["peak"]["allocated"] = row["measured"]["warm_up_allocated"]
            elif row.get("ran") is not None:
                known["limits"].append({"limit": row["limit"], "ran": row["ran"], "before": row.get("verdict_before_the_run", row["verdict"])})
    return found


def predict(config: dict[str, Any], limits: list[int]) -> dict[str, Any]:
    """Peaks on the whole device, and the verdict of each limit."""
    import warnings

    warnings.simplefilter("ignore")
    from zoo import kept_trace

    from foretell.hardware import overhead, parse
    from foretell.lower.compiling import compiled
    from foretell.simulate.memory.memory import predict_memory

    try:
        trace = compiled(kept_trace(config), {"eager": "none", "compiled": "model"}.get(config["mode"], config["mode"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    cluster = parse("H200")
    extra = overhead(cluster.device, "2.11")
    memory = predict_memory(trace, cluster, extra).memory
    said = [predict_memory(trace, replace(cluster, device=replace(cluster.device, memory_bytes=limit)), extra).verdict for limit in limits]
    return {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "verdicts": said}


def again(only: str) -> None:
    from unseen import warm_up

    from foretell.prove.seal import own_code

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    code = own_code()
    kept = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    done = {row["key"] for row in kept if row["code"] == code}
    warm_up()
    for key, (config, measured) in cases().items():
        if key in done or only not in name_of(config):
            continue
        found = in_child(predict, config, [one["limit"] for one in measured["limits"]], timeout=300)
        if OUT.exists():
            OUT.write_text("".join(line + "\n" for line in OUT.read_text().splitlines() if json.loads(line)["key"] != key))
        append(OUT, {"key": key, "name": name_of(config), "code": code, "measured": measured, "predicted": found})
        print(name_of(config), found, flush=True)


def tell() -> None:
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    failed = [row["name"] for row in rows if "error" in row["predicted"]]
    rows = [row for row in rows if "error" not in row["predicted"]]
    for what in ("allocated", "reserved"):
        errors = sorted((row["predicted"][what] / row["measured"]["peak"][what] - 1, row["name"]) for row in rows if row["measured"]["peak"])
        sizes = [abs(error) for error, _ in errors]
        print(f"{what}: {len(errors)} peaks, median {statistics.median(sizes):.3%}, {errors[0][0]:+.2%} ({errors[0][1]}) to "
              f"{errors[-1][0]:+.2%} ({errors[-1][1]})")  # fmt: skip
    seen: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for row in rows:
        for one, verdict in zip(row["measured"]["limits"], row["predicted"]["verdicts"], strict=True):
            seen["fits" if verdict in ACCEPTED else "no", one["ran"]].append(f"{row['name']} in {one['limit'] / 2**30:.2f} GiB")
    total = sum(map(len, seen.values()))
    print(f"limits: {total}; said to fit {len(seen['fits', True])} that ran and {len(seen['fits', False])} that did not; "
          f"refused {len(seen['no', False])} that did not and {len(seen['no', True])} that ran")  # fmt: skip
    print(*(f"  wrong fit: {name}" for name in seen["fits", False]), sep="\n")
    if failed:
        print(f"{len(failed)} not predicted: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--tell", action="store_true")
    options = parser.parse_args()
    if not options.tell:
        again(options.only)
    tell()


if __name__ == "__main__":
    main()
