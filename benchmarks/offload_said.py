"""What foretell says of rows of `offload.py` that its own engine made, beside what was measured. Needs no GPU.

    python benchmarks/offload_said.py                    the newest row of every configuration
    python benchmarks/offload_said.py --runs 10 11 12    all rows of some runs

Rows with wrong losses (runs 6 and 8, defects that are mended) and those of an older engine are left out unless their run is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
GIB = 2**30
FORMATS = {"master": "fp32", "split": "split", "half": "bf16", "int8": "int8", "split-int8": "split-int8"}
DEVICE = "H200"


def plan_of(row: dict[str, Any]) -> Any:
    from foretell.plan.blocks import compress
    from foretell.plan.recipe import model_of
    from foretell.plan.types import Plan, Residency
    from foretell.trace.load.model import Source

    layers, width = row["layers"], row["width"]
    source = Source(model=f"{HERE / 'models' / 'chunked_gpt.py'}:model", overrides={"layers": layers, "width": width},
                    micro_batch=row["batch"], seq=row["tokens"])  # fmt: skip
    blocks = [f"blocks.{number}" for number in range(layers)]
    kept, far = layers if row["way"] == "resident" else row["resident_blocks"], row.get("disk_blocks", 0)
    tiers = {path: "disk" if number >= layers - far else "host" for number, path in enumerate(blocks) if number >= kept}
    states = {pattern: one.mode for pattern, one in compress({path: Residency(mode=tier) for path, tier in tiers.items()}).items()}
    if row["way"] != "resident" and "ends=1" not in row.get("asked", ""):
        states["rest"] = "host"
    gone = blocks[layers - row.get("streamed_blocks", 0) :]
    weights = dict.fromkeys(compress({path: Residency(mode="host") for path in gone}), "host")
    return Plan(
        model=model_of(source), hardware=DEVICE, precision="bf16-master", micro_batch=row["batch"], accumulate=row.get("accumulate", 1),
        clip=1.0 if row["clip"] else None, state_format=FORMATS[row["form"]], states=states, weights=weights, cpu_share=row["cpu_share"],
        blocks={"blocks.*": Residency(mode="recompute")},
    )  # fmt: skip


def configuration(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("layers", "width", "batch", "accumulate", "clip", "way", "form", "resident_blocks", "streamed_blocks", "disk_blocks", "cpu_share", "cap")
    return tuple(row.get(name, 0) for name in names)


def chosen(rows: list[dict[str, Any]], runs: list[int]) -> list[dict[str, Any]]:
    own = [row for row in rows if row.get("way") in ("stream", "resident") and "error" not in row and "allocated" in row]
    if runs:
        return [row for row in own if row.get("run") in runs]
    newest = {configuration(row): row for row in own if row.get("run", 0) not in (6, 8)}
    return list(newest.values())


def main() -> None:
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.search.traces.needed import Traces
    from foretell.simulate.plan import Options, predict_plan

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="*", default=[])
    parser.add_argument("--rows", type=Path, default=HERE / "results" / "offload.jsonl")
    options = parser.parse_args()
    rows = chosen([json.loads(line) for line in options.rows.read_text().splitlines()], options.runs)
    known, errors = Traces(capability=(9, 0)), {"allocated": [], "reserved": [], "host": [], "seconds": []}
    for row in rows:
        plan = plan_of(row)
        cost = predict_plan(known.of(plan, ["recompute"]), plan, parse(DEVICE), Options(profile_of=find_profile))
        memory = cost.worst.memory
        said = {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "host": memory.host_bytes,
                "seconds": cost.time.step_seconds if cost.time else None}  # fmt: skip
        words = []
        for name, value in said.items():
            if value is None:
                words.append(f"{name} {row[name]:.3f}, not said")
                continue
            off = value / row[name] - 1
            errors[name] += [off] if row["way"] != "resident" else []
            scale = 1 if name == "seconds" else GIB
            words.append(f"{name} {row[name] / scale:.2f} said {value / scale:.2f} ({100 * off:+.1f} %)")
        sizes = f"{row['layers']}x{row['width']} batch {row['batch']}x{row.get('accumulate', 1)} cap {row['cap']:g}"
        told = f"run {row.get('run')} {row.get('asked', row['way'])} {sizes}"
        print(f"{told}{'' if row['clip'] else ' not clipped'}: {', '.join(words)}", flush=True)
    for name, found in errors.items():
        if found:
            close = sum(abs(off) <= (0.1 if name == "seconds" else 0.05) for off in found)
            print(f"{name}: {len(found)} with something away, median {statistics.median(map(abs, found)):.1%}, worst {max(found, key=abs):+.1%}, "
                  f"{close} within {'10' if name == 'seconds' else '5'} %")  # fmt: skip


if __name__ == "__main__":
    main()
