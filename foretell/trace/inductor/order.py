"""The order in which kernels run: the one of four with the lowest estimated peak, as Inductor chooses it.

The four are the order of the graph, least peak memory first, earliest needed first, and depth first by size
(torch 2.11). Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from foretell.trace.inductor.fuse import Kernel
from foretell.trace.inductor.kernels import Buffer


def reorder(kernels: Sequence[Kernel], dying: set[Buffer]) -> list[Kernel]:
    """The kernels in the order they run; `dying` are the inputs of the graph that it may free."""
    plan = _Plan(kernels, dying)
    order = range(len(kernels))
    best, least = list(order), plan.peak(list(order))
    ways: tuple[Callable[[], list[int]], ...] = (plan.least_peak_first, plan.earliest_first, plan.depth_first)
    for way in ways:
        found = way()
        peak = plan.peak(found)
        if peak < least:
            best, least = found, peak
    return [kernels[position] for position in best]


class _Plan:
    """Who needs whom, and what is freed when."""

    def __init__(self, kernels: Sequence[Kernel], dying: set[Buffer]) -> None:
        count = len(kernels)
        self.count = count
        self.made: list[list[Buffer]] = [[b for b in kernel.writes if b.alias is None] for kernel in kernels]
        self.size = [sum(buffer.size for buffer in made) for made in self.made]
        maker = {buffer: position for position, kernel in enumerate(kernels) for buffer in kernel.writes}
        self.read: list[list[Buffer]] = []
        self.readers: dict[Buffer, list[int]] = {}
        self.before: list[list[int]] = []
        self.after: list[list[int]] = [[] for _ in range(count)]
        for position, kernel in enumerate(kernels):
            given: dict[Buffer, None] = {}
            before: dict[int, None] = {}
            for buffer in kernel.reads:
                made_by = maker.get(buffer)
                if made_by == position:
                    continue
                if made_by is not None:
                    before[made_by] = None
                elif buffer not in dying:
                    continue
                given[_first(buffer)] = None
            self.read.append(list(given))
            self.before.append(list(before))
            for buffer in given:
                self.readers.setdefault(buffer, []).append(position)
            for other in before:
                self.after[other].append(position)
        self.dying = [buffer for buffer in dying if buffer in self.readers]
        self.stored = {buffer for made in self.made for buffer in made if buffer.stored}

    # ------------------------------------------------------------------ what an order costs

    def peak(self, order: Sequence[int]) -> int:
        """Highest memory of an order, what is freed after a kernel counted with the next one."""
        step = {position: i for i, position in enumerate(order)}
        change = [0] * (self.count + 2)
        for buffer in self.dying:
            change[0] += buffer.size
            change[1 + max(step[reader] for reader in self.readers[buffer])] -= buffer.size
        for position in range(self.count):
            for buffer in self.made[position]:
                change[step[position]] += buffer.size
                if buffer not in self.stored:
                    last = max((step[reader] for reader in self.readers.get(buffer, ())), default=step[position])
                    change[1 + last] -= buffer.size
        return max(_running(change))

    # ------------------------------------------------------------------ orders

    def least_peak_first(self) -> list[int]:
        """Of the kernels that may run, one that fits under the peak so far and leaves least; else the smallest."""
        left = [len(before) for before in self.before]
        uses = {buffer: len(readers) for buffer, readers in self.readers.items()}
        frees = [0] * self.count
        for position in range(self.count):
            for buffer in self.read[position]:
                if uses[buffer] == 1 and buffer not in self.stored:
                    frees[position] += buffer.size
            for buffer in self.made[position]:
                if buffer not in uses and buffer not in self.stored:
                    frees[position] += buffer.size
        live = sum(buffer.size for buffer in self.dying)
        most = max(live, sum(buffer.size for buffer in self.stored))
        ready = _Ready(self.size, frees)
        for position in range(self.count):
            if not left[position]:
                ready.add(position)
        order: list[int] = []
        while len(order) < self.count:
            chosen = ready.take(most - live)
            order.append(chosen)
            live += self.size[chosen]
            most = max(most, live)
            live -= frees[chosen]
            for position in self.after[chosen]:
                left[position] -= 1
                if not left[position]:
                    ready.add(position)
            for buffer in self.read[chosen]:
                uses[buffer] -= 1
                if uses[buffer] == 1 and buffer not in self.stored:
                    for position in self.readers[buffer]:
                        frees[position] += buffer.size
                        ready.changed(position)
        return order

    def earliest_first(self) -> list[int]:
        """Of the kernels that may run, the one whose inputs were there first."""
        left = [len(before) for before in self.before]
        heap: list[tuple[list[int], int]] = [([], position) for position in range(self.count) if not left[position]]
        heapify(heap)
        done: dict[int, int] = {}
        order: list[int] = []
        while heap:
            _, chosen = heappop(heap)
            done[chosen] = len(order)
            order.append(chosen)
            for position in self.after[chosen]:
                left[position] -= 1
                if not left[position]:
                    heappush(heap, (sorted(done[other] for other in self.before[position]), position))
        return order

    def depth_first(self) -> list[int]:
        """Small kernels first, each after all it needs."""
        weight = [size + sum(b.size for b in self.read[i]) for i, size in enumerate(self.size)]

        def key(position: int) -> tuple[int, int]:
            return weight[position], position

        order: list[int] = []
        seen: set[int] = set()
        for root in sorted(range(self.count), key=key):
            stack = [(root, False)]
            while stack:
                position, ready = stack.pop()
                if ready:
                    order.append(position)
                elif position not in seen:
                    seen.add(position)
                    stack.append((position, True))
                    stack.extend((other, False) for other in sorted(self.before[position], key=key, reverse=True))
        return order


class _Ready:
    """Kernels that may run: the one that leaves least among those that fit, or the smallest."""

    def __init__(self, size: list[int], frees: list[int]) -> None:
        self.size, self.frees = size, frees
        self.members: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def add(self, position: int) -> None:
        self.members.add(position)
        heappush(self._heap, (self.size[position] - self.frees[position], position))

    def changed(self, position: int) -> None:
        if position in self.members:
            heappush(self._heap, (self.size[position] - self.frees[position], position))

    def take(self, gap: int) -> int:
        passed: list[tuple[int, int]] = []
        chosen = -1
        while self._heap:
            entry = heappop(self._heap)
            leaves, position = entry
            if position not in self.members or leaves != self.size[position] - self.frees[position]:
                continue
            if self.size[position] <= gap:
                chosen = position
                break
            passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        if chosen < 0:
            chosen = min(self.members, key=lambda p: (self.size[p], self.size[p] - self.frees[p], p))
        self.members.discard(chosen)
        return chosen


def _first(buffer: Buffer) -> Buffer:
    """The buffer that was there before others were written in its place."""
    while buffer.alias is not None:
        buffer = buffer.alias
    return buffer


def _running(change: Sequence[int]) -> Iterator[int]:
    total = 0
    for amount in change:
        total += amount
        yield total
