"""Updates on the CPU: a thread for each core, none of which uses more than one.

Gradients come in the model's format and are widened run by run into memory that stays in the core's cache; the new
weights take the gradients' place, ready to be sent up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from foretell.runtime.offload.forms import MASTER, Form, Run, Settings, update
from foretell.runtime.offload.lanes import Mark
from foretell.runtime.offload.layout import Piece

RUN = 2**20
"""Elements that one thread updates at a time."""
SPARE = 2
"""Cores left to launching kernels and to everything else."""


class Workers:
    """Threads that update chunks in the order they were asked for."""

    def __init__(self, form: Form, threads: int | None = None) -> None:
        self.form = form
        count = threads or max(1, (os.cpu_count() or 1) - SPARE)
        self._own = threading.local()
        before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="foretell-update", initializer=torch.set_num_threads, initargs=(1,))
        list(self._pool.map(lambda _: None, range(count)))
        torch.set_num_threads(before)
        self._told: tuple[float | None, bool] | None = None
        self._lock = threading.Lock()

    @property
    def skipped(self) -> bool:
        """Whether the last update changed nothing."""
        return self._known()[1]

    def expect(self, scale: Tensor | None, skip: Tensor | None, device: torch.device, mark: Callable[[], Mark]) -> None:
        """What the coming chunks are scaled by, read when the device has computed it."""
        factor = scale if scale is not None else torch.ones(1, device=device)
        both = torch.cat([factor, skip.reshape(1) if skip is not None else torch.zeros(1, device=device)])
        there = torch.empty(2, pin_memory=both.is_cuda)
        there.copy_(both, non_blocking=True)
        self._asked = (there, mark(), scale is not None)
        self._told = None

    def _known(self) -> tuple[float | None, bool]:
        with self._lock:
            if self._told is None:
                there, mark, scaled = self._asked
                if mark is not None:
                    mark.synchronize()
                self._told = (float(there[0]) if scaled else None, bool(there[1] > 0))
            return self._told

    def submit(
        self, pieces: Sequence[Piece], staged: Tensor, kept: Mapping[str, Tensor], steps: Mapping[str, int], settings: Settings,
        here: Mark, arrive: Callable[[], Mark],
    ) -> Future[Mark]:  # fmt: skip
        """Update a chunk once its gradients are `here`; the last thread calls `arrive`. Gives its mark."""
        answer: Future[Mark] = Future()
        runs = [(piece, at, min(RUN, piece.elements - at)) for piece in pieces for at in range(0, piece.elements, RUN)]
        left = [len(runs)]

        def one(piece: Piece, at: int, elements: int) -> None:
            try:
                if here is not None:
                    here.synchronize()
                scale, skip = self._known()
                if not skip:
                    begin = piece.at + at
                    self._run(staged[begin : begin + elements], {n: t[begin : begin + elements] for n, t in kept.items()},
                              steps[piece.name], settings, scale)  # fmt: skip
                else:
                    self._unchanged(staged, kept, piece.at + at, elements)
                with self._lock:
                    left[0] -= 1
                    last = left[0] == 0
                if last:
                    answer.set_result(arrive())
            except BaseException as error:  # told where the chunk is waited for
                if not answer.done():
                    answer.set_exception(error)

        if not runs:
            answer.set_result(None)
        for run in runs:
            self._pool.submit(one, *run)
        return answer

    @torch.no_grad()
    def _run(self, staged: Tensor, kept: Mapping[str, Tensor], step: int, settings: Settings, scale: float | None) -> None:
        wide = getattr(self._own, "wide", None)
        if wide is None:
            wide = self._own.wide = torch.empty(RUN, dtype=torch.float32)
        factor = torch.tensor([scale]) if scale is not None else None
        weight = torch.empty_like(staged)
        run = Run(weight=weight, grad=staged, kept=kept, step=torch.tensor(float(step)))
        update(self.form, [run], wide, settings, scale=factor, skip=None)
        staged.copy_(weight)

    def _unchanged(self, staged: Tensor, kept: Mapping[str, Tensor], begin: int, elements: int) -> None:
        end = begin + elements
        staged[begin:end].copy_(kept[MASTER][begin:end])

    def close(self) -> None:
        self._pool.shutdown(wait=True)
