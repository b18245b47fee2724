"""What cuDNN's recurrent layers keep and take: the measurement behind tests/data/rnn_h200.json.

    python benchmarks/recurrent.py                      measure the layers of that file again, beside what it says
    python benchmarks/recurrent.py --out FILE.json      and write what was measured, in the same format
    python benchmarks/recurrent.py --layers MINE.json   your own list
    python benchmarks/recurrent.py --device cpu         dry run with small sizes: the ops of a layer on the CPU,
                                                        which has no cuDNN, and no memory to measure

A layer is described by `layer` (LSTM, GRU, RNN), `batch`, `time`, `inputs`, `hidden`, `layers`, `both_ways`, `dropout`,
`dtype`, `autocast` (to bf16) and `batch_first`. Measured in bytes, in the second of two steps:

    reserve             what `_cudnn_rnn` returns to keep for backward
    forward, backward   what allocated memory gained across `_cudnn_rnn` and `_cudnn_rnn_backward`, and the most it
                        reached above where it started: outputs, reserve and cuDNN's workspace

The numbers depend on the device and on cuDNN's version, printed first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import memory  # noqa: E402

STORED = HERE.parent / "tests" / "data" / "rnn_h200.json"
MEASURED = ("reserve", "forward", "backward")
SMALL = {"batch": 2, "time": 3, "inputs": 8, "hidden": 16}
"""The sizes of a dry run."""
FORWARD, BACKWARD = torch.ops.aten._cudnn_rnn.default, torch.ops.aten._cudnn_rnn_backward.default


class Watch(TorchDispatchMode):
    """Allocated memory across every recurrent op: what it gained and the most it reached."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.found: dict[str, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        if function not in (FORWARD, BACKWARD):
            return function(*args, **(kwargs or {}))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = function(*args, **(kwargs or {}))
        gained, reached = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        if function is FORWARD:
            self.found["reserve"] = output[3].nbytes
        self.found["forward" if function is FORWARD else "backward"] = [gained, reached]
        return output


def measure(row: dict[str, Any], device: str) -> Watch:
    """Two steps of one layer; the first makes what is made once, the second is watched."""
    dtype = getattr(torch, row["dtype"])
    layer = getattr(nn, row["layer"])(
        row["inputs"], row["hidden"], row["layers"], batch_first=row["batch_first"], bidirectional=row["both_ways"],
        dropout=row["dropout"],
    ).to(device, dtype)  # fmt: skip
    first, second = (row["batch"], row["time"]) if row["batch_first"] else (row["time"], row["batch"])
    data = torch.randn(first, second, row["inputs"], device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=row["autocast"]):
            output: Tensor = layer(data)[0]
        output.float().sum().backward()
        layer.zero_grad()
        data.grad = None

    step()
    with Watch() as watch:
        step()
    return watch


def described(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in MEASURED}


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every layer measured, and how far from what its row says, if it says anything."""
    found, same = [], 0
    for row in rows:
        measured = measure(row, "cuda").found
        found.append({**described(row), **{what: measured[what] for what in MEASURED}})
        same += found[-1] == row
        print(" ".join(str(value) for value in described(row).values()))
        for what in MEASURED:
            stored = f"stored {row[what]}" if what in row else ""
            print(f"    {what:9s} {measured[what]!s:24s} {stored}", flush=True)
    print(f"{same} of {len(rows)} layers as stored, to the byte")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=Path, default=STORED, help="a JSON list of layers, measured or not")
    parser.add_argument("--out", type=Path, help="write the measured layers here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    rows = json.loads(options.layers.read_text())
    if options.device == "cpu":
        for row in rows:
            names = measure({**row, **SMALL}, "cpu").names
            print(f"{row['layer']} {row['layers']} {row['dtype']}: {len(names)} ops")
        return
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here to measure on; --device cpu is a dry run")
    about = memory.machine()
    print(f"{about['device']}, torch {about['torch']}, cuDNN {torch.backends.cudnn.version()}, {about['date']}")
    found = compare(rows)
    if options.out:
        options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")


if __name__ == "__main__":
    main()
