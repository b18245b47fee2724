"""Held-out matrix products: seconds measured on the GPU at hand against the profile's prediction.

    python benchmarks/gemm.py                 measure 420 shapes here, then predict
    python benchmarks/gemm.py --predict-only  no GPU: predict the rows of results/gemm.jsonl again

Sizes are drawn evenly in their logarithm from 32 to 20,000 with a seed of their own, two fifths of them odd; none is
among the probe's cases.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
COUNT, MOST_FLOPS = 420, 2e12


def measure(out: Path) -> None:
    import torch
    from memory import machine

    from foretell.hardware.probe.clock import Clock
    from foretell.hardware.probe.harvest import Harvest

    rng, clock, about = random.Random(78), Clock("cuda"), machine()
    with out.open("w") as stream:
        done = 0
        while done < COUNT:
            m, n, k = (int(math.exp(rng.uniform(math.log(32), math.log(20000)))) for _ in range(3))
            if rng.random() < 0.6:
                m, n, k = (max(32, round(size / 32) * 32) for size in (m, n, k))
            if 2 * m * n * k > MOST_FLOPS:
                continue
            left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            right = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            harvest = Harvest(clock)
            with harvest:
                torch.mm(left, right.t())
            for row in harvest.rows.values():
                stream.write(json.dumps({"row": row.to_list(), **about}) + "\n")
            done += 1


def predict(out: Path) -> None:
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.hardware.profile import OpRow
    from foretell.price.kernels.features import Shape
    from foretell.price.kernels.ops import OpModel

    device = parse("H200").device
    profile = find_profile(device.name)
    assert profile is not None, "no profile of this device"
    model = OpModel.from_dict(device, profile.ops)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        op = OpRow.from_list(row["row"])
        shape = Shape(op.name, op.inputs, op.outputs, op.attrs)
        row |= {"measured": op.seconds, "predicted": model.seconds([shape])[shape], "odd": odd(op)}
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, chosen in (("all", rows), ("even", [r for r in rows if not r["odd"]]), ("odd", [r for r in rows if r["odd"]])):
        report(name, chosen)


def odd(op: Any) -> bool:
    """Whether a size is no multiple of 8."""
    sizes = (*op.inputs[0].shape, op.inputs[1].shape[1])
    return any(size % 8 for size in sizes)


def report(name: str, rows: list[dict[str, Any]]) -> None:
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    middle = statistics.fmean(row["measured"] for row in rows)
    left = sum((row["predicted"] - row["measured"]) ** 2 for row in rows)
    whole = sum((row["measured"] - middle) ** 2 for row in rows)
    print(f"{name:5s} {len(rows)} shapes  median {100 * statistics.median(errors):.2f} %  "
          f"mean {100 * statistics.fmean(errors):.2f} %  R² {1 - left / whole:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gemm.jsonl")
    parser.add_argument("--predict-only", action="store_true")
    options = parser.parse_args()
    if not options.predict_only:
        measure(options.out)
    predict(options.out)


if __name__ == "__main__":
    main()
