"""Where a rank writes its collectives: memory that is a file of the run folder too, so that it outlives the process. No torch.

The file is allocated before it is used: a disk that fills up later cannot harm the run. Where there is no room, or no folder, the
ring is in memory alone.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.runtime.detect.layout import FOLDER, HEADER_BYTES, HISTORY, NAMES_BYTES, RECORDS_AT, SIZE, SUFFIX


class Ring:
    """Bytes, in a file where one can be had."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self.memory = self._mapped(path) if path is not None else None
        if self.memory is None:
            self.path, self.memory = None, mmap.mmap(-1, SIZE)
        text = json.dumps(header).encode()
        assert len(text) < HEADER_BYTES
        self.memory[: len(text)] = text
        self._names = HEADER_BYTES

    def _mapped(self, path: Path) -> mmap.mmap | None:
        with contextlib.suppress(OSError, ValueError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # what the process before this wrote may tell why it ended
                path.replace(path.with_name(f"{path.name}.before"))
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
            try:
                allocate = getattr(os, "posix_fallocate", None)
                if allocate is not None:
                    allocate(handle, 0, SIZE)
                else:  # written to the end, so that every page is there
                    os.write(handle, bytes(SIZE))
                return mmap.mmap(handle, SIZE)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)
        return None

    def name(self, content: Mapping[str, Any]) -> None:
        """One more line of names, where there is room."""
        assert self.memory is not None
        text = json.dumps(content).encode() + b"\n"
        if self._names + len(text) <= RECORDS_AT:
            self.memory[self._names : self._names + len(text)] = text
            self._names += len(text)

    def flush(self) -> None:
        """For readers on other machines, whose file system may keep the bytes here until then."""
        if self.path is not None and self.memory is not None:
            with contextlib.suppress(OSError, ValueError):
                self.memory.flush()


def forget(run: Path) -> None:
    """Take away what is there of a run that never began."""
    folder = run / FOLDER
    with contextlib.suppress(OSError):
        for path in (*folder.glob(f"rank-*{SUFFIX}"), *folder.glob(f"rank-*{SUFFIX}.before"), folder / HISTORY):
            path.unlink(missing_ok=True)
        folder.rmdir()


assert NAMES_BYTES == RECORDS_AT - HEADER_BYTES
