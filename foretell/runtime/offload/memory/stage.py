"""Arrays that are on disk between uses, and a ring of host buffers through which they pass.

    ahead ─► read into a free buffer ─► fetch ─► used and changed where it is ─► put ─► written, and the buffer is free again

A chunk's arrays lie one behind the other, on disk as in a buffer, each from a page of its own: a chunk is one transfer, and
no byte is copied on its way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
from torch import Tensor

from foretell.plan.states import count_of
from foretell.runtime.offload.memory.arena import Arena, bytes_for
from foretell.runtime.offload.memory.disk import DiskFile, end, running

Arrays = dict[str, Tensor]
"""One chunk in a buffer: views of its memory, by name."""


def needs(chunks: Mapping[Any, int], dtypes: Mapping[str, torch.dtype], buffers: int) -> tuple[int, int]:
    """Bytes of host memory and of disk that a stage takes for chunks of so many elements."""
    sizes = [_bytes_of(elements, dtypes) for elements in chunks.values()]
    return buffers * max(sizes, default=0), sum(sizes)


def _bytes_of(elements: int, dtypes: Mapping[str, torch.dtype]) -> int:
    return bytes_for([count_of(name, elements) * dtype.itemsize for name, dtype in dtypes.items()])


class _Use:
    """A chunk that was asked for and not given back; a guess, if only `ahead` did."""

    def __init__(self, guess: bool) -> None:
        self.guess = guess
        self.future: Future[Arrays] = running()
        self.buffer: Tensor | None = None
        self.arrays: Arrays = {}


class StagingBuffers:
    """Chunks by key. Give back what you fetch: who fetches more than there are buffers waits until one is given back.

    What is only asked for ahead takes nothing from anybody: it is forgotten where a buffer is needed for something else.
    """

    def __init__(self, shelf: DiskFile, arena: Arena, chunks: Mapping[Any, int], dtypes: Mapping[str, torch.dtype], buffers: int = 3) -> None:
        self.shelf, self.chunks, self.dtypes = shelf, dict(chunks), dict(dtypes)
        host, _ = needs(chunks, dtypes, 1)
        self._free = [arena.take(host, torch.uint8) for _ in range(buffers)]
        self._at = {key: shelf.take(_bytes_of(elements, dtypes)) for key, elements in chunks.items()}
        self._uses: dict[Hashable, _Use] = {}
        self._queue: deque[Hashable] = deque()
        """Chunks that wait for a buffer."""
        self._lock = threading.Lock()
        self._views: dict[tuple[int, int], Arrays] = {}

    @property
    def free(self) -> int:
        """Buffers that are free; less than none: so many chunks wait for one."""
        with self._lock:
            return len(self._free) - len(self._queue)

    def fetch(self, key: Hashable) -> Future[Arrays]:
        """Begin to read a chunk, or take what was begun; the same future until it is given back. Zeros if it was never put."""
        with self._lock:
            use = self._uses.get(key)
            if use is None:
                use = self._uses[key] = _Use(guess=False)
                self._queue.append(key)
            use.guess = False
        self._advance()
        return use.future

    def ahead(self, key: Hashable) -> bool:
        """Begin to read a chunk that may be fetched soon, if a buffer is free; whether it is on its way."""
        with self._lock:
            if key in self._uses:
                return True
            if self._queue or not self._free:
                return False
            self._uses[key] = _Use(guess=True)
            self._queue.append(key)
        self._advance()
        return True

    def put(self, key: Hashable, buffer: Arrays, after: Callable[[], object] | None = None) -> Future[None]:
        """Give a fetched chunk back: it is written once `after` has returned. Done when its buffer is free; fetching it waits for that."""
        done: Future[None] = running()
        with self._lock:  # until the write is asked for, so that a fetch comes behind it
            use = self._given(key, buffer)
            assert use.buffer is not None
            written = self.shelf.write(self._at[key], use.buffer[: self._size(key)], after)

        def over(future: Future[None]) -> None:
            self._release(use)
            end(done, None, future.exception())

        written.add_done_callback(over)
        return done

    def drop(self, key: Hashable, after: Callable[[], object] | None = None) -> None:
        """Give a chunk back as it is on disk, fetched, on its way or waiting; its buffer is free once `after` has returned."""
        with self._lock:
            use = self._uses.pop(key, None)
            if use is None:  # asked for ahead, and forgotten
                return
            waiting = key in self._queue
            if waiting:
                self._queue.remove(key)
        if waiting:
            use.future.set_exception(CancelledError())
        elif after is not None:
            use.future.add_done_callback(lambda _: self.shelf.later(after).add_done_callback(lambda _: self._release(use)))
        else:
            use.future.add_done_callback(lambda _: self._release(use))

    def settle(self) -> None:
        """Until all that was put is on disk; raises if some of it is not."""
        self.shelf.settle()

    # ------------------------------------------------------------ runs of elements, past the buffers

    def read(self, key: Hashable, name: str, begin: int, into: Tensor) -> Future[None]:
        """Fill memory with a run of one of a chunk's arrays, as it is on disk."""
        return self.shelf.read(self._place(key, name, begin), into)

    def write(self, key: Hashable, name: str, begin: int, values: Tensor) -> Future[None]:
        """Overwrite a run of one of a chunk's arrays on disk; nobody has fetched the chunk."""
        use = self._uses.get(key)
        if use is not None and not use.guess:
            raise AssertionError(f"{key!r} is overwritten while someone has it")
        self.drop(key)
        return self.shelf.write(self._place(key, name, begin), values)

    def _place(self, key: Hashable, name: str, begin: int) -> int:
        at = self._at[key]
        for other, dtype in self.dtypes.items():
            if other == name:
                return at + begin * dtype.itemsize
            at += bytes_for([count_of(other, self.chunks[key]) * dtype.itemsize])
        raise AssertionError(f"{name} is none of {list(self.dtypes)}")

    # ------------------------------------------------------------ buffers

    def _size(self, key: Hashable) -> int:
        return _bytes_of(self.chunks[key], self.dtypes)

    def _given(self, key: Hashable, buffer: Arrays) -> _Use:
        use = self._uses.get(key)
        if use is None or use.arrays is not buffer or not use.future.done():
            raise AssertionError(f"{key!r} is put with a buffer that was not fetched for it")
        return self._uses.pop(key)

    def _release(self, use: _Use) -> None:
        with self._lock:
            if use.buffer is None:
                return
            self._free.append(use.buffer)
            use.buffer = None
        self._advance()

    def _advance(self) -> None:
        """Read what waits, as far as there are buffers."""
        while True:
            with self._lock:
                if self._queue and not self._free:
                    self._forget()
                if not self._queue or not self._free:
                    return
                key, buffer = self._queue.popleft(), self._free.pop()
                use = self._uses[key]
                use.buffer, use.arrays = buffer, self._cut(buffer, self.chunks[key])
                come = self.shelf.read(self._at[key], buffer[: self._size(key)])
            come.add_done_callback(self._arrived(key, use))

    def _forget(self) -> None:
        """Make the buffer free of what was asked for ahead, and last."""
        for key, use in reversed(self._uses.items()):
            if use.guess and use.buffer is not None and use.future.done():
                self._free.append(use.buffer)
                del self._uses[key]
                return

    def _arrived(self, key: Hashable, use: _Use) -> Callable[[Future[None]], None]:
        def call(come: Future[None]) -> None:
            if come.exception() is not None:
                with self._lock:
                    if self._uses.get(key) is use:
                        del self._uses[key]
                self._release(use)
            end(use.future, use.arrays, come.exception())
            self._advance()  # someone may need the buffer more

        return call

    def _cut(self, buffer: Tensor, elements: int) -> Arrays:
        where = (buffer.data_ptr(), elements)
        if where not in self._views:
            found, at = {}, 0
            for name, dtype in self.dtypes.items():
                nbytes = count_of(name, elements) * dtype.itemsize
                found[name] = buffer[at : at + nbytes].view(dtype)
                at += bytes_for([nbytes])
            self._views[where] = found
        return self._views[where]
