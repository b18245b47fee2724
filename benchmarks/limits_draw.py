"""Draw configurations for memory limits from steps whose families nothing was fitted to: the sealed half of the corpus, and unseen.py's.

    python benchmarks/limits_draw.py > benchmarks/configs/limits-families.jsonl
    python benchmarks/memory.py --configs benchmarks/configs/limits-families.jsonl --limits 156 --predict-only --out SAID      no GPU
    python benchmarks/memory.py --configs benchmarks/configs/limits-families.jsonl --limits 156 --predictions SAID --out ROWS  on a GPU

A family is drawn once, eager, of a size for which a limit says something. timm and torchvision are left out: predictions are made where a CPU
build of torch has no torchvision beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
SEED = "2026-11-19 limits"
COUNT = 52
LEAST, MOST = 4.3 * 2**30, 85 * 2**30


def main() -> None:
    from foretell.prove.dice import Dice

    rows: list[dict[str, Any]] = []
    for name in ("corpus", "unseen"):
        rows += [json.loads(line) for line in (HERE / "sealed" / f"{name}-h200.jsonl").read_text().splitlines()[1:]]
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: Dice(f"{SEED}/{row['key']}").share()):
        config, said = json.loads(row["key"]), row.get("predicted") or {}
        if row.get("half", "sealed") != "sealed" or config["mode"] != "eager" or config["model"].startswith(("timm", "torchvision")):
            continue
        if LEAST < said.get("reserved", 0) < MOST:
            found.setdefault(row.get("family") or config["model"], config)
    for config in list(found.values())[:COUNT]:
        print(json.dumps({key: value for key, value in config.items() if value not in (None, False, {})}))


if __name__ == "__main__":
    main()
