"""Rows that time bands are calibrated on: steps measured on H200s that are stored here, predicted with the code as it is now.

    python benchmarks/bands_rows.py          predict what benchmarks/data/band_rows.jsonl has not yet
    python benchmarks/bands_rows.py --fresh  predict all of them anew

A row has where it comes from, the family of its model, measured and predicted seconds, and what a band may depend on. Of the 316
rows 270 are stored so far: 46 of the 62 plans, all of families that other rows have, are not predicted yet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from memory import DEFAULTS, append, in_child, name_of  # noqa: E402
from zoo import rows_of  # noqa: E402

ROWS = HERE / "data" / "band_rows.jsonl"
RESULTS, SEALED = HERE / "results", HERE / "sealed"
Measured = tuple[str, dict[str, Any], float]
"""Where a row comes from, its configuration with the keys of benchmarks/memory.py, and its seconds."""
_LIBRARIES = {
    "gpt2": "gpt", "llama": "llama", "bert": "bert", "convnext_small": "convnext", "resnet101": "resnet", "swin_t": "swin",
    "mixer_b16_224": "mixer", "densenet121": "densenet", "efficientnet_b3": "efficientnet", "mobilenet_v3_large": "mobilenet",
}  # fmt: skip


def family_of(model: str) -> str:
    """Models that one module builds are one family, wherever they come from."""
    from foretell import zoo

    kind, _, name = model.partition(":")
    if not name:
        return zoo.get(model).module
    if kind.endswith(".py"):
        return name
    return _LIBRARIES.get(name) or (name if kind == "hf" else re.split(r"[-_\d]", name)[0])


def measured() -> Iterator[Measured]:
    """Every stored step of an H200; of zoo rows the second measurement, which has today's runtime."""
    yield from _drawn()
    for name in ("compiled", "time"):
        for row in rows_of(RESULTS / f"{name}.jsonl"):
            if "seconds" in row["measured"]:
                yield name, row["config"], row["measured"]["seconds"]
    latest = {row["key"]: row for row in rows_of(RESULTS / "zoo.jsonl") if "seconds" in row["measured"]}
    for row in rows_of(SEALED / "zoo-forecast-2.jsonl"):
        if row["key"] in latest:
            yield "zoo", row["config"], latest[row["key"]]["measured"]["seconds"]
    yield from _plans()


def _drawn() -> Iterator[Measured]:
    """The forecast of draws that `foretell compare prove` sealed."""
    sealed = json.loads((SEALED / "2026-11-15-h200.json").read_text())["rows"]
    lines = (SEALED / "2026-11-15-h200.rows.jsonl").read_text().splitlines()
    seconds = {row["position"]: row["measured"].get("seconds") for row in map(json.loads, lines)}
    modes = {"none": "eager", "model": "compiled"}
    for position, row in enumerate(sealed):
        if seconds.get(position):
            config = {name: row["config"][name] for name in DEFAULTS if name in row["config"]}
            mode = row["config"]["compile"]
            yield "prove", {**DEFAULTS, **config, "mode": modes.get(mode, mode)}, seconds[position]


def _plans() -> Iterator[Measured]:
    """Plans on one H200 whose blocks are all treated alike."""
    words = {"": "none", "recompute": "full", "selective": "selective"}
    for row in map(json.loads, (RESULTS / "plans.jsonl").read_text().splitlines()):
        plan, ways = row["plan"], set(row["plan"].get("blocks", {}).values()) or {""}
        whole = not plan.get("blocks") or set(plan["blocks"]) == set(plan["model"].get("blocks", ()))
        if row["device_kind"] != "cuda" or not row["measured"].get("seconds") or len(ways) > 1 or not whole:
            continue
        model = plan["model"]
        yield "plans", {
            **DEFAULTS, "model": model["model"], "overrides": model.get("overrides", {}), "seq": model.get("seq"),
            "micro_batch": plan["micro_batch"], "accumulate": plan.get("accumulate", 1), "clip": plan.get("clip"),
            "optimizer": plan["optimizer"], "recompute": words[str(ways.pop())], "mode": {"none": "eager"}.get(plan["compile"], "compiled"),
        }, row["measured"]["seconds"]  # fmt: skip


KEPT = (
    "seconds", "low", "high", "binds", "device_seconds", "host_seconds", "waiting_for_host_seconds", "families", "guessed_seconds",
    "awaited", "sized", "kernels", "scattered_seconds", "ops",
)  # fmt: skip


def compact(source: str, config: dict[str, Any], seconds: float, predicted: dict[str, Any]) -> dict[str, Any]:
    """One row as it is kept."""
    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(one) for name, one in value.items()}
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return {
        "from": source, "family": family_of(config["model"]), "name": name_of(config), "mode": config["mode"],
        "precision": config["precision"], "recompute": config["recompute"], "measured": short(seconds),
        "predicted": {name: short(predicted[name]) for name in KEPT if name in predicted},
        **({"error": predicted["error"]} if "error" in predicted else {}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    import unseen

    if options.fresh:
        options.out.unlink(missing_ok=True)
    known = {(row["from"], row["name"]) for row in map(json.loads, options.out.read_text().splitlines())} if options.out.exists() else set()
    left = [row for row in measured() if (row[0], name_of(row[1])) not in known]
    print(f"{len(left)} rows to predict", flush=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.set_num_threads(1)
    unseen.warm_up()
    for source, config, seconds in left:
        predicted = in_child(unseen.predict, config, timeout=240)
        append(options.out, compact(source, config, seconds, predicted))
        said = predicted.get("error") or f"{seconds / predicted['seconds'] - 1:+.1%}"
        print(f"{source} {name_of(config)}: {said}", flush=True)


if __name__ == "__main__":
    main()
