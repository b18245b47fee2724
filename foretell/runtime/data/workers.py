"""Samples of the user's own, made ahead by processes beside a rank, and what becomes of those that cannot be made.

A process that dies is replaced: the micro-batch that it owed and all after it are made anew, so none is lost or comes twice. A
sample that raises again and again is set aside where that is allowed, and the next one of the data takes its place: which one
depends on nothing but its number, so a resumed run sees the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from foretell.errors import ModelError, UserError
from foretell.trace.record.step import Batch

TRIES = 3
"""A sample that has raised so often is set aside, and a process is replaced so often for one micro-batch."""
_MOST_NEIGHBOURS = 16
"""Samples that are tried in the place of one that raises."""

Places = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""First sample of a step → indices and epochs of this rank's, a row for every micro-batch."""


class OneByOne(Protocol):
    """Samples that are made one at a time."""

    owner: str
    count: int | None

    def one(self, index: int, epoch: int) -> Any:
        """That sample; a `UserError` where it raises."""
        ...


@dataclass(frozen=True)
class SetAside:
    """A sample that raised again and again, and the one in its place."""

    index: int
    epoch: int
    instead: int
    why: str


@dataclass(frozen=True)
class _FailedSample:
    """A sample, or a batch, that could not be made."""

    problem: str
    remedy: str
    detail: str


@dataclass(frozen=True)
class _MadeBatch:
    batch: Batch
    aside: tuple[SetAside, ...]


def made(samples: OneByOne, index: int, epoch: int, *, replaces: bool) -> tuple[Any, SetAside | None]:
    """A sample, tried a few times; where `replaces` allows it another one if it cannot be made."""
    first: UserError | None = None
    for place in range(_MOST_NEIGHBOURS if replaces else 1):
        number = (index + place) % (samples.count or 1)
        for _ in range(TRIES if replaces else 1):
            try:
                found = samples.one(number, epoch)
            except UserError as error:
                first = first or error
                continue
            if not place:
                return found, None
            assert first is not None
            return found, SetAside(index, epoch, number, first.problem)
    assert first is not None
    raise first


class SampleBudget:
    """So many different samples may be set aside; `tell` hears of each of them once."""

    def __init__(self, most: int, tell: Callable[[SetAside], None]) -> None:
        self.most, self.tell = most, tell
        self._known: set[int] = set()

    def note(self, aside: Sequence[SetAside]) -> None:
        for one in aside:
            if one.index in self._known:
                continue
            self._known.add(one.index)
            self.tell(one)
            if len(self._known) > self.most:
                problem = f"{len(self._known)} samples raised {TRIES} times each, and {self.most} may be set aside; the last: {one.why}"
                raise ModelError(problem, "mend them, or allow more with --bad-samples N")


class SampleWorkers:
    """The micro-batches of a rank, made ahead by processes of their own."""

    def __init__(
        self, samples: OneByOne, places: Places, *, step: int, count: int, seed: int, replaces: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`step` samples make a step of all ranks; there are `count` processes. `tell` hears that one was replaced."""
        self.samples, self.places, self.step, self.count, self.seed = samples, places, step, count, seed
        self.replaces, self.tell = replaces, tell
        self._batches: Iterator[Any] | None = None

    def next(self, first: int, micro_batch: int) -> tuple[Batch, tuple[SetAside, ...]]:
        """That micro-batch of the step that begins with sample `first`; the one after it is asked for next."""
        for attempt in range(1, TRIES + 1):
            if self._batches is None:
                self._batches = self._begun(first, micro_batch)
            try:
                found = next(self._batches)
                break
            except (OSError, EOFError, RuntimeError) as error:
                self._batches = None
                if attempt == TRIES:
                    raise self.died(error) from error
                where = f"at sample {first}, micro-batch {micro_batch}"
                self.tell(f"a process that prepares samples died ({_short(error)}): others take its place, {where}")
        if isinstance(found, _FailedSample):
            raise ModelError(found.problem, found.remedy, found.detail)
        return found.batch, found.aside

    def forget(self) -> None:
        """What was made ahead is cut otherwise from now on."""
        self._batches = None

    def died(self, error: BaseException) -> ModelError:
        problem = f"a process that prepares samples of {self.samples.owner} died: {_short(error)}"
        return ModelError(problem, "look for what ended it (the kernel's out-of-memory log, say), or use fewer --workers")

    def _begun(self, first: int, micro_batch: int) -> Iterator[Any]:
        """A generator of its own leaves the run's RNG alone."""

        def plan() -> Iterator[list[tuple[int, int]]]:
            at, skip = first, micro_batch
            while True:
                rows = [list(zip(indices.tolist(), epochs.tolist(), strict=True)) for indices, epochs in zip(*self.places(at), strict=True)]
                yield from rows[skip:]
                at, skip = at + self.step, 0

        loader = DataLoader(
            _Keyed(self.samples, replaces=self.replaces), batch_sampler=_Sampler(plan), num_workers=self.count, collate_fn=_collated_or_failed,
            generator=torch.Generator().manual_seed(self.seed),
        )  # fmt: skip
        with _calm():
            return iter(loader)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def _calm() -> Iterator[None]:
    """PyTorch has the end of a loader's process raise in whatever runs, an update too, which then is half done and lost. Without
    that, the next batch tells of it, some seconds later and between two steps."""
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if here else None
    try:
        yield
    finally:
        if here and signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)


class _Sampler:
    def __init__(self, plan: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.plan()


class _Keyed(torch.utils.data.Dataset):
    """The user's samples by (index, epoch), for a worker process. What they raise is handed over, not raised there: a loader
    would make a text of it."""

    def __init__(self, samples: OneByOne, *, replaces: bool) -> None:
        self.samples, self.replaces = samples, replaces

    def __getitem__(self, key: tuple[int, int]) -> Any:
        try:
            return made(self.samples, *key, replaces=self.replaces)
        except UserError as error:
            return _FailedSample(error.problem, error.remedy, error.detail)


def _collated_or_failed(samples: Sequence[Any]) -> Any:
    failed = next((sample for sample in samples if isinstance(sample, _FailedSample)), None)
    if failed is not None:
        return failed
    try:
        return _MadeBatch(collated([value for value, _ in samples]), tuple(aside for _, aside in samples if aside is not None))
    except UserError as error:
        return _FailedSample(error.problem, error.remedy, error.detail)


def collated(samples: Sequence[Any], owner: str = "data()") -> Batch:
    try:
        stacked = default_collate(list(samples))
    except (RuntimeError, TypeError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"samples of {owner} do not stack into a batch: {first}", "give every sample the same shape"
        ) from error
    return tuple(stacked) if isinstance(stacked, list) else stacked  # type: ignore[no-any-return]
