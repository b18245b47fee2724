"""Bytes that neither the device nor the host has room for: one file without a name, moved by a few threads past the page cache.

The file has no entry in its folder, so whatever ends the process, the disk has its bytes back. All of them are reserved at the
start: a full disk is found before the first step. Memory of an arena goes to disk and back as it is; other memory and ragged
ends go through a buffer of the thread that moves them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.offload.memory.arena import ALIGN, KEEP_FREE, bytes_for
from foretell.runtime.offload.memory.folder import free
from foretell.units import MIB, human_bytes

PIECE = 8 * MIB
"""Bytes that one thread moves at a time."""
TRY = "plan with a smaller --disk, free space there, or name a folder on another disk"


class _Transfer:
    """Bytes on their way, and who waits for them."""

    def __init__(self, offset: int, data: np.ndarray, writing: bool, after: Callable[[], object] | None) -> None:
        self.offset, self.data, self.writing, self.after = offset, data, writing, after
        self.begin, self.end = _down(offset), bytes_for([offset + data.nbytes])  # in whole pages: these are rewritten together
        self.done: Future[None] = running()
        self.error: BaseException | None = None
        self.pieces = self.waits = 0
        """Pieces that are not moved yet; earlier jobs that must be done before it starts."""
        self.then: list[_Transfer] = []


class DiskFile:
    """A file of a fixed size. Transfers that touch the same bytes happen in the order they were asked for, others at once.

    Bytes that were never written are zero. After a write failed, nothing can be read any more: old bytes are never taken for new.
    """

    def __init__(
        self, nbytes: int, folder: str | Path, *, threads: int = 4, direct: bool = True, reserve: int = KEEP_FREE, piece: int = PIECE
    ) -> None:
        self.nbytes, self.folder, self.piece = max(bytes_for([nbytes]), ALIGN), Path(folder), bytes_for([piece])
        there = free(folder)
        if self.nbytes > there - reserve:
            raise self._too_small(f"{human_bytes(there)} are free there, of which {human_bytes(max(reserve, 0))} are left to others")
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise UserError(f"no file can be made in {folder}: {error.strerror}", "name a folder that can be written") from error
        self._fd = self._file.fileno()
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            self._file.close()
            raise self._too_small(f"{human_bytes(there)} are free there: {error.strerror}") from error
        self._own = threading.local()
        self.direct = direct and self._go_direct()
        """Whether transfers pass the page cache by."""
        self.read_bytes = self.written_bytes = 0
        self._busy, self._since, self._moving = 0.0, 0.0, 0
        self._next = 0
        self._closed, self._failed = False, None  # type: bool, BaseException | None
        self._under_way: list[_Transfer] = []
        self._changed = threading.Condition()
        self._movers = ThreadPoolExecutor(threads, "foretell-disk")
        self._waiter = ThreadPoolExecutor(1, "foretell-disk-wait")

    def _too_small(self, has: str) -> UserError:
        return UserError(f"the plan keeps {human_bytes(self.nbytes)} on disk in {self.folder}, and {has}", TRY)

    def _go_direct(self) -> bool:
        """Some file systems refuse direct transfers at once, some with the first one."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self.direct = True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            for writing in (False, True):
                self._through(writing, 0, self._bounce()[:ALIGN])
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    # ------------------------------------------------------------ what it is for

    def take(self, nbytes: int) -> int:
        """The offset of the next bytes that nobody has."""
        if self._next + nbytes > self.nbytes:
            raise AssertionError(f"a shelf of {self.nbytes} bytes has no {nbytes} left after {self._next}")
        found = self._next
        self._next += bytes_for([nbytes])
        return found

    def write(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Future[None]:
        """Begin to write a host tensor, once `after`, called by a thread of the shelf, has returned. It must not change until then."""
        return self._ask(offset, tensor, True, after)

    def read(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Future[None]:
        """Begin to fill a host tensor, once `after` has returned."""
        return self._ask(offset, tensor, False, after)

    def later(self, after: Callable[[], object]) -> Future[object]:
        """What `after` gives, called in turn with those of transfers."""
        return self._waiter.submit(after)

    def settle(self) -> None:
        """Until nothing is under way; raises if a write failed, also one that nobody waited for."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            if self._failed is not None:
                raise self._failed

    def measured(self) -> tuple[int, float]:
        """Bytes that went through so far, and the seconds in which any did."""
        with self._changed:
            busy = self._busy + (time.perf_counter() - self._since if self._moving else 0.0)
            return self.read_bytes + self.written_bytes, busy

    def slower(self, read: float, write: float, *, least: int = 256 * MIB, by: float = 1.25) -> str | None:
        """A warning if what went through so far took `by` times what it should at these planned bytes per second."""
        with self._changed:
            busy = self._busy + (time.perf_counter() - self._since if self._moving else 0.0)
            moved, planned = self.read_bytes + self.written_bytes, self.read_bytes / read + self.written_bytes / write
        if moved < least or busy <= by * planned:
            return None
        return (
            f"the disk of {self.folder} is slower than planned: {human_bytes(moved)} took {busy:.1f} s ({human_bytes(moved / busy)}/s), "
            f"{planned:.1f} s were planned ({human_bytes(moved / planned)}/s); name a faster disk, or plan again with this rate"
        )

    def close(self) -> None:
        """Wait for what is under way; then the file is gone."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)
        self._waiter.shutdown()
        self._movers.shutdown()
        self._file.close()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ how bytes move

    def _ask(self, offset: int, tensor: Tensor, writing: bool, after: Callable[[], object] | None) -> Future[None]:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise AssertionError("only host tensors in one piece go to disk")
        if offset < 0 or offset + tensor.nbytes > self.nbytes:
            raise AssertionError(f"{tensor.nbytes} bytes at {offset} are not on a shelf of {self.nbytes}")
        job = _Transfer(offset, tensor.detach().reshape(-1).view(torch.uint8).numpy(), writing, after)
        with self._changed:
            if self._closed:
                job.done.set_exception(RuntimeError(f"the shelf in {self.folder} is closed"))
                return job.done
            for other in self._under_way:
                if (writing or other.writing) and job.begin < other.end and other.begin < job.end:
                    other.then.append(job)
                    job.waits += 1
            self._under_way.append(job)
            ready = not job.waits
        if ready:
            self._start(job)
        return job.done

    def _start(self, job: _Transfer) -> None:
        _hand(self._waiter if job.after is not None else self._movers, self._cut, job)

    def _cut(self, job: _Transfer) -> None:
        """Wait for what it comes after, then hand its pieces out."""
        try:
            if job.after is not None:
                job.after()
        except BaseException as error:  # raised again where the transfer is waited for
            job.error = error
        size = job.data.nbytes
        starts = range(job.begin - job.offset, size if job.error is None and size else job.begin - job.offset, self.piece)
        job.pieces = len(starts)
        for at in starts:
            _hand(self._movers, self._piece, job, max(at, 0), min(at + self.piece, size))
        if not starts:
            self._finish(job)

    def _piece(self, job: _Transfer, begin: int, end: int) -> None:
        with self._changed:
            error = job.error or self._failed
            self._since = self._since if self._moving else time.perf_counter()
            self._moving += 1
        try:
            if error is None:
                self._move(job.writing, job.offset + begin, job.data[begin:end])
        except BaseException as found:
            error = self._said(job, found) if isinstance(found, OSError) else found
        with self._changed:
            self._moving -= 1
            self._busy += time.perf_counter() - self._since if not self._moving else 0.0
            if error is not None:
                job.error = job.error or error
            elif job.writing:
                self.written_bytes += end - begin
            else:
                self.read_bytes += end - begin
            job.pieces -= 1
            last = not job.pieces
        if last:
            self._finish(job)

    def _said(self, job: _Transfer, error: OSError) -> UserError:
        what = f"{'writing' if job.writing else 'reading'} {human_bytes(job.data.nbytes)} of {human_bytes(self.nbytes)} on disk"
        there = ""
        with suppress(UserError):
            there = f"; {human_bytes(free(self._fd))} are free there"
        said = UserError(f"{what} in {self.folder} failed: {error.strerror}{there}", TRY)
        said.__cause__ = error
        return said

    def _finish(self, job: _Transfer) -> None:
        with self._changed:
            if job.error is not None and job.writing:
                self._failed = self._failed or job.error
            for later in job.then:
                later.waits -= 1
            ready = [later for later in job.then if not later.waits]
            self._under_way.remove(job)
            self._changed.notify_all()
        for later in ready:
            self._start(later)
        end(job.done, None, job.error)

    def _move(self, writing: bool, offset: int, data: np.ndarray) -> None:
        low, end, high = _down(offset), offset + data.nbytes, bytes_for([offset + data.nbytes])
        if not self.direct or (offset == low and end == high and data.ctypes.data % ALIGN == 0):
            self._through(writing, offset, data)
            return
        whole = self._bounce()[: high - low]
        if not writing:
            self._through(False, low, whole)
            data[:] = whole[offset - low : end - low]
            return
        if offset > low:  # pages are written whole: what else is in the first and in the last stays as it is
            self._through(False, low, whole[:ALIGN])
        if end < high:
            self._through(False, high - ALIGN, whole[-ALIGN:])
        whole[offset - low : end - low] = data
        self._through(True, low, whole)

    def _bounce(self) -> np.ndarray:
        if not hasattr(self._own, "pages"):
            self._own.pages = np.frombuffer(mmap.mmap(-1, self.piece), dtype=np.uint8)
        return self._own.pages

    def _through(self, writing: bool, offset: int, data: np.ndarray) -> None:
        move, done = os.pwritev if writing else os.preadv, 0
        while done < data.nbytes:
            count = move(self._fd, [data[done:].data], offset + done)
            count -= (done + count) % ALIGN if self.direct else 0  # after a short transfer: again from the last whole page
            if count <= 0:
                raise OSError(errno.EIO, "the disk moved nothing")
            done += count
        if not self.direct:
            if writing:
                os.fdatasync(self._fd)  # an error is found now, and not when the bytes are gone
            os.posix_fadvise(self._fd, offset, data.nbytes, os.POSIX_FADV_DONTNEED)


def running() -> Future:
    """A future that someone ends with `end`; it cannot be cancelled."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def end(future: Future, result: object, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _hand(pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
    try:
        pool.submit(work, *arguments)
    except RuntimeError:  # the interpreter is about to end, and takes no more work
        work(*arguments)


def _down(offset: int) -> int:
    return offset // ALIGN * ALIGN
