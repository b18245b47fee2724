"""What this process says of itself: which rank it is, what it holds, how long it waits for a core, and what an error of memory asked for.

Loaded by its path into the script's Python, as `hooks` is: the standard library and torch.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any

import torch
import torch.multiprocessing

_NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc")
_SIZE = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)?", re.IGNORECASE)
_ALLOWED = re.compile(r"([0-9.]+) ?([KMGT]iB) allowed", re.IGNORECASE)
_AMOUNTS = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}


def who() -> dict[str, int]:
    """Which of how many processes this is, and how many of them run here: as its group says, or its launcher."""
    told = {name: int(os.environ.get(key) or 0) for name, key in (("rank", "RANK"), ("world", "WORLD_SIZE"), ("local", "LOCAL_WORLD_SIZE"))}
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        told |= {"rank": group.get_rank(), "world": group.get_world_size()}
    return told


def about_this() -> dict[str, Any]:
    return {"kind": "begin", "pid": os.getpid(), "torch": torch.__version__, "python": sys.version.split()[0],
            "threads": torch.get_num_threads(), **who()}  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)


def tried_bytes(text: str) -> int | None:
    """What the allocation that failed was for."""
    found = _SIZE.search(text)
    return int(float(found[1].rstrip(".")) * 2 ** _UNITS[(found[2] or "bytes").lower()]) if found else None


def where(trace: Any) -> dict[str, str]:
    """The innermost module that ran, and the innermost line that no installed package holds."""
    found = {"module": "", "line": ""}
    for frame, number in traceback.walk_tb(trace):
        file, owner = frame.f_code.co_filename, frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            found["module"] = type(owner).__name__
        if "site-packages" not in file and not file.startswith("<") and "/lib/python" not in file:
            found["line"] = f"{os.path.basename(file)}:{number}"
    return found


def memory(cuda: bool) -> dict[str, int]:
    """Bytes now and at the peak: of CUDA's allocator, and of this process."""
    process = _statuses()
    found = {"rss": process.get("VmRSS", 0), "rss_peak": process.get("VmHWM", 0)}
    if cuda and torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        for name, key in (("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")):
            found[name] = int(stats.get(f"{key}.all.current", 0))
            found[f"{name}_peak"] = int(stats.get(f"{key}.all.peak", 0))
        found["retries"] = int(stats.get("num_alloc_retries", 0))
    return found


def allowed(cuda: bool, text: str = "") -> dict[str, int]:
    """What the device has, is free of it, and what this process may take: as its error says, or the allocator."""
    if not cuda or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)()
    said = _ALLOWED.search(text)
    most = int(float(said[1]) * 2 ** _UNITS[said[2].lower()]) if said else int(share * total)
    return {"free": int(free), "total": int(total), "allowed": min(most, int(total))}


def _statuses() -> dict[str, int]:
    """What /proc/self/status says of memory, in bytes; nothing where there is no such file."""
    try:
        with open("/proc/self/status") as file:
            return {name: int(amount) * 1024 for name, amount in _AMOUNTS.findall(file.read())}
    except OSError:
        return {}


def delayed() -> float:
    """Seconds that this thread was ready to run and others had the cores; 0 where nobody counts them."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def status(name: str) -> int:
    return _statuses().get(name, 0)
