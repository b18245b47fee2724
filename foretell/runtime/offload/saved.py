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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from foretell.plan.types import Residency, moved_to
from foretell.runtime.offload import parcels
from foretell.runtime.offload.lanes import Lane, Mark, passed
from foretell.runtime.offload.memory.arena import bytes_for
from foretell.runtime.offload.memory.slots import MemorySlot, Slots
from foretell.runtime.offload.parcels import (
    ArenaBytes,
    BlockCall,
    DiskFileLike,
    Moved,
    Parcel,
    Round,
    Stay,
    Ticket,
    bytes_of,
    key_of,
    overwritten,
    part,
    stay,
)

HOST, DISK = "host", "disk"
LEAST = 2**20
"""Bytes of a storage that is worth moving."""
GROW = 256 * 2**20
"""Least bytes of host memory that are made at a time, where the first block did not tell how many are needed."""
AHEAD = 1.25
"""Of what a block saves, how much is on the device in backward: what is still wanted of one block, and the beginning of the next."""


class OffloadedActivations:
    """The activations of some blocks of a model."""

    def __init__(
        self, model: nn.Module, modes: Mapping[str, str], device: torch.device, *, shelf: Callable[[int], DiskFileLike] | None = None,
        least: int = LEAST, grow: int = GROW, lanes: tuple[Lane, Lane, Lane] | None = None,
    ) -> None:  # fmt: skip
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.least = device, max(least, 1)
        self._compute, self._down, self._up = lanes or (Lane(device, compute=True), Lane(device), Lane(device))
        self._model = model
        self._tables: list[Tensor] | None = None
        """The model's larger buffers: blocks may be given them, and they stay where they are."""
        self.hosts: Slots[ArenaBytes] = Slots(lambda n: ArenaBytes(n, register=device.type == "cuda"), least=grow)
        self.bounces: Slots[ArenaBytes] = Slots(lambda n: ArenaBytes(n, register=device.type == "cuda"), least=grow, one=False)
        self.shelves: Slots[Any] = Slots(shelf or _no_shelf, least=grow, one=False)
        self._known: dict[int, Parcel] = {}
        self._calls: dict[int, BlockCall] = {}
        self._number = 0
        self._unsent: list[Parcel] = []
        self._flying: deque[Parcel] = deque()
        self._busy: deque[tuple[MemorySlot[ArenaBytes], Callable[[], bool], Callable[[], object]]] = deque()
        """Host memory that bytes pass through on their way to or from disk: whether they have, and waiting until then."""
        self._largest = 0
        self._here = self._usual = Round(0, 0, 0)
        """This time so far, and the last time."""
        self._landed = 0
        self._turned = False
        self._level = self._at = self._up_bytes = 0
        self._done, self._ahead = -1, 0.0
        self._last_up: Mark = None
        self._lock = threading.Lock()
        self._dead: deque[tuple[Parcel, BlockCall]] = deque()
        self._late: deque[Parcel] = deque()
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

    def _begin(self, block: nn.Module, mode: str) -> BlockCall:
        with self._work():
            if self.hosts.loose():
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.hosts.tighten()
            if self._turned and not self._calls:
                self._usual, self._here, self._landed, self._turned = self._here, Round(0, 0, 0), 0, False
                self._flying.clear()  # backward has taken them as they were
            self._number += 1
            here = self._here
            self._here = here._replace(calls=here.calls + 1, kept=here.kept + (mode == "keep"))
            if self._tables is None:
                self._tables = [one for one in self._model.buffers() if one.nbytes >= self.least]
            held = (*block.parameters(), *block.buffers(), *self._tables) if mode in (HOST, DISK) else ()
            return BlockCall(self._number, self._here.calls, mode, frozenset(key_of(one) for one in held))

    def _end(self, call: BlockCall) -> None:
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

    def _pace(self, call: BlockCall) -> None:
        """Wait for what should have gone by now: as if it went evenly until forward is over, and so that no more is on its way than
        kept blocks will need later. Until a first step has shown how much there is, for all but the last block's."""
        usual = self._usual
        share = min(1.0, (call.place - 1) / max(1, usual.calls - 1)) if usual.calls else 1.0
        room = self._largest * max(1, usual.kept - self._here.kept - 1)
        due = max(usual.nbytes * share, self._here.nbytes - room) if usual.calls else float("inf")
        while self._flying and self._flying[0].call is not call and self._landed < due:
            self._land(self._flying.popleft())

    # ------------------------------------------------------------ what autograd saves

    def _pack(self, call: BlockCall, tensor: Tensor) -> Stay | Ticket:
        if type(tensor) is not Tensor or tensor.device != self.device or tensor.layout is not torch.strided:
            return stay(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.least or storage._cdata in call.stays or isinstance(tensor._base, nn.Parameter):
            return stay(tensor)
        if tensor.is_conj() or tensor.is_neg():
            return stay(tensor)
        with self._work():
            parcel = self._parcel(call, tensor, storage)
            self._calls[call.number] = call
            call.parcels[parcel] = None
            return Ticket(parcel, call, tensor, self._gone)

    def _parcel(self, call: BlockCall, tensor: Tensor, storage: torch.UntypedStorage) -> Parcel:
        known = self._known.get(storage._cdata)
        if known is not None and known.holds(tensor):
            return known
        parcel = Parcel(tensor, storage, call)
        self._known[parcel.seen.cdata] = parcel
        call.nbytes += parcel.nbytes
        call.room += bytes_for([parcel.nbytes])
        if (self.hosts if call.mode == HOST else self.shelves).pieces:
            self._send(parcel)
        else:
            self._unsent.append(parcel)
        return parcel

    def _unpack(self, packed: Stay | Ticket) -> Tensor:
        if isinstance(packed, Stay):
            if packed.tensor._version != packed.version:
                raise overwritten(packed.tensor.dtype, packed.tensor.shape)
            return packed.tensor
        parcel = packed.parcel
        with self._work():
            if parcel.device is None:
                self._bring(parcel)
            parcel.wanted = True
            self._pump()
            if parcel.changed():
                raise overwritten(packed.type, packed.shape)
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

    def _send(self, parcel: Parcel) -> None:
        disk = parcel.call.mode == DISK
        parcel.host = self._bounce(parcel.nbytes) if disk else self.hosts.take(parcel.nbytes)
        assert parcel.device is not None
        self._down.wait(self._compute.mark())
        self._down.wait(self._last_up)  # of whatever was in this host memory before
        parcel.down = parcels.copy(self._down, part(parcel.host, parcel.nbytes), bytes_of(parcel.device, self.device))
        parcel.stream, parcel.settled = self._compute.stream, False
        self.moved = self.moved._replace(down=self.moved.down + parcel.nbytes)
        if disk:
            self._shelve(parcel)
        self._flying.append(parcel)
        self._here = self._here._replace(nbytes=self._here.nbytes + parcel.nbytes)

    def _shelve(self, parcel: Parcel) -> None:
        slot, parcel.host = parcel.host, None
        assert slot is not None
        parcel.shelf = self.shelves.take(parcel.nbytes)
        down = parcel.down
        after = down.synchronize if down is not None else None
        done = parcel.shelf.piece.write(parcel.shelf.offset, part(slot, parcel.nbytes), after)
        self._busy.append((slot, done.done, done.exception))  # a write that failed is raised by the read

    def _land(self, parcel: Parcel) -> None:
        """Let the device's copy go: whoever gets its memory computes after the copy down."""
        self._landed += parcel.nbytes
        if parcel.device is None or parcel.wanted:
            return
        parcel.changed()
        parcel.free()

    # ------------------------------------------------------------ up

    def _enter(self, call: BlockCall, _: Any) -> None:
        """Backward has come to a block: what it and those before it saved comes up."""
        if call.entered:
            return
        call.entered = True
        with self._work():
            if not self._turned:
                self._turned, self._level, self._done = True, self._used(), -1
            self._done += call.mode == "keep"
            self._at = call.number
            self._ahead = AHEAD * self._largest if {call.number, call.number - 1} & self._calls.keys() else 0.0
            self._pump()

    def _pump(self) -> None:
        """Bring up what is wanted next: of the blocks at hand a little more than one of them saved, and beyond that as much as keeps
        memory below what it was when backward came to the first block."""
        for number in sorted((number for number in self._calls if number <= self._at), reverse=True):
            call = self._calls[number]
            if call.begun:
                continue
            for parcel in reversed(call.parcels):
                if parcel.wanted or not parcel.tickets:
                    continue
                if parcel.device is None and not self._room(parcel.nbytes):
                    return
                self._bring(parcel)
            call.begun = True

    def _room(self, nbytes: int) -> bool:
        if self._ahead and not self._up_bytes:
            return True
        wanted = self._up_bytes + nbytes
        return wanted <= self._ahead or wanted <= self._ahead + self._spare()

    def _spare(self) -> float:
        """Bytes that kept blocks have given back and nothing has taken; a CPU's allocator does not tell, there it is what they saved."""
        if self.device.type != "cuda":
            return max(0, self._done) * self._largest
        return max(0, self._level - self._used()) + max(0.0, self._up_bytes - self._ahead)

    def _used(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"])

    def _bring(self, parcel: Parcel) -> None:
        if parcel.device is not None:
            if not parcel.wanted and not parcel.settled:
                self.moved = self.moved._replace(forwarded=self.moved.forwarded + parcel.nbytes)
            parcel.wanted = True
            return
        there = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device)  # compute's memory, free from here on
        parcel.device, parcel.stream = there.untyped_storage(), self._compute.stream
        parcel.wanted, parcel.settled = True, False
        self._up_bytes += parcel.nbytes
        self.moved = self.moved._replace(up=self.moved.up + parcel.nbytes)
        free = self._compute.mark()
        if parcel.shelf is not None:
            self._unshelve(parcel, there, free)
            return
        assert parcel.host is not None
        self._up.wait(free)
        self._up.wait(parcel.down)
        parcel.up = self._last_up = parcels.copy(self._up, there, part(parcel.host, parcel.nbytes))

    def _unshelve(self, parcel: Parcel, there: Tensor, free: Mark) -> None:
        """From disk to host memory, and from there up, by the thread that has read it."""
        slot, lifted = self._bounce(parcel.nbytes), threading.Event()
        parcel.lifted = lifted
        source = part(slot, parcel.nbytes)

        def lift(done: Any) -> None:
            try:
                done.result()
                self._up.wait(free)
                parcel.up = parcels.copy(self._up, there, source)
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

    def _bounce(self, nbytes: int) -> MemorySlot[ArenaBytes]:
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

    def _gone(self, parcel: Parcel, call: BlockCall) -> None:
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

    def _bury(self, parcel: Parcel) -> None:
        if self._known.get(parcel.seen.cdata) is parcel:
            del self._known[parcel.seen.cdata]
        if parcel.host is not None:
            self.hosts.give(parcel.host)
            parcel.host = None
        if parcel.shelf is not None:
            self.shelves.give(parcel.shelf)
            parcel.shelf = None
        if parcel.device is not None and parcel.alias is None:
            self._up_bytes -= parcel.nbytes
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


def attach(
    model: nn.Module, blocks: Mapping[str, Residency], device: torch.device, shelf: Callable[[int], DiskFileLike] | None = None
) -> OffloadedActivations | None:
    """Move the activations of those of these blocks that say so; None where none does."""
    modes = {path: moved_to(residency.mode) for path, residency in blocks.items()}
    return OffloadedActivations(model, modes, device, shelf=shelf, least=LEAST) if {HOST, DISK} & set(modes.values()) else None


def _no_shelf(nbytes: int) -> Any:
    raise AssertionError(f"there is no folder for {nbytes} bytes of activations")


def _watch(outputs: Any, entered: Callable[[Any], None]) -> None:
    """Be told when backward comes to what made the first of these tensors that can be differentiated."""
    for value in pytree.tree_leaves(outputs):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.grad_fn.register_prehook(entered)
            return
