"""What a folder offers to those who would keep bytes there. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from foretell.errors import UserError


def free(folder: str | Path | int) -> int:
    """Bytes that can still be written there, by anybody; of a folder, or of an open file's disk."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"nothing can be kept on disk in {folder}: {error.strerror}", "make this folder, or name another") from error
    return found.f_bavail * found.f_frsize


def in_memory(folder: str | Path) -> bool:
    """Whether files there are in host memory themselves, and save none of it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    return any(words[2] == number and words[words.index("-") + 1] in ("tmpfs", "ramfs") for words in mounts)
