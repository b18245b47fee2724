"""Bytes of shrunken transformers types, drawn by the public seed of `sweep.py`: predicted without a GPU, then measured on one.

    python benchmarks/sweep_gpu.py --predict OUT [--part 3/12]     no GPU is looked at
    python benchmarks/sweep_gpu.py --measure OUT [--part 0/4]      every step in a process of its own
    python benchmarks/sweep_gpu.py --tell PREDICTED MEASURED

Several processes may measure at once: the allocator's record is each one's own, and nobody looks at their seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import sweep  # noqa: E402
import unseen  # noqa: E402
import userfiles  # noqa: E402
from memory import DEFAULTS, append, in_child, machine  # noqa: E402
from zoo import rows_of  # noqa: E402

MICRO_BATCH, SEQ = 8, 128
BYTES = ("allocated", "reserved")


def asked_of(name: str, folder: Path) -> dict[str, Any] | str:
    """What is asked of a type, or transformers' own error."""
    model, told = sweep.model_of("hf", name, folder)
    return str(told["error"]) if "error" in told else {**DEFAULTS, "model": model, "micro_batch": MICRO_BATCH, "seq": SEQ}


def _predicted(config: dict[str, Any]) -> dict[str, Any]:
    from zoo import kept_trace

    found = unseen.predict(config)
    if "error" not in found:
        found["assumed"] = list(kept_trace(config).meta["assumed"])
    return {key: found[key] for key in ("error", "allocated", "reserved", "seconds", "assumed") if key in found}


def tell(predicted: Path, measured: Path) -> None:
    told = {row["key"]: row["predicted"] for row in rows_of(predicted)}
    errors: dict[str, list[float]] = {what: [] for what in BYTES}
    free: list[float] = []
    for row in rows_of(measured):
        guess, real = told.get(row["key"], {"error": "not predicted"}), row["measured"]
        if "error" in guess or "error" in real:
            print(f"{row['key']:<28} predicted: {guess.get('error', 'yes')[:90]}; measured: {real.get('error', 'yes')[:90]}")
            continue
        off = {what: guess[what] / real[what] - 1 for what in BYTES}
        for what, value in off.items():
            errors[what].append(value)
        if not guess["assumed"]:
            free.append(abs(off["allocated"]))
        if abs(off["allocated"]) > 0.001:
            print(f"{row['key']:<28} " + "  ".join(f"{what} {100 * value:+.2f} %" for what, value in off.items()), *guess["assumed"][:1])
    for what, values in errors.items():
        sizes = sorted(map(abs, values))
        print(f"{what}: {len(values)} types, median {100 * statistics.median(sizes):.3f} %, worst {100 * sizes[-1]:.2f} %")
    print(f"nothing assumed: {len(free)} types, allocated within 1 % in {sum(value <= 0.01 for value in free)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--predict", type=Path)
    what.add_argument("--measure", type=Path)
    what.add_argument("--tell", type=Path, nargs=2)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "foretell-sweep", help="where shrunken configs are kept")
    asked = parser.parse_args()
    if asked.tell:
        return tell(*asked.tell)
    out, (part, parts) = asked.predict or asked.measure, map(int, asked.part.split("/"))
    unseen.warm_up()
    if asked.measure:
        import zoo_run  # noqa: F401  before anything forks
    known = {row["key"] for row in rows_of(out)} if out.exists() else set()
    for name in sweep.drawn(json.loads(sweep.LIST.read_text())["hf"]["names"], asked.count)[part::parts]:
        if name in known:
            continue
        config = asked_of(name, asked.folder)
        if isinstance(config, str):
            found: dict[str, Any] = {"error": f"transformers: {config}"[:200]}
        else:
            found = in_child(_predicted, config, timeout=180) if asked.predict else userfiles.measured(config)
        kept = {key: found[key] for key in ("error", "allocated", "reserved", "seconds", "assumed") if key in found}
        append(out, {"key": name, "predicted" if asked.predict else "measured": kept, **machine()})
        print(name, kept.get("error") or f"{kept['allocated']:,} bytes", flush=True)


if __name__ == "__main__":
    main()
