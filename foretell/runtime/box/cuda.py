"""Stand-ins on a GPU: kernels that have the cores, the memory traffic and the duration of NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.box.script import BoxScript
from foretell.runtime.box.stand_ins import ACTIVATION, NS, DoneWork, Later, drawn, tiled

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_FILL_BLOCKS = 8
"""Of a message between two ranks: NCCL's channels for one peer. Assumed."""
_ALL_BLOCKS = 128
"""Where messages are to take no time, what is received is filled by as many as a GPU has cores, about."""


class OnCuda:
    """Messages of one GPU."""

    def __init__(self, script: BoxScript, device: torch.device) -> None:
        try:
            from foretell.runtime.box import kernels
        except ImportError as error:
            raise UserError(f"a box on a GPU needs Triton, and it cannot be imported: {error}", "pip install triton, or use --device cpu") from error
        self.device, self.kernels = device, kernels
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._ended: dict[str, tuple[str, torch.cuda.Event]] = {}
        """Message that was sent in this step → its line, and the event after it."""
        self._seed = 0
        self.script = script

    @property
    def script(self) -> BoxScript:
        return self._script

    @script.setter
    def script(self, script: BoxScript) -> None:
        """Times of arrivals go to the device once."""
        self._script, told = script, script.arrivals
        self._places = {name: place for place, name in enumerate(told.sends, 1)}
        self._rows = {name: place for place, name in enumerate(("", *told.receives))}
        self._stamps = self._delays = None
        if told.sends or told.receives:
            chains = [told.end, *told.receives.values()]
            table = [[-1 if delay is None else round(delay * NS) for delay in row] for row in chains]
            self._stamps = torch.zeros(1 + len(told.sends), dtype=torch.int64, device=self.device)
            self._delays = torch.tensor(table, dtype=torch.int64, device=self.device)
            self._wide = max(16, 1 << len(told.sends).bit_length())

    def begin_step(self) -> None:
        self._ended.clear()
        if self._stamps is not None:
            self.kernels.note[(1,)](self._stamps, num_warps=1)

    # ------------------------------------------------------------ messages

    def gather(self, line: str, target: Tensor, source: Tensor, seconds: float, now: bool) -> dist._Work:
        copies = target.numel() // max(1, source.numel())
        plain = target.is_contiguous() and source.is_contiguous() and copies and target.numel() == copies * source.numel()
        if not plain:
            return self._run(line, lambda: self._slowly(lambda: tiled(target, source), seconds), (target, source), now)
        given, taken = _as_words(source, target)
        return self._run(line, lambda: self._spread(given, taken, copies, target.nbytes, seconds), (target, source), now)

    def reduce(self, line: str, target: Tensor, source: Tensor, mean: bool, seconds: float, now: bool) -> dist._Work:
        pieces, count = source.numel() // max(1, target.numel()), target.numel()
        own = source.detach().reshape(-1)[:count]
        if not (target.is_contiguous() and source.is_contiguous() and target.is_floating_point()):
            return self._run(line, lambda: self._slowly(lambda: tiled(target, own), seconds), (target, source), now)
        if self.script.free:
            given, taken = _as_words(own, target)
            return self._run(line, lambda: self._spread(given, taken, 1, target.nbytes, 0.0), (target, source), now)

        def added() -> None:
            blocks, scale = self.script.channels(source.nbytes), 1.0 / pieces if mean else 1.0
            self.kernels.add_up[(blocks,)](
                source.detach(), target.detach(), count, pieces, scale, round(seconds * NS), BLOCK=self.kernels.BLOCK, num_warps=self.kernels.WARPS
            )

        return self._run(line, added, (target, source), now)

    def keep(self, line: str, tensors: Sequence[Tensor], seconds: float, now: bool, *, ends: bool = False) -> dist._Work:
        def kept() -> None:
            if ends:
                self._arrive("")
            if self.script.free:
                return
            each = seconds / max(1, len(tensors))
            for tensor in tensors:
                if tensor.is_contiguous() and tensor.numel():
                    (words,) = _as_words(tensor)
                    self._spread(words, words, 1, tensor.nbytes, each)
                else:
                    self._hold(each)

        return self._run(line, kept, tensors, now)

    def send(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        stamp = self._stamps[self._places[name]] if self._stamps is not None and name in self._places else None

        def sent() -> None:
            if stamp is None:
                self._hold(seconds)
            else:
                (words,) = _as_words(tensor)
                free = self.script.free
                self.kernels.leave[(1 if free else min(_FILL_BLOCKS, self.script.channels(tensor.nbytes)),)](
                    words, stamp, 0 if free else words.numel(), round(seconds * NS), BLOCK=self.kernels.BLOCK, num_warps=self.kernels.WARPS
                )

        work = self._run(line, sent, (tensor,), False)
        if stamp is not None:
            event = torch.cuda.Event()
            event.record(self._streams[line])
            self._ended[name] = (line, event)
        return work

    def receive(self, line: str, tensor: Tensor, seconds: float, name: str) -> dist._Work:
        def filled() -> None:
            if not tensor.is_floating_point() or not tensor.is_contiguous():
                drawn(tensor)
                return
            self._seed += 1
            blocks = max(1, min(_ALL_BLOCKS // 2, tensor.numel() // self.kernels.BLOCK))  # soon done: numbers take long to draw
            self.kernels.normal[(blocks,)](
                tensor.detach(), tensor.numel(), self._seed, ACTIVATION, BLOCK=self.kernels.BLOCK, num_warps=self.kernels.WARPS
            )

        if name not in self._rows or not name:
            return self._run(line, lambda: self._slowly(filled, seconds), (tensor,), False)
        work = self._run(line, filled, (tensor,), False)

        def come() -> None:
            work.wait()
            self._arrive(name)

        return Later(come, (tensor,))

    # ------------------------------------------------------------ kernels

    def _run(self, line: str, launch: Callable[[], None], held: Sequence[Tensor], now: bool) -> dist._Work:
        """Launch on the line's own stream, after all that the caller's stream has done; or on the caller's, where it waits."""
        if now:
            launch()
            return DoneWork()
        stream = self._streams.get(line)
        if stream is None:
            stream = self._streams[line] = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            launch()
            event.record(stream)
        return Later(lambda: torch.cuda.current_stream(self.device).wait_event(event), held)

    def _spread(self, given: Tensor, taken: Tensor, copies: int, nbytes: int, seconds: float) -> None:
        blocks = _ALL_BLOCKS if self.script.free else self.script.channels(nbytes)
        self.kernels.spread[(blocks,)](
            given, taken, given.numel(), copies, round(seconds * NS), BLOCK=self.kernels.BLOCK, num_warps=self.kernels.WARPS
        )

    def _slowly(self, fill: Callable[[], None], seconds: float) -> None:
        """Fill by an ordinary op, then take the time."""
        fill()
        self._hold(seconds)

    def _hold(self, seconds: float) -> None:
        if seconds > 0:
            self.kernels.hold[(1,)](round(seconds * NS), num_warps=1)

    def _arrive(self, name: str) -> None:
        """The current stream waits until a message is there. What it depends on was sent before anyone waits for it, so that
        nothing here can wait for what comes later."""
        row = self._rows.get(name)
        if self._stamps is None or self._delays is None or row is None:
            return
        chains = self.script.arrivals.end if not name else self.script.arrivals.receives[name]
        last: dict[str, Any] = {}
        for sent, delay in zip(self.script.arrivals.sends, chains[1:], strict=True):
            if delay is not None and sent in self._ended:
                line, event = self._ended[sent]
                last[line] = event
        stream = torch.cuda.current_stream(self.device)
        for event in last.values():
            stream.wait_event(event)
        self.kernels.arrive[(1,)](self._stamps, self._delays[row], self._stamps.numel(), BLOCK=self._wide, num_warps=1)


def _as_words(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors as rows of the largest whole numbers that all of them consist of."""
    for kind in _WORDS:
        size = kind.itemsize
        if all(t.nbytes % size == 0 and t.data_ptr() % size == 0 and (t.storage_offset() * t.element_size()) % size == 0 for t in tensors):
            return [t.detach().view(-1).view(kind) for t in tensors]
    raise AssertionError("every tensor consists of bytes")
