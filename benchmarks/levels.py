"""Memory levels and product rates of the GPU at hand: latency by pointer chase, bytes a second by size, FLOP/s by dtype.

    python benchmarks/levels.py --out FILE [--limit-seconds 120] [--device cpu]
    python benchmarks/levels.py --out FILE --keep X.json        no measurement: puts the rows of FILE into a profile and its journal

One JSON row each: `latency` (working set, seconds and cycles a hop), `level` (working set, bytes a second read and written), `rate`
(dtype, side of the square product, FLOP/s, share of the data sheet's). The stages are those of `foretell probe --full`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402

from foretell.hardware import profile as profiles  # noqa: E402
from foretell.hardware.probe import chase, journal, memory  # noqa: E402
from foretell.hardware.probe.machine import device_of, nvml  # noqa: E402
from foretell.hardware.probe.power import PowerMeter  # noqa: E402
from foretell.units import human_bytes  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="begin no further row after this long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=Path, metavar="PROFILE", help="put the latencies and rates of --out into this profile")
    asked = parser.parse_args()
    if asked.keep:
        keep(asked.out, asked.keep)
        return
    end = time.monotonic() + asked.limit_seconds
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "device": device_of(asked.device).name}
    with asked.out.open("a", encoding="utf-8") as file:
        for row in rows(asked.device):
            file.write(json.dumps({**about, **row}) + "\n")
            file.flush()
            print(shown(row), flush=True)
            if time.monotonic() > end:
                print("the time is up", flush=True)
                break


def keep(found: Path, path: Path) -> None:
    """Latencies and rates into a profile of the same device that has none, and into its journal; all else stays as it is."""
    each = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    known = profiles.load(path)
    if {row["device"] for row in each} != {known.device}:
        sys.exit(f"{found} has rows of {', '.join(sorted({row['device'] for row in each}))}, and {path} is a profile of {known.device}")
    names = {"latency": ("working_set_bytes", "seconds", "spread"), "rate": ("dtype", "side", "seconds", "spread")}
    each = [row for row in each if "failed" not in row]
    kept = {kind: [{name: row[name] for name in wanted} for row in each if row["kind"] == kind] for kind, wanted in names.items()}
    profiles.save(replace(known, latency=tuple(kept["latency"]), rates=tuple(kept["rate"])), path)
    place = journal.packed_path(profiles.journal_path(path))
    if place.exists():
        about, entries = journal.read(place)
        others = [entry for entry in entries if entry.stage not in names]
        journal.write(place, about, [*others, *(journal.JournalEntry(kind, 0.0, row) for kind, rows in kept.items() for row in rows)])
    print(f"{len(kept['latency'])} latencies and {len(kept['rate'])} rates in {path}")


def rows(kind: str) -> Iterator[dict[str, Any]]:
    """Latencies, then levels, then rates; the first row has the clock that the cycles are counted by."""
    began = time.monotonic()
    mhz = clock_mhz() if kind == "cuda" else None
    yield {"kind": "clock", "mhz": mhz}
    for row in guarded("latency", chase.latencies(kind)):
        yield {**row, "cycles": round(row["seconds"] * mhz * 1e6, 1)} if mhz and "seconds" in row else row
    yield {"kind": "spent", "stage": "latency", "seconds": round(time.monotonic() - began, 2)}
    yield from guarded("level", memory.levels(kind, "full"))
    device, began = device_of(kind), time.monotonic()
    for row in guarded("rate", chase.rates(kind)):
        if "dtype" in row:
            rate = chase.flops_per_second(row)
            peak = device.peak_flops_per_second.get(row["dtype"])
            row |= {"flops_per_second": rate, "peak_flops_per_second": peak, "share": round(rate / peak, 4) if peak else None}
        yield row
    yield {"kind": "spent", "stage": "rate", "seconds": round(time.monotonic() - began, 2)}


def guarded(kind: str, found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What fails is a row that says so; the other stages go on."""
    try:
        for row in found:
            yield {"kind": kind, **row}
    except Exception as error:
        yield {"kind": kind, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def clock_mhz() -> float | None:
    """Of the multiprocessors while kernels run, where the driver says."""
    with nvml() as found:
        if found is None:
            return None
        x, until = torch.randn(512, 512, device="cuda"), time.perf_counter() + 0.5
        while time.perf_counter() < until:
            x @ x
        return PowerMeter(*found).clock()


def shown(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['kind']:<8} {row['failed']}"
    if row["kind"] == "latency":
        cycles = f"{row['cycles']:8.0f} cycles" if "cycles" in row else ""
        return f"latency  {human_bytes(row['working_set_bytes']):>10}  {row['seconds'] * 1e9:8.1f} ns  {cycles}  spread {row['spread']}"
    if row["kind"] == "level":
        return f"level    {human_bytes(row['working_set_bytes']):>10}  {row['bytes_per_second'] / 1e9:8.0f} GB/s"
    if row["kind"] == "rate":
        share = f"{100 * row['share']:5.1f} % of the data sheet" if row["share"] else ""
        return f"rate     {row['dtype']:<14} {row['side']:>5}  {row['flops_per_second'] / 1e12:8.1f} TFLOP/s  {share}"
    return json.dumps(row)


if __name__ == "__main__":
    main()
