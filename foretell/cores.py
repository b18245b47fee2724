"""How many cores there are, for whoever needs to know no more of the machine: importing `hardware` takes memory."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores without hyper-threads, as far as this process may use them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return allowed
    pairs, socket = set(), ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "physical id":
            socket = value
        elif key == "core id":
            pairs.add((socket, value))
    return min(len(pairs), allowed) if pairs else allowed
