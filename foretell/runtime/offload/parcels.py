"""What is moved of autograd's saved tensors, and what autograd holds instead. `saved` says when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from foretell.runtime.offload.lanes import Lane, Mark
from foretell.runtime.offload.memory.arena import Arena
from foretell.runtime.offload.memory.slots import MemorySlot


class DiskFileLike(Protocol):
    """A file of a fixed size, which moves bytes beside everything else (`disk.Shelf`)."""

    nbytes: int

    def write(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Any: ...

    def read(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Any: ...

    def close(self) -> None: ...


class ArenaBytes:
    """An arena as one stretch of bytes."""

    def __init__(self, nbytes: int, *, register: bool) -> None:
        self.arena = Arena(nbytes, register=register)
        self.nbytes = self.arena.nbytes
        self.bytes = self.arena.take(self.nbytes, torch.uint8)

    def close(self) -> None:
        self.arena.close()


class Stay(NamedTuple):
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


class Parcel:
    """The bytes of one storage, as they were when they were saved."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, call: BlockCall) -> None:
        self.seen = StorageWeakRef(storage)
        """While it is held, no other storage gets this one's address."""
        self.alias: Tensor | None = tensor.detach()
        self.version = tensor._version
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        """No bytes, but the tensor's own count of how often it was overwritten."""
        self.nbytes = storage.nbytes()
        self.device: torch.UntypedStorage | None = storage
        self.host: MemorySlot[ArenaBytes] | None = None
        self.shelf: MemorySlot[Any] | None = None
        self.call = call
        self.tickets = 0
        self.down: Mark = None
        self.up: Mark = None
        self.lifted: threading.Event | None = None
        """On disk: set once the copy up was asked for, or failed."""
        self.error: BaseException | None = None
        self.stream: torch.cuda.Stream | None = None
        """Whose memory it has on the device."""
        self.settled = True
        """Whether that stream waits for all copies that touch this memory."""
        self.wanted = self.spoilt = False

    def changed(self) -> bool:
        """Whether the tensor was overwritten while its bytes were still read."""
        if self.alias is not None and self.alias._version != self.version:
            self.spoilt = True
        return self.spoilt

    def holds(self, tensor: Tensor) -> bool:
        """Whether another tensor of the storage is as it was when this was saved: one that counts its changes together with it
        and has had none since. Tensors may share a storage and not their counts (`unsafe_chunk`, as in recurrent cells): one of
        them may have been overwritten since, and nothing tells."""
        if self.version != tensor._version or self.changed():
            return False
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self._counter._version != self.version

    def free(self) -> None:
        """Let the device's memory go: whoever gets it computes after the copies."""
        if self.stream is not None and not self.settled:
            for mark in (self.down, self.up):
                if mark is not None:
                    self.stream.wait_event(mark)
        self.settled = True
        self.device = self.alias = None


class Ticket:
    """What autograd keeps instead of a tensor. When it goes, the tensor is not needed any more."""

    __slots__ = ("_gone", "call", "offset", "parcel", "shape", "stride", "type")

    def __init__(self, parcel: Parcel, call: BlockCall, tensor: Tensor, gone: Callable[[Parcel, BlockCall], None]) -> None:
        self.parcel, self.call, self._gone = parcel, call, gone
        self.type, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        parcel.tickets += 1
        call.tickets += 1

    def __del__(self) -> None:
        self._gone(self.parcel, self.call)


class BlockCall:
    """One run of a block's forward."""

    def __init__(self, number: int, place: int, mode: str, stays: frozenset[int]) -> None:
        self.number, self.place, self.mode, self.stays = number, place, mode, stays
        self.parcels: dict[Parcel, None] = {}
        """What it saved, also what another call had saved before."""
        self.tickets = self.nbytes = self.room = 0
        self.begun = self.entered = False


class Round(NamedTuple):
    """From one backward to the next: calls of blocks, those of them that keep all, bytes that went down."""

    calls: int
    kept: int
    nbytes: int


class Moved(NamedTuple):
    """What was moved since the start, in bytes."""

    down: int
    up: int
    forwarded: int


def stay(tensor: Tensor) -> Stay:
    return Stay(tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)


def key_of(tensor: Tensor) -> int:
    """What names a storage while it lives; tensors that have none of their own are never moved."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def part(slot: MemorySlot[ArenaBytes], nbytes: int) -> Tensor:
    return slot.piece.bytes[slot.offset : slot.offset + nbytes]


def copy(lane: Lane, target: Tensor, source: Tensor) -> Mark:
    """Copy in a lane; the mark is where it is done."""
    with lane.here():
        target.copy_(source, non_blocking=True)
    return lane.mark()


def overwritten(dtype: torch.dtype, shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor that backward needs was modified by an in-place operation: {dtype} of shape {tuple(shape)}, saved in a block whose "
        "activations are moved; autograd refuses the same without moving"
    )
