"""Updates on the CPU: one thread of Python that asks, all other cores that compute.

Gradients come in the model's format and are widened run by run into memory that stays in the cache; where master weights are
whole, the new weights take the gradients' place, ready to be sent up. One thread asks, because many would keep the interpreter from launching the
model's kernels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from foretell.runtime.offload.forms import MASTER, ElementRun, StateFormat, StepSettings, update
from foretell.runtime.offload.lanes import Mark
from foretell.runtime.offload.layout import ParameterPiece

RUN = 2 * 2**20
"""Elements that are updated at a time, by all cores together."""
SPARE = 4
"""Cores left to launching kernels and to everything else."""


class Workers:
    """Updates chunks in the order they were asked for."""

    def __init__(self, form: StateFormat, threads: int | None = None) -> None:
        self.form = form
        count = threads or max(1, (os.cpu_count() or 1) - SPARE)
        before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="foretell-update", initializer=torch.set_num_threads, initargs=(count,))
        self._pool.submit(lambda: None).result()
        torch.set_num_threads(before)  # the setting is each thread's own, and the default of threads to come
        self._most = RUN // 8 if form.coded else RUN  # codes pass through memory many times
        self._wide = torch.empty(self._most * form.scratch, dtype=torch.float32)
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
        self, pieces: Sequence[ParameterPiece], weights: Tensor, grads: Tensor, kept: Mapping[str, Tensor], steps: Mapping[str, int],
        settings: StepSettings, here: Mark, arrive: Callable[[], Mark],
    ) -> Future[Mark]:  # fmt: skip
        """Update a chunk once its gradients are `here`, then `arrive`, which gives the mark of the new weights."""

        def work() -> Mark:
            if here is not None:
                here.synchronize()
            scale, skip = self._known()
            for piece in pieces:
                for at in range(piece.at, piece.at + piece.elements, self._most):
                    run = slice(at, min(at + self._most, piece.at + piece.elements))
                    states = {name: flat[self.form.run(name, at, run.stop - at)] for name, flat in kept.items()}
                    if not skip:
                        self._run(weights[run], grads[run], states, steps[piece.name], settings, scale)
                    elif MASTER in states:
                        weights[run].copy_(states[MASTER])  # they may be where the gradients are
            return arrive()

        return self._pool.submit(work)

    @torch.no_grad()
    def _run(self, weight: Tensor, grad: Tensor, kept: Mapping[str, Tensor], step: int, settings: StepSettings, scale: float | None) -> None:
        factor = torch.tensor([scale]) if scale is not None else None
        run = ElementRun(weight=weight, grad=grad, kept=kept, step=torch.tensor(float(step)))
        update(self.form, [run], self._wide, settings, scale=factor, skip=None)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
