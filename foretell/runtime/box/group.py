"""The process group of a box: as many ranks as the plan has, of which one is here.

PyTorch asks a process group that is written in Python by its methods: `torch.distributed`, FSDP2 and DTensor call them, functional
collectives reach them through the group's name, and pipelines through send and recv. Names differ between PyTorch 2.11 and 2.13
(`_allgather_base` became `all_gather_single`); both are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.errors import InternalError
from foretell.price.network.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, P2P, REDUCE_SCATTER
from foretell.runtime.box.script import BoxMessage, BoxScript
from foretell.runtime.box.stand_ins import DoneWork, OnCpu, StandIns, drawn, tiled
from foretell.runtime.parallel.ranks import BOX

SEND, RECEIVE = "send", "receive"


class BoxState:
    """What all groups of a box share."""

    def __init__(self, script: BoxScript, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            from foretell.runtime.box.cuda import OnCuda

            self.stand_ins: StandIns = OnCuda(script, device)
        else:
            self.stand_ins = OnCpu(script)
        self.names: dict[int, str] = {}
        """Tensor that is about to be sent or received → the message it is, of a pipeline."""
        self.messages: list[BoxMessage] = []
        self.recording = False

    def name(self, tensor: Tensor, message: str) -> None:
        self.names[id(tensor)] = message

    def seconds(self, operation: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        script = self.stand_ins.script
        asked = P2P if operation in (SEND, RECEIVE) else operation
        found = 0.0 if script.free else script.seconds(asked, nbytes, ranks)
        if self.recording:
            self.messages.append(BoxMessage(operation, nbytes, ranks, found))
        return found

    @contextmanager
    def recorded(self) -> Iterator[list[BoxMessage]]:
        """Every message, in order."""
        self.messages, self.recording = [], True
        try:
            yield self.messages
        finally:
            self.recording = False


_open: list[BoxState] = []
"""The box of this process, while there is one: PyTorch makes groups by a function that knows of none."""


@contextmanager
def opened(script: BoxScript, device: torch.device, rank: int, world: int) -> Iterator[BoxState]:
    """A box in which this process is one rank of many; `torch.distributed` is initialised, and is not afterwards."""
    if dist.is_initialized():
        raise InternalError("a box needs a process without a process group")
    if not hasattr(dist.Backend, BOX.upper()):
        dist.Backend.register_backend(BOX, _made, devices=["cpu", "cuda"])
    box = BoxState(script, device)
    _open.append(box)
    try:
        dist.init_process_group(BOX, store=dist.HashStore(), rank=rank, world_size=world)
        yield box
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):  # there is nobody to part from
                dist.destroy_process_group()
        _open.remove(box)


def _made(store: Any, rank: int, size: int, timeout: Any) -> BoxGroup:
    return BoxGroup(rank, size, _open[-1])


class BoxGroup(dist.ProcessGroup):
    """Some ranks of a box."""

    def __init__(self, rank: int, size: int, box: BoxState) -> None:
        super().__init__(rank, size)
        self.box = box
        self._known: tuple[int, ...] | None = None

    def getBackendName(self) -> str:
        return BOX

    @property
    def ranks(self) -> tuple[int, ...]:
        if self._known is None:
            self._known = tuple(dist.get_process_group_ranks(self))
        return self._known

    @property
    def group_name(self) -> str:
        """By which functional collectives find the group: PyTorch keeps it beside a group that is written in Python."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def line(self) -> str:
        return self.group_name

    def _elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Tensors that are not on the device of the box: small words on the host of a GPU, which take no time."""
        return any(tensor.device.type != self.box.device.type for tensor in tensors)

    # ------------------------------------------------------------ gathering and scattering

    def _gathered(self, target: Tensor, source: Tensor, opts: Any) -> dist._Work:
        seconds = self.box.seconds(ALL_GATHER, target.nbytes, self.ranks)
        if self._elsewhere((target, source)):
            tiled(target, source)
            return DoneWork()
        return self.box.stand_ins.gather(self.line, target, source, seconds, _waits(opts))

    def all_gather_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist._Work:
        return self._gathered(target, source, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, targets: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist._Work:
        return _last([self._gathered(target, source, opts) for target, source in zip(targets, sources, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, targets: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> dist._Work:
        """Lists of tensors: a piece each."""
        self.box.seconds(ALL_GATHER, sum(tensor.nbytes for pieces in targets for tensor in pieces), self.ranks)
        for pieces, source in zip(targets, sources, strict=True):
            for piece in pieces:
                tiled(piece, source)
        return DoneWork()

    def _scattered(self, target: Tensor, source: Tensor, opts: Any) -> dist._Work:
        seconds = self.box.seconds(REDUCE_SCATTER, source.nbytes, self.ranks)
        if self._elsewhere((target, source)):
            tiled(target, source.reshape(-1)[: target.numel()])
            return DoneWork()
        return self.box.stand_ins.reduce(self.line, target, source, _is_mean(opts), seconds, _waits(opts))

    def reduce_scatter_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist._Work:
        return self._scattered(target, source, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, targets: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist._Work:
        return _last([self._scattered(target, source, opts) for target, source in zip(targets, sources, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, targets: list[Tensor], sources: list[list[Tensor]], opts: Any = None) -> dist._Work:
        self.box.seconds(REDUCE_SCATTER, sum(tensor.nbytes for pieces in sources for tensor in pieces), self.ranks)
        for target, pieces in zip(targets, sources, strict=True):
            target.detach().copy_(pieces[self.rank()])
        return DoneWork()

    # ------------------------------------------------------------ in place

    def _kept(self, operation: str, tensors: Sequence[Tensor], opts: Any) -> dist._Work:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        seconds = self.box.seconds(operation, nbytes, self.ranks)
        if self._elsewhere(tensors):
            return DoneWork()
        everyone = len(self.ranks) == dist.get_world_size()
        return self.box.stand_ins.keep(self.line, tensors, seconds, _waits(opts), ends=everyone and operation == ALL_REDUCE)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        return self._kept(ALL_REDUCE, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        return self._kept(ALL_REDUCE, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        return self._kept(ALL_REDUCE, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist._Work:
        """What this rank has stands for what the first one has."""
        return self._kept(BROADCAST, tensors, opts)

    def barrier(self, opts: Any = None) -> dist._Work:
        return DoneWork()

    def scatter(self, targets: list[Tensor], sources: list[list[Tensor]], opts: Any = None) -> dist._Work:
        if sources:
            for target, pieces in zip(targets, sources, strict=True):
                target.detach().copy_(pieces[self.rank()])
        return DoneWork()

    def gather(self, targets: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> dist._Work:
        return self.allgather(targets, sources, opts) if targets else DoneWork()

    # ------------------------------------------------------------ all to all, one to one

    def all_to_all_single(
        self, target: Tensor, source: Tensor, taken: list[int] | None = None, given: list[int] | None = None, opts: Any = None
    ) -> dist._Work:
        """What goes out comes back: others are taken to send what this rank sends."""
        seconds = self.box.seconds(ALL_TO_ALL, max(target.nbytes, source.nbytes), self.ranks)
        if self._elsewhere((target, source)):
            tiled(target, source)
            return DoneWork()
        return self.box.stand_ins.gather(self.line, target, source, seconds, _waits(opts))

    alltoall_base = all_to_all_single

    def alltoall(self, targets: list[Tensor], sources: list[Tensor], opts: Any = None) -> dist._Work:
        for target, source in zip(targets, sources, strict=True):
            if target.numel():
                tiled(target, source) if source.numel() else drawn(target)
        return DoneWork()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist._Work:
        (tensor,) = tensors
        seconds, name = self.box.seconds(SEND, tensor.nbytes, self.ranks), self.box.names.pop(id(tensor), "")
        if self._elsewhere(tensors):
            return DoneWork()
        return self.box.stand_ins.send(f"{self.line} to {to}", tensor, seconds, name)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist._Work:
        (tensor,) = tensors
        seconds, name = self.box.seconds(RECEIVE, tensor.nbytes, self.ranks), self.box.names.pop(id(tensor), "")
        if self._elsewhere(tensors):
            drawn(tensor)
            return DoneWork()
        return self.box.stand_ins.receive(f"{self.line} from {source}", tensor, seconds, name)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist._Work:
        return self.recv(tensors, (self.rank() + 1) % self.size(), tag)


class _All(DoneWork):
    """Several at once."""

    def __init__(self, works: Sequence[dist._Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


def _last(works: list[dist._Work]) -> dist._Work:
    return works[0] if len(works) == 1 else _All(works)


def _waits(opts: Any) -> bool:
    """Whether the caller waits for it at once; then it runs on the caller's stream."""
    return not getattr(opts, "asyncOp", True)


def _is_mean(opts: Any) -> bool:
    op = getattr(opts, "reduceOp", None)
    return op is not None and (op == dist.ReduceOp.AVG or getattr(op, "op", None) == dist.ReduceOp.AVG)
