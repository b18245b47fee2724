"""Collectives measured elsewhere: seconds by size and number of ranks on one node of a device, as tables.

    table("H100-SXM-80GB")     → Wires, or None where nobody has measured them
    like("nvlink", 300e9)      → what tables of such links say of one that is so fast, or None

Written by `benchmarks/silicon_fit.py` into catalog/collectives.json, with where the rows come from.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from foretell.files import write_atomically
from foretell.hardware import reached

FILE = "collectives.json"
Curve = tuple[tuple[float, float], ...]
"""(bytes, seconds), rising in bytes."""


@dataclass(frozen=True)
class Wires:
    """What joins the devices of one node, as its collectives show it."""

    device: str
    link: str
    """Name of what joins the devices."""
    software: str
    source: str
    date: str
    curves: Mapping[str, Mapping[int, Curve]]
    """Operation → ranks → seconds by bytes of the larger buffer."""
    measured: bool = True
    """Of this link itself; False where others' tables were scaled."""

    def __hash__(self) -> int:
        return hash((self.device, self.software, self.date, self.measured))

    def seconds(self, operation: str, nbytes: float, ranks: int) -> float | None:
        """Between the measured numbers of ranks; None beyond them."""
        known = self.curves.get(operation, {})
        counts = sorted(known)
        if not counts or not counts[0] <= ranks <= counts[-1]:
            return None
        above = counts[bisect_left(counts, ranks)]
        upper = along(known[above], nbytes)
        if above == ranks:
            return upper
        below = counts[bisect_left(counts, ranks) - 1]
        share = math.log(ranks / below) / math.log(above / below)
        return math.exp((1 - share) * math.log(along(known[below], nbytes)) + share * math.log(upper))

    def most(self, operation: str) -> int:
        """The largest measured number of ranks; 0 where there is none."""
        return max(self.curves.get(operation, {0: ()}))


def along(curve: Curve, nbytes: float) -> float:
    """Seconds of a size: on straight lines between measured ones in logarithms, at the last rate above, as the first below."""
    sizes = [size for size, _ in curve]
    at = bisect_left(sizes, nbytes)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1] * nbytes / curve[-1][0]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    share = math.log(nbytes / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


def table(device: str) -> Wires | None:
    return _tables().get(device)


@functools.cache
def like(kind: str, bytes_per_second: float, without: str = "") -> Wires | None:
    """The middle of what links of a kind take for as many bytes in proportion to their rates."""
    known = [(wires, rate / bytes_per_second) for name, rate in reached.like().get(kind, {}).items() if (wires := table(name)) and name != without]
    if not known:
        return None
    curves: dict[str, dict[int, Curve]] = {}
    for operation, by_ranks in known[0][0].curves.items():
        for ranks, curve in by_ranks.items():
            taken = [[wires.seconds(operation, nbytes * scale, ranks) for wires, scale in known] for nbytes, _ in curve]
            if all(seconds is not None for row in taken for seconds in row):
                middles = [math.exp(sum(math.log(seconds) for seconds in row if seconds) / len(row)) for row in taken]
                curves.setdefault(operation, {})[ranks] = tuple((nbytes, middle) for (nbytes, _), middle in zip(curve, middles, strict=True))
    first = known[0][0]
    return Wires(f"like {kind}", kind, first.software, first.source, first.date, curves, measured=False)


@functools.cache
def _tables() -> Mapping[str, Wires]:
    data = json.loads((resources.files("foretell.hardware") / "catalog" / FILE).read_text(encoding="utf-8"))
    return made(data["tables"], data["source"], data["date"])


def made(tables: Mapping[str, Any], source: str = "", date: str = "") -> dict[str, Wires]:
    """Tables as `write` takes them."""
    found = {}
    for device, row in tables.items():
        curves = {
            operation: {int(ranks): tuple((size, seconds) for size, seconds in curve) for ranks, curve in by_ranks.items()}
            for operation, by_ranks in row.items() if operation not in ("software", "link")
        }  # fmt: skip
        found[device] = Wires(device, row["link"], row["software"], source, date, curves)
    return found


def write(tables: Mapping[str, Any], source: str, date: str) -> None:
    """Keep tables of collectives where the package finds them."""
    content = json.dumps({"source": source, "date": date, "tables": tables}, separators=(",", ":"), sort_keys=True)
    with resources.as_file(resources.files("foretell.hardware") / "catalog") as place:
        write_atomically(place / FILE, content.replace('"tables"', '\n"tables"').encode() + b"\n")
