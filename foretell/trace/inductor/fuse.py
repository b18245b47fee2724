"""Merge steps into kernels, as Inductor's scheduler does, and put the kernels in order.

Two steps become one kernel if they share bytes, walk through the same number of elements, and neither needs
something that the other has to finish first. Pairs that share most come first. The rules are those of torch 2.11
on CUDA. Plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from foretell.trace.inductor.graph import EXTERN, REDUCTION, SCATTER, without_ones
from foretell.trace.inductor.kernels import COLUMNS, FULL, OTHER, ROWS, Buffer, KernelStep

ROUNDS = 10
MOST_STEPS = 64
FARTHEST = 64
"""Steps this far apart in the original order are not merged only because they read the same."""
NEIGHBOURS = 64
"""Users of one buffer that are tried with each other, in order."""
LEAST_SHARED_BYTES = 10
MIX_ELEMENTS, MIX_ROWS, MIX_COLUMNS = 5 * 2**20, 4096, 16 * 1024
"""Sizes from which on sums over rows and over columns of the same data are one kernel."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200: how far a reduction is split depends on them."""


Look = tuple[str, tuple[int, ...], tuple[int, ...]]
"""How a buffer is walked through, by which views, and as part of which loops."""


class Kernel:
    """Steps that run as one."""

    __slots__ = ("columns", "first", "last", "looks", "mixed", "numel", "reads", "rnumel", "steps", "writes")

    def __init__(self, step: KernelStep) -> None:
        self.steps = [step]
        self.first = self.last = step.order
        self.numel, self.rnumel = step.numel, step.rnumel
        self.columns = step.kind == REDUCTION and not step.inner
        self.mixed = False
        self.reads: dict[Buffer, set[str]] = {buffer: {mode} for buffer, mode in step.reads.items()}
        self.writes: dict[Buffer, None] = dict.fromkeys(step.writes)
        self.looks: dict[Buffer, set[Look]] = {buffer: set() for buffer in step.reads}
        for (buffer, path), mode in step.loads.items():
            self.looks.setdefault(buffer, set()).add((mode, path, step.shape))
        for buffer in step.writes:
            self.looks.setdefault(buffer, set()).add((FULL, (), without_ones(buffer.node.spec.shape)))

    @property
    def reduces(self) -> bool:
        return self.rnumel > 1

    @property
    def fixed(self) -> bool:
        """A library kernel stays alone."""
        return self.steps[0].kind == EXTERN

    @property
    def sums(self) -> bool:
        """Whether its reductions are sums, which may be added up in any order."""
        inside = [node.op for step in self.steps for node in step.nodes.values() if node.kind == REDUCTION]
        return all(op in ("sum", "mean") for op in inside)

    def absorb(self, other: Kernel) -> None:
        self.mixed = self.mixed or other.mixed or (self.reduces and other.reduces and self.columns != other.columns)
        if other.reduces and (not self.reduces or (self.columns and not other.columns)):
            self.numel, self.rnumel, self.columns = other.numel, other.rnumel, other.columns
        self.steps.extend(other.steps)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        for buffer, modes in other.reads.items():
            self.reads.setdefault(buffer, set()).update(modes)
        for buffer, looks in other.looks.items():
            self.looks.setdefault(buffer, set()).update(looks)
        self.writes.update(other.writes)


class Fusion:
    """The merging, round by round."""

    def __init__(self, steps: Sequence[KernelStep]) -> None:
        self.kernels: list[Kernel] = [Kernel(step) for step in steps]
        self._of: dict[int, Kernel] = {step.order: kernel for step, kernel in zip(steps, self.kernels, strict=True)}

    def run(self) -> list[Kernel]:
        for _ in range(ROUNDS):
            if not self._round(reorder=False):
                break
        self._round(reorder=True)
        return self._in_order()

    def _round(self, *, reorder: bool) -> int:
        """Merge what can be merged once; the number of kernels that are gone."""
        pairs = sorted(self._pairs(reorder), key=lambda pair: pair[0], reverse=True)
        gone: set[int] = set()
        for _, one, two in pairs:
            first, second = self._of[one.steps[0].order], self._of[two.steps[0].order]
            if first is second:
                continue
            if first is not one or second is not two:
                if second.first < first.first:
                    first, second = second, first
                if self._score(first, second, reorder) is None:
                    continue
            if self._cycle(first, second):
                continue
            first.absorb(second)
            for step in second.steps:
                self._of[step.order] = first
            gone.add(id(second))
        self.kernels = [kernel for kernel in self.kernels if id(kernel) not in gone]
        self.kernels.sort(key=lambda kernel: kernel.first)
        return len(gone)

    def _pairs(self, reorder: bool) -> Iterator[tuple[tuple[bool, int, int], Kernel, Kernel]]:
        users: dict[Buffer, list[Kernel]] = {}
        for kernel in self.kernels:
            if not kernel.fixed:
                for buffer in kernel.looks:
                    users.setdefault(buffer, []).append(kernel)
        seen: set[tuple[int, int]] = set()
        for near in users.values():
            for position, one in enumerate(near):
                for two in near[position + 1 : position + 1 + NEIGHBOURS]:
                    key = (one.first, two.first)
                    if key in seen:
                        continue
                    seen.add(key)
                    shared = self._score(one, two, reorder)
                    if shared is not None:
                        distance = max(abs(one.first - two.last), abs(two.first - one.last))
                        yield (one.reduces == two.reduces, shared, -distance), one, two

    # ------------------------------------------------------------------ may two be one?

    def _score(self, one: Kernel, two: Kernel, reorder: bool) -> int | None:
        """Bytes shared, or None if the two may not be merged."""
        if one.fixed or two.fixed or len(one.steps) + len(two.steps) > MOST_STEPS:
            return None
        if not _same_space(one, two):
            mixed = _mixable(one, two)
            return None if mixed is None or self._depends(one, two) else mixed
        if two.mixed or (one.mixed and reorder):
            return None
        shared = _shared(one, two, reorder)
        if shared < LEAST_SHARED_BYTES:
            return None
        if any(buffer in one.writes for buffer in two.reads):
            return shared if _readable(one, two, reorder) else None
        if any(buffer in two.writes for buffer in one.reads):
            return None
        distance = max(abs(one.first - two.last), abs(two.first - one.last))
        return shared if distance <= FARTHEST else None

    def _depends(self, one: Kernel, two: Kernel) -> bool:
        """Whether one needs the other, directly or not."""
        directly = any(buffer in one.writes for buffer in two.reads) or any(b in two.writes for b in one.reads)
        return directly or self._cycle(one, two)

    def _before(self, kernel: Kernel) -> Iterator[Kernel]:
        for buffer in kernel.reads:
            if buffer.maker is not None:
                maker = self._of[buffer.maker.order]
                if maker is not kernel:
                    yield maker

    def _cycle(self, one: Kernel, two: Kernel) -> bool:
        """Whether a way from one to the other leads through a third."""
        low = min(one.first, two.first)
        stack = [k for kernel in (one, two) for k in self._before(kernel) if k is not one and k is not two]
        seen: set[int] = set()
        while stack:
            kernel = stack.pop()
            if kernel is one or kernel is two:
                return True
            if id(kernel) in seen or kernel.last < low:
                continue
            seen.add(id(kernel))
            stack.extend(self._before(kernel))
        return False

    def _in_order(self) -> list[Kernel]:
        """Each kernel after what it reads, otherwise as the graph had them."""
        done: set[int] = set()
        order: list[Kernel] = []
        for root in self.kernels:
            stack = [(root, False)]
            while stack:
                kernel, ready = stack.pop()
                if ready:
                    order.append(kernel)
                elif id(kernel) not in done:
                    done.add(id(kernel))
                    stack.append((kernel, True))
                    before = [k for k in self._before(kernel) if id(k) not in done]
                    stack.extend((k, False) for k in sorted(before, key=lambda k: -k.first))
        return order


def _same_space(one: Kernel, two: Kernel) -> bool:
    """Whether two walk through the same elements: equal sizes, or a reduction and what it reads or makes."""
    if one.reduces and two.reduces:
        return one.columns == two.columns and (one.numel, one.rnumel) == (two.numel, two.rnumel)
    if not one.reduces and not two.reduces:
        return one.numel == two.numel
    plain, reduction = (two, one) if one.reduces else (one, two)
    return plain.numel in (reduction.numel, reduction.numel * reduction.rnumel)


def _mixable(one: Kernel, two: Kernel) -> int | None:
    """Elements shared by a reduction of rows and one of columns of the same large data."""
    if not (one.reduces and two.reduces) or (one.columns == two.columns and not (one.mixed or two.mixed)):
        return None
    rows, columns = (two, one) if one.columns else (one, two)
    if (rows.numel, rows.rnumel) != (columns.rnumel, columns.numel) or not columns.columns:
        return None
    height, width = rows.numel, rows.rnumel
    large = height * width >= MIX_ELEMENTS and height >= 2 * width and height >= MIX_ROWS and width <= MIX_COLUMNS
    if not large or not columns.sums:
        return None
    common = [b for b, modes in columns.reads.items() if COLUMNS in modes and FULL in rows.reads.get(b, ())]
    return height * width if common else None


def _shared(one: Kernel, two: Kernel, reorder: bool) -> int:
    """Bytes that both walk through in the same way; only a last round looks past how the loops are cut."""
    if len(two.looks) < len(one.looks):
        one, two = two, one
    total = 0
    for buffer, mine in one.looks.items():
        theirs = two.looks.get(buffer)
        if theirs is None:
            continue
        alike = any(look in theirs and (look[0] != OTHER or look[1]) for look in mine)
        if not alike and reorder:
            ways, others = {look[0] for look in mine}, {look[0] for look in theirs}
            alike = bool(ways & others - {OTHER}) or _turnable(one, two, ways, others)
        if alike:
            total += buffer.size
    return total


def _turnable(one: Kernel, two: Kernel, mine: Iterable[str], theirs: Iterable[str]) -> bool:
    """Whether one of two kernels may go down the columns because the other does: it must not reduce itself."""
    if COLUMNS in theirs and FULL in mine:
        one, two, mine, theirs = two, one, theirs, mine
    return COLUMNS in mine and FULL in theirs and not two.reduces and _loops(one) == two.steps[0].shape


def _loops(kernel: Kernel) -> tuple[int, ...]:
    """The loops of a reduction down the columns, which may be split in parts."""
    step = next(step for step in kernel.steps if step.kind == REDUCTION)
    parts = splits(kernel.numel, kernel.rnumel, inner=False)
    if parts == 1:
        return step.shape
    return (parts, -(-kernel.rnumel // parts), kernel.numel)


def _readable(one: Kernel, two: Kernel, reorder: bool) -> bool:
    """Whether all that `two` reads of `one` is there when the same element is at hand."""
    for buffer in two.reads:
        if buffer not in one.writes:
            continue
        assert buffer.maker is not None
        if buffer.maker.kind == SCATTER or buffer.alias is not None:
            return False
        for mode in two.reads[buffer]:
            if mode == FULL:
                continue
            if mode == ROWS and (one.reduces or two.reduces) and not (one.reduces and is_split(one)):
                continue
            if mode == COLUMNS and reorder and _turnable(one, two, {FULL}, {COLUMNS}):
                continue
            return False
    return True


def is_split(kernel: Kernel) -> bool:
    return splits(kernel.numel, kernel.rnumel, inner=not kernel.columns) > 1


def splits(numel: int, rnumel: int, *, inner: bool) -> int:
    """Parts that a reduction is split into, for want of parallel work."""
    if numel > 1 and (rnumel <= 32 or numel >= PROCESSORS * 2 * 32):
        return 1
    threads = 2048
    least, most = 32 * PROCESSORS * threads, 512 * PROCESSORS * threads
    return _inner_splits(numel, rnumel, least, most) if inner else _outer_splits(numel, rnumel, least, most)


def mixed_rows(rows: int) -> int:
    """Rows that one part of a kernel over rows and columns sums up."""
    share = max(1, rows // (PROCESSORS * 8))
    return min(max(1 << (share.bit_length() - 1), 16), 128)


def _inner_splits(numel: int, rnumel: int, least: int, most: int) -> int:
    if numel >= 2 * PROCESSORS or rnumel <= 8192:
        return 1
    if rnumel * numel <= least:
        size = 32
    elif rnumel * numel < most:
        blocks = -(-(PROCESSORS * 2048 // 512) // numel)
        size = max(32, _even(rnumel, -(-rnumel // (256 * blocks)), 30))
    else:
        size = _even(rnumel, 512, 50)
    return -(-rnumel // (size * 256))


def _outer_splits(numel: int, rnumel: int, least: int, most: int) -> int:
    if rnumel * numel < least:
        size = 32
    elif rnumel * numel < most:
        blocks = -(-(PROCESSORS * 2048 // 256) // -(-numel // 128))
        size = _even(rnumel, -(-rnumel // (4 * blocks)), 20, floor=32)
    else:
        size = _even(rnumel, 512, 50)
    return -(-rnumel // (4 * size))


@lru_cache(maxsize=1024)
def _even(whole: int, size: int, near: int, floor: int = 1) -> int:
    """A size near the wanted one that divides the whole, if there is one."""
    low = [d for d in range(1, int(whole**0.5) + 1) if whole % d == 0]
    closest = min((d for small in low for d in (small, whole // small)), key=lambda d: (abs(d - size), d))
    return max(closest, floor) if abs(closest - size) < near else size
