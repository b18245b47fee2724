"""Host memory of exactly the size that is asked for, which the device can reach by itself.

PyTorch's pinned allocator rounds up to powers of two and keeps what it has; here one mapping is made, touched by all
threads at once and registered with CUDA, and given back in one piece. It is nobody's but this process's: whatever ends
the process frees it.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.units import human_bytes

ALIGN = 4096
KEEP_FREE = 2 * 2**30
"""Bytes of host memory that are left to everything else."""


class Arena:
    """Tensors of host memory, cut from one mapping in the order they are asked for."""

    def __init__(self, nbytes: int, *, register: bool) -> None:
        self.nbytes = max(_aligned(nbytes), ALIGN)
        _check(self.nbytes)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise _too_small(self.nbytes, available(), str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        began = time.perf_counter()
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes.zero_()  # every page is touched, by all threads
        self._next = 0
        self.registered = False
        if register:
            self._register()
        self.seconds = time.perf_counter() - began
        """That making it took."""

    def _register(self) -> None:
        code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
        if int(code) != 0:
            raise UserError(
                f"the driver did not lock {human_bytes(self.nbytes)} of host memory (CUDA error {int(code)})",
                "raise the limit of locked memory (ulimit -l), or plan with a smaller --host",
            )
        self.registered = True

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The next elements, all zero."""
        nbytes = elements * dtype.itemsize
        if self._next + nbytes > self.nbytes:
            raise AssertionError(f"an arena of {self.nbytes} bytes has no {nbytes} left after {self._next}")
        found = self._bytes[self._next : self._next + nbytes].view(dtype)
        self._next = _aligned(self._next + nbytes)
        return found

    def reset(self) -> None:
        """Begin anew: nothing that was taken is used any more."""
        self._next = 0
        self._bytes.zero_()

    def close(self) -> None:
        """Unlock the memory; the mapping goes with the last tensor that was cut from it."""
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.registered = False


def bytes_for(sizes: list[int]) -> int:
    """What an arena must have so that tensors of these bytes can be taken from it."""
    return sum(_aligned(size) for size in sizes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def available() -> int | None:
    """Bytes of host memory that can be had now: of the machine, or of the container where that has less."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path(limit).read_text().strip()
            if most != "max":
                found.append(int(most) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def _check(nbytes: int) -> None:
    there = available()
    if there is not None and nbytes > there - KEEP_FREE:
        raise _too_small(nbytes, there, "")


def _too_small(nbytes: int, there: int | None, why: str) -> UserError:
    has = f"{human_bytes(there)} can be had" if there is not None else why
    return UserError(
        f"the plan keeps {human_bytes(nbytes)} in host memory, and {has}",
        "plan with a smaller --host, a smaller state format, or end what else uses memory on this machine",
    )
