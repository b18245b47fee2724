"""QLoRA under a limit of memory: planned with no GPU visible, then run as planned, for 100 steps, under that limit.

    python benchmarks/qlora.py predict                no GPU needed; writes data/qlora_predicted.json
    python benchmarks/qlora.py measure                on the GPU of the cases; adds rows to results/qlora.jsonl
    python benchmarks/qlora.py predict --small        a tiny shape on this machine's CPU, to see that the script works
    python benchmarks/qlora.py measure --small

The limit counts what is reserved and the context: PyTorch's allocator may reserve the limit less the predicted context
(`set_per_process_memory_fraction`), and a run that wants more fails. A row has predicted and measured reserved bytes and
seconds of a step, and whether all steps were done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
PREDICTED, ROWS = HERE / "data" / "qlora_predicted.json", HERE / "results" / "qlora.jsonl"
CASES: dict[str, dict[str, Any]] = {
    "qwen2-1.5b in 4 GB": {"model": "qwen2-1.5b", "hardware": "H200", "hbm": 4 * 10**9, "global_batch": 16, "seq": 512, "lora": 16, "base": ("nf4",)},
    "the same, scales in 8 bits": {
        "model": "qwen2-1.5b", "hardware": "H200", "hbm": 4 * 10**9, "global_batch": 16, "seq": 512, "lora": 16, "base": ("nf4-double",),
    },
    "llama3-8b, 4096 tokens in 12 GB": {
        "model": "llama3-8b", "hardware": "H200", "hbm": 12 * 10**9, "global_batch": 1, "seq": 4096, "lora": 32, "base": ("nf4-double",),
        "precision": "bf16",
    },
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "small": {
        "model": "qwen2-1.5b", "hardware": "auto", "global_batch": 2, "seq": 32, "lora": 8, "base": ("nf4-double",),
        "overrides": {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab_size": 512, "context": 128},
    },
}  # fmt: skip
STEPS = 100


def predict(cases: dict[str, dict[str, Any]], only: str) -> dict[str, Any]:
    """The plan of each case, or what is missing."""
    from foretell import api
    from foretell.plan import file

    found = {}
    for name, asked in cases.items():
        if only not in name:
            continue
        answer = api.plan(**asked)
        found[name] = {"plan": file.to_json(answer.plan) if answer.plan is not None else None, "why": answer.why, "hbm": asked.get("hbm")}
        print(name, answer.headline(), flush=True)
    return found


def measure(name: str, known: dict[str, Any], steps: int, keep: str) -> dict[str, Any]:
    """One case, as planned, in this process. One batch is enough for the evaluation at the end: steps are measured."""
    import torch

    from foretell import api
    from foretell.plan import file

    plan = file.from_json(known["plan"])
    said = plan.predicted
    if known["hbm"] is not None and torch.cuda.is_available():
        context = said["memory_bytes"] - said["reserved_bytes"]
        torch.cuda.set_per_process_memory_fraction((known["hbm"] - context) / torch.cuda.get_device_properties(0).total_memory)
    row = {"case": name, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "limit_bytes": known["hbm"],
           "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = api.run(plan, out=os.path.join(keep or folder, "run"), steps=steps, eval_batches=1, no_save=True)
        except Exception as error:
            return {**row, "done": False, "error": f"{type(error).__name__}: {error}"[:300]}
    found = answer.measurement or {}
    return {
        **row, "done": answer.step == steps, "steps": answer.step,
        "predicted": {key: said.get(key) for key in ("reserved_bytes", "allocated_bytes", "step_seconds", "low_seconds", "high_seconds")},
        "measured": {key: found.get(key) for key in ("reserved_bytes", "allocated_bytes", "host_bytes", "step_seconds")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="cases that have this in their name")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep the run of one case there, with its log")
    options = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "qlora_small.json" if options.small else PREDICTED
    if options.what == "predict":
        known = json.loads(place.read_text()) if options.only and place.exists() else {}
        place.write_text(json.dumps(known | predict(SMALL if options.small else CASES, options.only), indent=1) + "\n")
        return
    for name, known in json.loads(place.read_text()).items():
        if options.only not in name:
            continue
        row = {"done": False, "error": known["why"]} if known["plan"] is None else measure(name, known, options.steps, options.keep)
        print(json.dumps(row), flush=True)
        if not options.small:
            with ROWS.open("a") as rows:
                rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
