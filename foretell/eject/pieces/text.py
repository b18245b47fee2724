"""Text as bytes"""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

import torch

from foretell.eject.pieces.model import as_batch
from foretell.eject.pieces.order import shuffled
from foretell.eject.pieces.settings import SEQ

MOST_BYTES = 1 << 30


def read_text(folder: Path) -> torch.Tensor:
    """Every UTF-8 file below a folder, in the order of their paths, a zero byte after each."""
    files = [folder] if folder.is_file() else []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    if not folder.is_file():
        files = [file for file in files if file.is_file() and not file.is_symlink()]
        files.sort(key=lambda file: file.relative_to(folder).as_posix())
    found = bytearray()
    for file in files:
        content = file.read_bytes()
        if content and is_text(content[:8192]) and len(found) < MOST_BYTES:
            found += content + b"\0"
    del found[MOST_BYTES:]
    return torch.frombuffer(found, dtype=torch.uint8)


def is_text(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return 0 not in head


class Text:
    """Windows of SEQ + 1 bytes, of which the last is the first of the next. One in 20 is held out."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokens, self.seed = read_text(folder), seed
        windows = (len(self.tokens) - 1) // SEQ
        if windows < 2:
            raise SystemExit(f"{folder} has {len(self.tokens)} bytes of text, too few for two sequences of {SEQ}")
        self.every = min(20, windows)
        self.count = windows - max(1, windows // 20)

    def batch(self, numbers: list[int]) -> Any:
        rows = []
        for number in numbers:
            epoch, position = divmod(number, self.count)
            index = shuffled(position, self.count, self.seed, epoch)
            start = (index + index // (self.every - 1)) * SEQ
            rows.append(self.tokens[start : start + SEQ + 1])
        return as_batch(torch.stack(rows).long())
