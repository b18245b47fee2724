"""What a run learns from: a folder of text as bytes, the user's own samples, or the model's example batch again and again.

The order is a function of (seed, epoch, position) and of nothing else: not of how many ranks there are, how large a
micro-batch is or where a run was stopped. Sample number k of a run is position k % count of epoch k // count.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foretell.errors import ModelError, UserError
from foretell.runtime.data import workers as loading
from foretell.runtime.data.workers import SampleBudget, SampleWorkers, SetAside, collated
from foretell.runtime.process import whose_error
from foretell.runtime.train.rng import seed_all
from foretell.trace.record.step import Batch

_BLOCK = 4096


class Samples(Protocol):
    """A set of samples that can be asked for by number."""

    count: int | None
    """None: a stream, whose samples come once each and in their own order."""
    note: str

    def take(self, indices: np.ndarray, epochs: np.ndarray) -> Batch:
        """One micro-batch on the CPU."""
        ...

    def digest(self) -> str:
        """Equal where the samples are."""
        ...

    # Samples may say `in_rows = True`: whatever they give is tensors with a row for every sample.


# --- the order -------------------------------------------------------------------------------------------------------


def shuffled(count: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """Which sample is at these positions of an epoch: a permutation of range(count), made without storing it.

    A Feistel network permutes the numbers of 2·half bits; a number that lands at count or beyond goes through again.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = _round_keys(seed, epoch)

    def once(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> shift, numbers & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << shift) | right

    found = once(positions.astype(np.uint64))
    while (outside := found >= count).any():
        found[outside] = once(found[outside])
    return found.astype(np.int64)


@functools.lru_cache(maxsize=4)
def _block(count: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """`shuffled` of many positions at once: per sample that is far cheaper than a few at a time."""
    return shuffled(count, seed, epoch, np.arange(block * _BLOCK, min(count, (block + 1) * _BLOCK)))


@functools.lru_cache(maxsize=4)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(_mixed(np.arange(4, dtype=np.uint64) + np.uint64(_key(seed, epoch))))


def _key(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little")


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's last step: every input bit reaches every output bit."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class RankSamples:
    """Which samples of a step belong to one data rank."""

    micro_batch: int
    accumulate: int = 1
    ranks: int = 1
    rank: int = 0
    together: bool = False
    """Whether its micro-batches follow each other in the order of the step; else ranks take turns."""

    @property
    def step(self) -> int:
        """Samples of a step, all ranks together."""
        return self.micro_batch * self.accumulate * self.ranks

    def numbers(self, first: int) -> np.ndarray:
        """Run-wide numbers of its samples in the step that begins with sample `first`: a row for every micro-batch."""
        own = np.arange(self.accumulate, dtype=np.int64)
        starts = first + (self.rank * self.accumulate + own if self.together else own * self.ranks + self.rank) * self.micro_batch
        return starts[:, None] + np.arange(self.micro_batch, dtype=np.int64)


class Feed:
    """Hands out one step's micro-batches after the other, and says where it is."""

    def __init__(
        self, samples: Samples, share: RankSamples, *, seed: int, device: torch.device, shuffle: bool = True, first: int = 0,
        workers: int = 0, bad_samples: int = 0, tell: Callable[[str | SetAside], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """So many `bad_samples` of the user's may be set aside; `tell` hears of each, and of processes that were replaced."""
        self.samples, self.share, self.seed, self.device, self.shuffle = samples, share, seed, device, shuffle
        self.first = first
        """Number of the next step's first sample: how many were used up so far."""
        self.aside = SampleBudget(bad_samples, tell)
        self.loader: SampleWorkers | None = None
        if isinstance(samples, Own):
            samples.replaces = bad_samples > 0
            if workers:
                self.loader = SampleWorkers(
                    samples, self.places, step=share.step, count=workers, seed=seed, replaces=samples.replaces, tell=tell
                )  # fmt: skip

    def next(self) -> list[Batch]:
        """The micro-batches of one step for this rank, on its device."""
        if self.loader is not None:
            made = []
            for micro_batch in range(self.share.accumulate):
                batch, aside = self.loader.next(self.first, micro_batch)
                self.aside.note(aside)
                made.append(self._moved(batch))
        else:
            made = self.at(self.first)
        self.first += self.share.step
        return made

    def at(self, first: int, rank: int | None = None) -> list[Batch]:
        """The same for the step that begins with sample `first`, wherever we are; of another data rank where one is named."""
        indices, epochs = self.places(first, rank)
        if not getattr(self.samples, "in_rows", False):
            made = [self._moved(self.samples.take(*row)) for row in zip(indices, epochs, strict=True)]
            if isinstance(self.samples, Own):
                self.aside.note(self.samples.aside)
                self.samples.aside.clear()
            return made
        whole = self._moved(self.samples.take(indices.reshape(-1), epochs.reshape(-1)))  # all at once, then cut: cheaper
        size = self.share.micro_batch
        return [pytree.tree_map(lambda t, at=at: t[at : at + size], whole) for at in range(0, indices.size, size)]

    def places(self, first: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Index and epoch of every sample of a step, a row for every micro-batch."""
        numbers = (self.share if rank is None else replace(self.share, rank=rank)).numbers(first)
        count = self.samples.count
        if count is None:
            return numbers, np.zeros_like(numbers)
        epochs, positions = numbers // count, numbers % count
        if not self.shuffle:
            return positions, epochs
        blocks = positions // _BLOCK
        keys = {(int(epochs[at]), int(blocks[at])) for at in ((0, 0), (-1, -1))}
        if epochs[0, 0] != epochs[-1, -1] or numbers[-1, -1] - numbers[0, 0] >= _BLOCK:
            keys = set(zip(epochs.reshape(-1).tolist(), blocks.reshape(-1).tolist(), strict=True))
        indices = np.empty_like(positions)
        for epoch, block in keys:
            chosen = (epochs == epoch) & (blocks == block)
            indices[chosen] = _block(count, self.seed, epoch, block)[positions[chosen] - block * _BLOCK]
        return indices, epochs

    def divide(self, micro_batch: int, accumulate: int) -> None:
        """From now on steps of the same samples have more and smaller micro-batches. Only where one rank has all of them."""
        self.share = replace(self.share, micro_batch=micro_batch, accumulate=accumulate)
        if self.loader is not None:
            self.loader.forget()

    def state(self, first: int | None = None) -> dict[str, int]:
        """Seed, epoch and position, of the next step or of the one that begins with sample `first`."""
        count = self.samples.count
        first = self.first if first is None else first
        epoch, position = divmod(first, count) if count else (0, first)
        return {"seed": self.seed, "epoch": epoch, "position": position}

    def seek(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was said."""
        self.first = int(state["epoch"]) * (self.samples.count or 0) + int(state["position"])

    def go_to(self, first: int) -> None:
        """The next step begins with that sample."""
        self.first = first
        if self.loader is not None:
            self.loader.forget()

    def _moved(self, batch: Batch) -> Batch:
        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if self.device.type != "cuda":
                return value.to(self.device)
            return value.pin_memory().to(self.device, non_blocking=True)

        return pytree.tree_map(move, batch)  # type: ignore[no-any-return]

    def lost_a_worker(self, error: BaseException) -> ModelError | None:
        """PyTorch raises it in whatever runs when a loader's process ends."""
        lost = self.loader is not None and isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
        return self.loader.died(error) if lost and self.loader is not None else None


# --- the user's own samples ------------------------------------------------------------------------------------------


class Own:
    """What the user's `data(split)` returned, asked by index. Random choices inside it depend on the sample alone."""

    def __init__(self, made: Any, *, seed: int, owner: str) -> None:
        self.made, self.seed, self.owner = made, seed, owner
        self.count: int | None = len(made)
        if not self.count:
            raise UserError(f"{owner} has no samples", "return something with a length above zero")
        self.note = f"{self.count:,} samples of {owner}"
        self.replaces = False
        """Whether another sample may take the place of one that raises."""
        self.aside: list[SetAside] = []
        """Those that were set aside since it was last asked for."""

    def one(self, index: int, epoch: int) -> Any:
        seed_all(_key(self.seed, epoch) ^ (index * 0x9E3779B97F4A7C15))
        try:
            return self.made[index]
        except (Exception, SystemExit) as error:
            raise _sample_error(self.owner, f"sample {index}", error) from error

    def take(self, indices: np.ndarray, epochs: np.ndarray) -> Batch:
        with _kept_random():
            pairs = zip(indices.tolist(), epochs.tolist(), strict=True)
            found = [loading.made(self, index, epoch, replaces=self.replaces) for index, epoch in pairs]
            self.aside += [aside for _, aside in found if aside is not None]
            return collated([value for value, _ in found], self.owner)

    def digest(self) -> str:
        return f"{self.count} samples"


class Stream:
    """What `data(split)` returned, read once from its start; a resumed run reads past what it has seen."""

    count: int | None = None

    def __init__(self, begin: Callable[[], Any], *, owner: str) -> None:
        self.begin, self.owner = begin, owner
        self.note = f"a stream of samples of {owner}"
        self.items, self.at = iter(begin()), 0

    def take(self, indices: np.ndarray, epochs: np.ndarray) -> Batch:
        with _kept_random():
            return collated([self._one(number) for number in indices.tolist()], self.owner)

    def _one(self, number: int) -> Any:
        if number < self.at:
            self.items, self.at = iter(self.begin()), 0
        while True:
            try:
                found = next(self.items)
            except StopIteration:
                raise UserError(
                    f"{self.owner} ended after {self.at:,} samples, and sample {number:,} is next",
                    "let it begin again by itself, or ask for fewer --steps",
                ) from None
            except (Exception, SystemExit) as error:
                raise _sample_error(self.owner, f"sample {self.at} of the stream", error) from error
            self.at += 1
            if self.at > number:
                return found

    def digest(self) -> str:
        return "stream"


class Example:
    """The model's example batch at every step: good for measuring, useless for learning."""

    count: int | None = None  # no epochs: an order for each sample of each step would cost more than the step

    def __init__(self, batch: Batch, size: int | None = None) -> None:
        """Of `size` samples, where it can be cut."""
        self.batch, self.size = batch, size
        self.note = "no data given: every step sees the model's example batch, good for measuring and not for learning"

    def take(self, indices: np.ndarray, epochs: np.ndarray) -> Batch:
        if self.size is None or len(indices) >= self.size:
            return self.batch
        rows = torch.from_numpy(indices % self.size)
        return pytree.tree_map(lambda value: value[rows] if self._has_samples(value) else value, self.batch)  # type: ignore[no-any-return]

    def _has_samples(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.size

    def digest(self) -> str:
        return "example"


def own_samples(begin: Callable[[], Any], *, seed: int, owner: str) -> Samples | None:
    """The right wrapper for what the user's function returns; None where it returns None (no evaluation, say)."""
    made = begin()
    if made is None:
        return None
    if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
        return Own(made, seed=seed, owner=owner)
    if hasattr(made, "__iter__"):
        return Stream(begin, owner=owner)
    raise UserError(
        f"{owner} returned {type(made).__name__}, which is neither a list of samples nor an iterable",
        "return an object with __len__ and __getitem__, one sample each, without a batch dimension",
    )


def _sample_error(owner: str, which: str, error: BaseException) -> ModelError:
    return ModelError(f"{which} of {owner} raised {whose_error.words(error)}", "mend it, or leave that sample out", whose_error.trail(error))


@contextmanager
def _kept_random() -> Iterator[None]:
    """Whatever samples draw, the run's own random numbers go on as if nothing had been drawn."""
    kept = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.random.set_rng_state(kept[2])
