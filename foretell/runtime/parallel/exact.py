"""Gradients that have the same bits on any number of ranks: those of micro-batches are added along one binary tree.

    micro-batches of a step    0   1   2   3   4   5   6   7
                                \\ /     \\ /     \\ /     \\ /
                                 └───┬───┘       └───┬───┘        rank 0 of two adds up 0 to 3, rank 1 4 to 7
                                     └───────┬───────┘            what ranks exchange, and each adds alike

The tree is that of a step, whoever computes which part of it. A rank has micro-batches that follow each other and adds up the
largest subtrees that lie within them: one where their number is a power of two. Each rank then gets its slice of all subtrees,
adds it in the tree's order, and sends the sum to all: as many bytes as an all-reduce where ranks have one subtree each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from foretell.errors import UserError
from foretell.plan.types import Plan
from foretell.runtime.parallel.exact_plans import leaves
from foretell.runtime.parallel.ranks import Ranks

BUCKET_BYTES = 32 * 2**20
"""Of gradients that are exchanged at a time."""

Value = TypeVar("Value")


def subtrees(first: int, count: int) -> list[tuple[int, int]]:
    """First leaf and size of the largest subtrees that make up so many leaves."""
    found, at, end = [], first, first + count
    while at < end:
        size = 1
        while at % (2 * size) == 0 and at + 2 * size <= end:
            size *= 2
        found.append((at, size))
        at += size
    return found


class TreeSum(Generic[Value]):
    """Adds what comes in the order of leaves, as the tree does."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        self.add = add
        self.parts: list[tuple[int, int, Value]] = []
        """First leaf, size and sum of the subtrees so far, none of which has its sibling."""

    def push(self, first: int, size: int, value: Value) -> None:
        while self.parts and self.parts[-1][1] == size and self.parts[-1][0] % (2 * size) == 0:
            first, _, before = self.parts.pop()
            value, size = self.add(before, value), 2 * size
        self.parts.append((first, size, value))

    def total(self) -> Value:
        """Of all leaves, when they are there."""
        value = self.parts.pop()[2]
        while self.parts:
            value = self.add(self.parts.pop()[2], value)
        return value


def _added(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(one, other)
    return one


class ExactSum:
    """Sums gradients and losses of a step over its micro-batches, on whichever ranks they are."""

    def __init__(self, model: nn.Module, plan: Plan, ranks: Ranks) -> None:
        statistics = next((name for name, module in model.named_modules() if isinstance(module, _NormBase) and module.track_running_stats), None)
        if statistics is not None:
            raise changes(f"the running statistics of {statistics}")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.leaves, self.count, self.world = leaves(plan), plan.accumulate, ranks.data_size
        self.first = ranks.data_rank * plan.accumulate
        self.group = ranks.group("dp_replicate")
        self.seed: Callable[[int], None] = lambda micro_batch: None
        """Called before each micro-batch with its number on this rank, and with their count before the update: what is drawn follows
        from the micro-batch."""
        self.loss: Tensor | None = None
        """Mean of the last step, the same on every rank."""
        if ranks.device.type == "cuda":
            torch.use_deterministic_algorithms(True)

    def backward(self, losses: Iterator[Tensor]) -> Tensor:
        """Gradients of the mean loss; `losses` gives the loss of each micro-batch in turn, and after each its backward is due. Returns
        the mean of this rank's."""
        tree: TreeSum[list[Tensor]] = TreeSum(_added)
        present = [False] * len(self.parameters)
        own: list[Tensor] = []
        for number, loss in enumerate(losses):
            own.append(loss.detach().float())
            (loss / self.leaves).backward()
            tree.push(self.first + number, 1, self._taken(present))
        self.seed(self.count)
        together, present = self._told(own, present)
        self.loss = self._mean(together)
        summed = tree.total() if self.group is None else self._exchanged(tree)
        for parameter, gradient, there in zip(self.parameters, summed, present, strict=True):
            parameter.grad = gradient if there else None
        return torch.stack(own).mean()

    def leaf(self, data_rank: int, number: int) -> int:
        """Which micro-batch of the step a rank's is; after its last, one that none has."""
        return data_rank * self.count + number if number < self.count else self.leaves

    def check(self, changed: str) -> None:
        """Raise where forward has changed the values of a buffer."""
        if changed:
            raise changes(f"the values of {changed}")

    def mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Of all ranks' losses of as many micro-batches each."""
        return self._mean(self._told([loss.float() for loss in losses], [])[0])

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        tree: TreeSum[Tensor] = TreeSum(torch.add)
        for number, loss in enumerate(losses):
            tree.push(number, 1, loss)
        return tree.total() / len(losses)

    def _taken(self, present: list[bool]) -> list[Tensor]:
        """Gradients of one micro-batch; zeros where a parameter has none, since another one may have some."""
        found = []
        for place, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                raise UserError("--exact sums dense gradients, and the model has sparse ones", "give the embedding sparse=False")
            present[place] = present[place] or gradient is not None
            found.append(torch.zeros_like(parameter) if gradient is None else gradient)
        return found

    def _told(self, losses: Sequence[Tensor], present: Sequence[bool]) -> tuple[list[Tensor], list[bool]]:
        """Losses of all micro-batches in order, and which parameters have a gradient on any rank."""
        if self.group is None:
            return list(losses), list(present)
        mine = torch.cat([torch.stack(list(losses)), torch.tensor(present, dtype=torch.float32, device=losses[0].device)])
        rows = torch.empty(self.world, mine.numel(), device=mine.device)
        dist.all_gather(list(rows), mine, group=self.group)
        return list(rows[:, : len(losses)].reshape(-1)), (rows[:, len(losses) :] > 0).any(0).tolist()

    # ------------------------------------------------------------ between ranks

    def _exchanged(self, tree: TreeSum[list[Tensor]]) -> list[Tensor]:
        """The sum over all ranks, in the tensors of this rank's first subtree."""
        values = [value for _, _, value in tree.parts]
        for places in self._buckets():
            self._sum(places, values)
        return values[0]

    def _buckets(self) -> Iterator[list[int]]:
        """Places of parameters of one dtype that are exchanged at once."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(place)
        for places in by_dtype.values():
            bucket, held = list[int](), 0
            for place in places:
                if bucket and held + self.parameters[place].nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, held = [], 0
                bucket.append(place)
                held += self.parameters[place].nbytes
            yield bucket

    def _sum(self, places: Sequence[int], values: Sequence[list[Tensor]]) -> None:
        """Every rank adds up its slice of all subtrees; all get all slices."""
        held = [subtrees(rank * self.count, self.count) for rank in range(self.world)]
        most = max(map(len, held))
        flats = [torch.cat([value[place].reshape(-1) for place in places]) for value in values]
        size = flats[0].numel()
        each = -(-size // self.world)
        given = flats[0].new_zeros(self.world, most, each)
        for number, flat in enumerate(flats):
            given[:, number] = nn.functional.pad(flat, (0, each * self.world - size)).view(self.world, each)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=self.group)
        tree: TreeSum[Tensor] = TreeSum(torch.add)
        for rank, parts in enumerate(held):
            for number, (first, leaves_of) in enumerate(parts):
                tree.push(first, leaves_of, got[rank, number])
        slices = given.new_empty(self.world, each)
        dist.all_gather(list(slices), tree.total(), group=self.group)
        summed = slices.view(-1)
        at = 0
        for place in places:
            into = values[0][place]
            into.copy_(summed[at : at + into.numel()].view(into.shape))
            at += into.numel()


def changes(what: str) -> UserError:
    """A model whose buffers depend on what came before, on this rank."""
    return UserError(f"--exact needs a model without memory of earlier micro-batches, and {what} are one",
                     "leave out --exact, or use a norm of each sample, such as GroupNorm or LayerNorm")  # fmt: skip
