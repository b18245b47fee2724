"""Activations that are elsewhere between forward and backward: what autograd saves in a block goes down as it is saved, and comes
up again before the block's backward.

    forward     block 0 │ block 1 │ block 2 (kept) │ block 3 (kept)      compute
                   down │ 0 ──────────── │ 1 ──────────── │              beside it; the device's copy is let go when compute has
    backward    block 3 │ block 2 │ block 1 │ block 0                    been told to wait for that, at the pace at which all
                          up 1    │ up 0 │                               has gone when forward is over

A storage moves once, however many saved tensors look at it and whichever blocks saved them. Parameters, buffers and small tensors
stay. What backward wants while it is still going down is taken as it is. Nothing is rounded and nothing is computed again, so
gradients have the bits they have without.

Blocks are hooked from outside, by their forward. What autograd lets go of gives its memory back, in whatever order that happens: a
graph that nobody differentiates, an error in the middle of forward, a second backward.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from foretell.plan.types import Residency
from foretell.runtime.offload.arena import Arena, bytes_for
from foretell.runtime.offload.lanes import Lane, Mark, passed
from foretell.runtime.offload.slots import Slot, Slots

HOST, DISK = "host", "disk"
LEAST = 2**20
"""Bytes of a storage that is worth moving."""
GROW = 256 * 2**20
"""Least bytes of host memory that are made at a time, where the first block did not tell how many are needed."""


class Shelf(Protocol):
    """A file of a fixed size, which moves bytes beside everything else (`disk.Shelf`)."""

    nbytes: int

    def write(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Any: ...

    def read(self, offset: int, tensor: Tensor, after: Callable[[], object] | None = None) -> Any: ...

    def close(self) -> None: ...


class _Host:
    """An arena as one stretch of bytes."""

    def __init__(self, nbytes: int, *, register: bool) -> None:
        self.arena = Arena(nbytes, register=register)
        self.nbytes = self.arena.nbytes
        self.bytes = self.arena.take(self.nbytes, torch.uint8)

    def close(self) -> None:
        self.arena.close()


class _Stay(NamedTuple):
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int


class _Parcel:
    """The bytes of one storage, as they were when they were saved."""

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage, call: _Call) -> None:
        self.seen = StorageWeakRef(storage)
        """While it is held, no other storage gets this one's address."""
        self.alias: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.nbytes = storage.nbytes()
        self.device: torch.UntypedStorage | None = storage
        self.host: Slot[_Host] | None = None
        self.shelf: Slot[Any] | None = None
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

    def free(self) -> None:
        """Let the device's memory go: whoever gets it computes after the copies."""
        if self.stream is not None and not self.settled:
            for mark in (self.down, self.up):
                if mark is not None:
                    self.stream.wait_event(mark)
        self.settled = True
        self.device = self.alias = None


class _Ticket:
    """What autograd keeps instead of a tensor. When it goes, the tensor is not needed any more."""

    __slots__ = ("_gone", "call", "offset", "parcel", "shape", "stride", "type")

    def __init__(self, parcel: _Parcel, call: _Call, tensor: Tensor, gone: Callable[[_Parcel, _Call], None]) -> None:
        self.parcel, self.call, self._gone = parcel, call, gone
        self.type, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        parcel.tickets += 1
        call.tickets += 1

    def __del__(self) -> None:
        self._gone(self.parcel, self.call)


class _Call:
    """One run of a block's forward."""

    def __init__(self, number: int, place: int, mode: str, stays: frozenset[int]) -> None:
        self.number, self.place, self.mode, self.stays = number, place, mode, stays
        self.parcels: dict[_Parcel, None] = {}
        """What it saved, also what another call had saved before."""
        self.tickets = self.nbytes = self.room = 0
        self.begun = self.entered = False


class _Round(NamedTuple):
    """From one backward to the next: calls of blocks, those of them that keep all, bytes that went down."""

    calls: int
    kept: int
    nbytes: int


class Moved(NamedTuple):
    """What was moved since the start, in bytes."""

    down: int
    up: int
    forwarded: int


class Saved:
    """The activations of some blocks of a model."""

    def __init__(
        self, model: nn.Module, modes: Mapping[str, str], device: torch.device, *, shelf: Callable[[int], Shelf] | None = None,
        least: int = LEAST, grow: int = GROW,
    ) -> None:  # fmt: skip
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.least = device, max(least, 1)
        self._compute, self._down, self._up = Lane(device, compute=True), Lane(device), Lane(device)
        self._tables = [b for b in model.buffers() if b.untyped_storage().nbytes() >= self.least]
        self.hosts: Slots[_Host] = Slots(lambda n: _Host(n, register=device.type == "cuda"), least=grow)
        self.bounces: Slots[_Host] = Slots(lambda n: _Host(n, register=device.type == "cuda"), least=grow, one=False)
        self.shelves: Slots[Any] = Slots(shelf or _no_shelf, least=grow, one=False)
        self._known: dict[int, _Parcel] = {}
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._unsent: list[_Parcel] = []
        self._flying: deque[_Parcel] = deque()
        self._busy: deque[tuple[Slot[_Host], Callable[[], bool], Callable[[], object]]] = deque()
        """Host memory that bytes pass through on their way to or from disk: whether they have, and waiting until then."""
        self._largest = 0
        self._here = self._usual = _Round(0, 0, 0)
        """This time so far, and the last time."""
        self._landed = 0
        self._turned = False
        self._credit = -1
        self._last_up: Mark = None
        self._lock = threading.Lock()
        self._dead: deque[tuple[_Parcel, _Call]] = deque()
        self._late: deque[_Parcel] = deque()
        """Nobody wants them any more, but the disk has not brought them yet."""
        self.moved = Moved(0, 0, 0)
        self._count = {mode: list(modes.values()).count(mode) for mode in (HOST, DISK)}
        for path, mode in modes.items():
            self._wrap(model.get_submodule(path), mode)

    # ------------------------------------------------------------ around a block's forward

    def _wrap(self, block: nn.Module, mode: str) -> None:
        plain = block.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            call = self._begin(block, mode)
            if mode not in (HOST, DISK):
                found = plain(*args, **kwargs)
            else:
                with self._unsent_dropped(), saved_tensors_hooks(functools.partial(self._pack, call), self._unpack):
                    found = plain(*args, **kwargs)
            self._end(call)
            _watch(found, functools.partial(self._enter, call))
            return found

        block.forward = forward  # type: ignore[method-assign]

    @contextmanager
    def _unsent_dropped(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._unsent = []  # they stay on the device as long as anybody wants them
            raise

    def _begin(self, block: nn.Module, mode: str) -> _Call:
        with self._work():
            if self.hosts.loose():
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.hosts.tighten()
            if self._turned and not self._calls:
                self._usual, self._here, self._landed, self._turned = self._here, _Round(0, 0, 0), 0, False
                self._flying.clear()  # backward has taken them as they were
            self._credit = -1
            self._number += 1
            here = self._here
            self._here = here._replace(calls=here.calls + 1, kept=here.kept + (mode == "keep"))
            held = (*block.parameters(), *block.buffers(), *self._tables) if mode in (HOST, DISK) else ()
            return _Call(self._number, self._here.calls, mode, frozenset(_key(one) for one in held))

    def _end(self, call: _Call) -> None:
        with self._work():
            self._largest = max(self._largest, call.nbytes)
            unsent, self._unsent = self._unsent, []
            if unsent and call.mode == HOST:
                self.hosts.reserve(call.room * self._count[HOST])
            elif unsent:
                self.shelves.reserve(call.room * self._count[DISK])
                self.bounces.reserve(2 * call.room)
            for parcel in unsent:
                if parcel.tickets:
                    self._send(parcel)
            self._pace(call)

    def _pace(self, call: _Call) -> None:
        """Wait for what should have gone by now: as if it went evenly until forward is over, and so that no more is on its way than
        kept blocks will need later. Until a first step has shown how much there is, for all but the last block's."""
        usual = self._usual
        share = min(1.0, (call.place - 1) / max(1, usual.calls - 1)) if usual.calls else 1.0
        room = self._largest * max(1, usual.kept - self._here.kept - 1)
        due = max(usual.nbytes * share, self._here.nbytes - room) if usual.calls else float("inf")
        while self._flying and self._flying[0].call is not call and self._landed < due:
            self._land(self._flying.popleft())

    # ------------------------------------------------------------ what autograd saves

    def _pack(self, call: _Call, tensor: Tensor) -> _Stay | _Ticket:
        if type(tensor) is not Tensor or tensor.device != self.device or tensor.layout is not torch.strided:
            return _stay(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.least or storage._cdata in call.stays or isinstance(tensor._base, nn.Parameter):
            return _stay(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return _stay(tensor)
        with self._work():
            parcel = self._parcel(call, tensor, storage)
            self._calls[call.number] = call
            call.parcels[parcel] = None
            return _Ticket(parcel, call, tensor, self._gone)

    def _parcel(self, call: _Call, tensor: Tensor, storage: torch.UntypedStorage) -> _Parcel:
        known = self._known.get(storage._cdata)
        if known is not None and known.version == tensor._version and not known.changed():
            return known
        parcel = _Parcel(tensor, storage, call)
        self._known[parcel.seen.cdata] = parcel
        call.nbytes += parcel.nbytes
        call.room += bytes_for([parcel.nbytes])
        if (self.hosts if call.mode == HOST else self.shelves).pieces:
            self._send(parcel)
        else:
            self._unsent.append(parcel)
        return parcel

    def _unpack(self, packed: _Stay | _Ticket) -> Tensor:
        if isinstance(packed, _Stay):
            if packed.tensor._version != packed.version:
                raise _overwritten(packed.tensor.dtype, packed.tensor.shape)
            return packed.tensor
        parcel = packed.parcel
        with self._work():
            if parcel.device is None:
                self._bring_call(packed.call)
            parcel.wanted = True
            if parcel.changed():
                raise _overwritten(packed.type, packed.shape)
        if parcel.lifted is not None:
            parcel.lifted.wait()
            if parcel.error is not None:
                raise parcel.error
        with self._work():
            if parcel.alias is None:  # it came up
                self._compute.wait(parcel.up)
                parcel.settled = True
            assert parcel.device is not None
            empty = torch.empty(0, dtype=packed.type, device=self.device)
            return empty.set_(parcel.device, packed.offset, packed.shape, packed.stride)

    # ------------------------------------------------------------ down

    def _send(self, parcel: _Parcel) -> None:
        disk = parcel.call.mode == DISK
        parcel.host = self._bounce(parcel.nbytes) if disk else self.hosts.take(parcel.nbytes)
        assert parcel.device is not None
        self._down.wait(self._compute.mark())
        self._down.wait(self._last_up)  # of whatever was in this host memory before
        with self._down.here():
            _host(parcel.host, parcel.nbytes).copy_(_bytes(parcel.device, self.device), non_blocking=True)
        parcel.down, parcel.stream, parcel.settled = self._down.mark(), self._compute.stream, False
        self.moved = self.moved._replace(down=self.moved.down + parcel.nbytes)
        if disk:
            self._shelve(parcel)
        self._flying.append(parcel)
        self._here = self._here._replace(nbytes=self._here.nbytes + parcel.nbytes)

    def _shelve(self, parcel: _Parcel) -> None:
        slot, parcel.host = parcel.host, None
        assert slot is not None
        parcel.shelf = self.shelves.take(parcel.nbytes)
        down = parcel.down
        after = down.synchronize if down is not None else None
        done = parcel.shelf.piece.write(parcel.shelf.offset, _host(slot, parcel.nbytes), after)
        self._busy.append((slot, done.done, done.exception))  # a write that failed is raised by the read

    def _land(self, parcel: _Parcel) -> None:
        """Let the device's copy go: whoever gets its memory computes after the copy down."""
        self._landed += parcel.nbytes
        if parcel.device is None or parcel.wanted:
            return
        parcel.changed()
        parcel.free()

    # ------------------------------------------------------------ up

    def _enter(self, call: _Call, _: Any) -> None:
        """Backward has come to a block. Those before it come up: the next one, and as many more as kept ones are done."""
        if call.entered:
            return
        call.entered = True
        with self._work():
            self._turned = True
            self._credit += call.mode in ("keep", HOST, DISK)
            if call.number in self._calls:
                self._bring_call(call)
                self._bring_next(call)
            elif call.number - 1 in self._calls:
                self._bring_call(self._calls[call.number - 1])
            while self._credit > 0 and self._bring_next(call):
                pass

    def _bring_next(self, call: _Call) -> bool:
        numbers = [number for number, one in self._calls.items() if number < call.number and not one.begun]
        if numbers:
            self._bring_call(self._calls[max(numbers)])
        return bool(numbers)

    def _bring_call(self, call: _Call) -> None:
        if not call.begun:
            call.begun = True
            self._credit -= 1
        for parcel in reversed(call.parcels):
            if parcel.tickets:
                self._bring(parcel)

    def _bring(self, parcel: _Parcel) -> None:
        if parcel.device is not None:
            if not parcel.wanted and not parcel.settled:
                self.moved = self.moved._replace(forwarded=self.moved.forwarded + parcel.nbytes)
            parcel.wanted = True
            return
        there = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device)  # compute's memory, free from here on
        parcel.device, parcel.stream = there.untyped_storage(), self._compute.stream
        parcel.wanted, parcel.settled = True, False
        self.moved = self.moved._replace(up=self.moved.up + parcel.nbytes)
        free = self._compute.mark()
        if parcel.shelf is not None:
            self._unshelve(parcel, there, free)
            return
        assert parcel.host is not None
        self._up.wait(free)
        self._up.wait(parcel.down)
        with self._up.here():
            there.copy_(_host(parcel.host, parcel.nbytes), non_blocking=True)
        parcel.up = self._last_up = self._up.mark()

    def _unshelve(self, parcel: _Parcel, there: Tensor, free: Mark) -> None:
        """From disk to host memory, and from there up, by the thread that has read it."""
        slot, lifted = self._bounce(parcel.nbytes), threading.Event()
        parcel.lifted = lifted
        source = _host(slot, parcel.nbytes)

        def lift(done: Any) -> None:
            try:
                done.result()
                self._up.wait(free)
                with self._up.here():
                    there.copy_(source, non_blocking=True)
                parcel.up = self._up.mark()
            except BaseException as error:
                parcel.error = error
            lifted.set()

        def wait() -> None:
            lifted.wait()
            if parcel.up is not None:
                parcel.up.synchronize()

        assert parcel.shelf is not None
        self._busy.append((slot, lambda: lifted.is_set() and passed(parcel.up), wait))
        parcel.shelf.piece.read(parcel.shelf.offset, source).add_done_callback(lift)

    def _bounce(self, nbytes: int) -> Slot[_Host]:
        """Host memory to pass through: where there is none free, that of the transfer that was asked for first."""
        while True:
            while self._busy and self._busy[0][1]():
                self.bounces.give(self._busy.popleft()[0])
            found = self.bounces.room(nbytes)
            if found is not None or not self._busy:
                return found or self.bounces.take(nbytes)
            slot, _, wait = self._busy.popleft()
            wait()
            self.bounces.give(slot)

    # ------------------------------------------------------------ what is not needed any more

    def _gone(self, parcel: _Parcel, call: _Call) -> None:
        """A ticket is gone; this may be anywhere, also in the middle of our own work."""
        self._dead.append((parcel, call))
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    @contextmanager
    def _work(self) -> Iterator[None]:
        with self._lock:
            try:
                self._sweep()
                yield
            finally:
                self._sweep()

    def _sweep(self) -> None:
        while self._dead:
            parcel, call = self._dead.popleft()
            parcel.tickets -= 1
            call.tickets -= 1
            if not call.tickets:
                self._calls.pop(call.number, None)
            if not parcel.tickets:
                self._bury(parcel)
        while self._late and self._late[0].lifted is not None and self._late[0].lifted.is_set():
            self._late.popleft().free()

    def _bury(self, parcel: _Parcel) -> None:
        if self._known.get(parcel.seen.cdata) is parcel:
            del self._known[parcel.seen.cdata]
        if parcel.host is not None:
            self.hosts.give(parcel.host)
            parcel.host = None
        if parcel.shelf is not None:
            self.shelves.give(parcel.shelf)
            parcel.shelf = None
        if parcel.lifted is None or parcel.lifted.is_set():
            parcel.free()
        else:
            self._late.append(parcel)

    def settle(self) -> None:
        """Nothing is under way any more."""
        with self._work():
            while self._flying:
                self._land(self._flying.popleft())
            while self._busy:
                slot, _, wait = self._busy.popleft()
                wait()
                self.bounces.give(slot)

    def close(self) -> None:
        """Give host memory and files back; what autograd still has of them cannot be differentiated any more."""
        self.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for slots in (self.hosts, self.bounces, self.shelves):
            slots.close()


def attach(model: nn.Module, blocks: Mapping[str, Residency], device: torch.device, shelf: Callable[[int], Shelf] | None = None) -> Saved | None:
    """Move the activations of those of these blocks that say so; None where none does."""
    modes = {path: residency.mode for path, residency in blocks.items()}
    return Saved(model, modes, device, shelf=shelf, least=LEAST) if {HOST, DISK} & set(modes.values()) else None


def _no_shelf(nbytes: int) -> Any:
    raise AssertionError(f"there is no folder for {nbytes} bytes of activations")


def _stay(tensor: Tensor) -> _Stay:
    return _Stay(tensor if isinstance(tensor, nn.Parameter) else tensor.detach(), tensor._version)


def _key(tensor: Tensor) -> int:
    """What names a storage while it lives; tensors that have none of their own are never moved."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _host(slot: Slot[_Host], nbytes: int) -> Tensor:
    return slot.piece.bytes[slot.offset : slot.offset + nbytes]


def _watch(outputs: Any, entered: Callable[[Any], None]) -> None:
    """Be told when backward comes to what made the first of these tensors that can be differentiated."""
    for value in pytree.tree_leaves(outputs):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(entered)
            return


def _overwritten(dtype: torch.dtype, shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor that backward needs was modified by an in-place operation: {dtype} of shape {tuple(shape)}, saved in a block whose "
        "activations are moved; autograd refuses the same without moving"
    )
