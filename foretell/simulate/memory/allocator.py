"""A simulator of PyTorch's CUDA caching allocator, in bytes and addresses only.

``memory_reserved`` of a training step is decided by the caching allocator, not by the sum of the tensors: it rounds
sizes, keeps freed memory, splits it and leaves holes. This module replays a sequence of allocations and frees through
the same rules (torch 2.11 to 2.13, default settings) and says what would be allocated and reserved, and where the
step would run out of memory. It needs neither torch nor a GPU.

A *segment* is what one ``cudaMalloc`` returned; it is cut into *blocks*, a doubly linked list in address order::

      segment of 20 MiB (large pool of stream 0)
      +-----------+---------+--------------+----------------------+
      | 6 MiB     | 3 MiB   | 4 MiB        | 7 MiB                |     free blocks are also in the pool's list,
      | used      | free    | used         | free                 |     sorted by (size, address):
      +-----------+---------+--------------+----------------------+        [3 MiB @6, 7 MiB @13, ...]

The rules:

* A request is rounded up to a multiple of 512 bytes. Up to 1 MiB it is served by the small pool, whose segments have
  2 MiB; above, by the large pool, whose segments have 20 MiB for requests below 10 MiB and otherwise the request
  rounded up to 2 MiB. Every stream has its own two pools.
* Best fit: the smallest free block that is large enough, the lowest address among equals. What is left over becomes a
  free block if it has at least 512 bytes (small pool) or more than 1 MiB (large pool); otherwise the whole block is
  handed out, and counts as allocated.
* A freed block is merged with free neighbours of the same segment.
* Where a new segment would exceed the limit, every wholly free segment of every stream is given back and the request
  is tried once more (``retries``, torch's ``num_alloc_retries``); if that fails too, it is `OutOfMemory`.

With ``expandable=True`` (``expandable_segments:True``) a stream's pool has one segment of address space, an eighth
larger than the limit, into which pages of 2 MiB (small pool) or 20 MiB (large pool) are mapped on demand::

      | used        | free | unmapped: 1 page | used | free | unmapped: the rest ...
      +------page---+------page--------+-----page-----+------page----+ - - - - - - -

A request that no free block can hold takes the lowest free address range that is long enough, counting unmapped
ranges as free, and maps the pages it lacks; giving back the cache unmaps every page that lies wholly inside a free
block. Leftovers of at least 512 bytes are split off in both pools.

Choices where the real allocator depends on its surroundings:

* Addresses matter only where free blocks have the same size. The driver gives out ranges of 32 MiB from the top of its address
  space down, and fills what a segment leaves of its last range with smaller ones (seen on an H200); ranges are never reused here.
* The limit is physical memory: a ``cudaMalloc`` (or a mapping) fails when the reserved bytes would exceed it. Under
  expandable segments ``set_per_process_memory_fraction`` has one more check, which is not modelled.
* ``max_split_size_mb``, ``garbage_collection_threshold`` (both off by default), private pools (CUDA graphs) and
  ``record_stream`` are not modelled: a caller that knows when the other stream is done frees the block then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping

MIB = 1 << 20
MIN_BLOCK = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_EXACT = 10 * MIB
LARGE_ROUNDING = 2 * MIB

_FIRST_ADDRESS = 1 << 45
_RANGE = 32 * MIB
_UNLIMITED_SPACE = 1 << 44
# A free block's sort key is one integer, size above address: comparing integers is faster than comparing tuples.
_SIZE_SHIFT = 64

_USED, _FREE, _UNMAPPED = 0, 1, 2


class OutOfMemory(Exception):
    """The request does not fit under the limit, even with the cache given back."""

    def __init__(self, requested: int, reserved: int, allocated: int, limit: int | None) -> None:
        super().__init__(f"{requested} bytes requested, {reserved} reserved, {allocated} allocated, limit {limit}")
        self.requested = requested
        self.reserved = reserved
        self.allocated = allocated
        self.limit = limit


class _Block:
    """A piece of a segment; ``prev`` and ``next`` are its neighbours there."""

    __slots__ = ("address", "next", "pool", "prev", "size", "state")

    def __init__(self, address: int, size: int, pool: _Pool, prev: _Block | None, next_: _Block | None, state: int):
        self.address = address
        self.size = size
        self.pool = pool
        self.prev = prev
        self.next = next_
        self.state = state

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes and return the rest as a new block of the same state, in no list yet."""
        after = self.next
        rest = _Block(self.address + size, self.size - size, self.pool, self, after, self.state)
        if after is not None:
            after.prev = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the next block, which must be in no list any more."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self


class _Pool:
    """The free blocks of one stream and size class: `keys` is sorted, and `blocks` runs parallel to it."""

    __slots__ = ("blocks", "keys", "page", "split_from", "unmapped")

    def __init__(self, small: bool, expandable: bool) -> None:
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.split_from = MIN_BLOCK if small or expandable else SMALL_LIMIT + 1
        self.keys: list[int] = []
        self.blocks: list[_Block] = []
        self.unmapped: list[_Block] = []  # by address; expandable segments only

    def add(self, block: _Block) -> None:
        """Put a free or unmapped block into its list."""
        if block.state == _UNMAPPED:
            insort(self.unmapped, block, key=_address)
            return
        key = block.size << _SIZE_SHIFT | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: _Block) -> None:
        """Take a free or unmapped block out of its list."""
        if block.state == _UNMAPPED:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]
            return
        at = bisect_left(self.keys, block.size << _SIZE_SHIFT | block.address)
        del self.keys[at]
        del self.blocks[at]

    def add_merged(self, block: _Block) -> _Block:
        """Merge `block` with neighbours of its own state, list the result and return it."""
        state = block.state
        after = block.next
        if after is not None and after.state == state:
            self.remove(after)
            block.absorb_next()
        before = block.prev
        if before is not None and before.state == state:
            self.remove(before)
            before.absorb_next()
            block = before
        self.add(block)
        return block

    def best_expandable(self, at: int) -> int:
        """From the best fit at `at`, the block to take: one that could grow counts with the size it could grow to."""
        last = len(self.blocks) - 1
        while at < last and _growable_size(self.blocks[at + 1]) < _growable_size(self.blocks[at]):
            at += 1
        return at


def _address(block: _Block) -> int:
    return block.address


def _growable_size(block: _Block) -> int:
    after = block.next
    return block.size + after.size if after is not None and after.state == _UNMAPPED else block.size


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _has_room(block: _Block | None, size: int) -> bool:
    """Whether `size` bytes of address space from `block` on are not in use."""
    while size > 0 and block is not None and block.state != _USED:
        size -= block.size
        block = block.next
    return size <= 0


def _segment_size(size: int) -> int:
    """How much ``cudaMalloc`` is asked for when no free block holds `size` (already rounded)."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_EXACT else _round_up(size, LARGE_ROUNDING)


def _round_to_division(size: int, divisions: int) -> int:
    """``roundup_power2_divisions``: round up to one of `divisions` equal steps between two powers of two."""
    if size <= MIN_BLOCK * divisions:
        return _round_up(size, MIN_BLOCK)
    return _round_up(size, (1 << size.bit_length() - 1) // divisions)


Tell = Callable[[bool, int, int], None]
"""Told of every block that comes (or goes): whether it comes, its handle, its bytes."""


class CachingAllocator:
    """The allocator of one device. A handle is the block's address, so it is unique among the live blocks.

    ``allocated`` and ``reserved`` are what ``torch.cuda.memory_allocated`` and ``memory_reserved`` would return; the
    peaks are those since the start or the last `reset_peaks`.
    """

    def __init__(
        self, limit: int | None = None, *, expandable: bool = False, roundup_power2_divisions: int = 0
    ) -> None:
        if roundup_power2_divisions & (roundup_power2_divisions - 1) or roundup_power2_divisions < 0:
            raise ValueError("roundup_power2_divisions must be 0 or a power of two")
        self.limit = limit
        self.expandable = expandable
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.retries = 0
        self._divisions = roundup_power2_divisions
        self._pools: dict[int, _Pool] = {}
        self._live: dict[int, _Block] = {}
        self._heads: dict[int, _Block] = {}  # the first block of every segment, by address
        self._next_address = self._lowest = _FIRST_ADDRESS
        self._rests: list[tuple[int, int]] = []  # (address, bytes) of ranges that a segment has not filled
        self.tell: Tell | None = None

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """Allocate and return a handle (0 for no bytes). Raises `OutOfMemory`."""
        if nbytes <= 0:
            if nbytes:
                raise ValueError("negative size")
            return 0
        size = (nbytes + 511) & -512
        if self._divisions > 1:
            size = _round_to_division(nbytes, self._divisions)
        which = stream << 1 | (size > SMALL_LIMIT)
        pool = self._pools.get(which)
        if pool is None:
            pool = self._pools[which] = _Pool(size <= SMALL_LIMIT, self.expandable)
        keys = pool.keys
        at = bisect_left(keys, size << _SIZE_SHIFT)
        if at < len(keys):
            if self.expandable:
                at = pool.best_expandable(at)
            block = pool.blocks.pop(at)
            del keys[at]
        else:
            block = self._new_block(pool, size, nbytes)
        address = block.address
        if block.size - size >= pool.split_from:  # as `pool.add(block.cut(size))`: quicker, and most of the time goes here
            after = block.next
            rest = block.next = _Block(address + size, block.size - size, pool, block, after, _FREE)
            if after is not None:
                after.prev = rest
            block.size = size
            key = rest.size << _SIZE_SHIFT | rest.address
            at = bisect_left(keys, key)
            keys.insert(at, key)
            pool.blocks.insert(at, rest)
        block.state = _USED
        self._live[address] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.tell is not None:
            self.tell(True, address, block.size)
        return address

    def free(self, handle: int) -> None:
        """Give a block back to its pool; handle 0 does nothing."""
        if handle == 0:
            return
        block = self._live.pop(handle)
        self.allocated -= block.size
        if self.tell is not None:
            self.tell(False, handle, block.size)
        block.state = _FREE
        block.pool.add_merged(block)

    def empty_cache(self) -> None:
        """Give every wholly free segment (or page, if expandable) back to the device."""
        for pool in self._pools.values():
            if self.expandable:
                for block in list(pool.blocks):
                    self._unmap(block)
                continue
            kept = [block for block in pool.blocks if block.prev is not None or block.next is not None]
            for block in pool.blocks:
                if block.prev is None and block.next is None:
                    self.reserved -= block.size
                    del self._heads[block.address]
            pool.blocks = kept
            pool.keys[:] = [block.size << _SIZE_SHIFT | block.address for block in kept]

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def held(self) -> dict[int, int]:
        """Handle → bytes of every block in use."""
        return {address: block.size for address, block in self._live.items()}

    def state(self, names: Mapping[int, int]) -> object:
        """All that decides what the next requests get: equal states answer equal requests alike. `names`: name → handle."""
        free = {which: list(pool.keys) for which, pool in self._pools.items()}
        unmapped = [(block.address, block.size) for pool in self._pools.values() for block in pool.unmapped]
        return free, unmapped, self.held(), self.reserved, dict(names)

    def segments(self) -> list[tuple[int, int, int]]:
        """(address, size, allocated bytes inside) of every segment by address; if expandable, of every mapped range."""
        found: list[tuple[int, int, int]] = []
        for head in sorted(self._heads):
            block: _Block | None = self._heads[head]
            unmapped_before = True
            while block is not None:
                if block.state != _UNMAPPED:
                    start, size, used = (block.address, 0, 0) if unmapped_before else found.pop()
                    used += block.size if block.state == _USED else 0
                    found.append((start, size + block.size, used))
                unmapped_before = block.state == _UNMAPPED
                block = block.next
        return found

    # -- memory from the device ---------------------------------------------------------------------------------------

    def _new_block(self, pool: _Pool, size: int, nbytes: int) -> _Block:
        """A block, in no list, of at least `size` bytes that the cache cannot provide."""
        block = self._from_device(pool, size)
        if block is None:
            # torch first frees single blocks above max_split_size; with the default (no such size) it skips that step.
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, size)
        if block is None:
            raise OutOfMemory(nbytes, self.reserved, self.allocated, self.limit)
        return block

    def _from_device(self, pool: _Pool, size: int) -> _Block | None:
        if self.expandable:
            return self._from_pages(pool, size)
        size = _segment_size(size)
        return self._segment_at(self._from_driver(size), pool, size, _FREE) if self._reserve(size) else None

    def _from_driver(self, size: int) -> int:
        """Where a new segment lies."""
        for position, (address, left) in enumerate(self._rests):
            if left >= size:
                self._rests[position : position + 1] = [(address + size, left - size)] if left > size else []
                return address
        whole = _round_up(size, _RANGE)
        self._lowest -= whole
        if whole > size:
            insort(self._rests, (self._lowest + size, whole - size))
        return self._lowest

    def _reserve(self, size: int) -> bool:
        """Take physical memory, if there is as much."""
        if self.limit is not None and self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _segment_at(self, address: int, pool: _Pool, size: int, state: int) -> _Block:
        block = self._heads[address] = _Block(address, size, pool, None, None, state)
        return block

    # -- expandable segments; a segment starts at a multiple of its page size -----------------------------------------

    def _from_pages(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest range of addresses that can hold `size`."""
        block = self._lowest_room(pool, size)
        if block.state == _UNMAPPED:
            mapped = self._map(block, min(size, block.size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            after = block.next
            assert after is not None and after.state == _UNMAPPED
            mapped = self._map(after, min(size - block.size, after.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _lowest_room(self, pool: _Pool, size: int) -> _Block:
        """The first of a run of free and unmapped blocks that holds `size`; a new segment if there is none."""
        for block in pool.unmapped:
            before = block.prev
            start = before if before is not None and before.state != _USED else block
            if _has_room(start, size):
                return start
        space = _UNLIMITED_SPACE if self.limit is None else self.limit + self.limit // 8
        address, size = _round_up(self._next_address, pool.page), _round_up(max(space, size), pool.page)
        self._next_address = address + size
        block = self._segment_at(address, pool, size, _UNMAPPED)
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Map the first pages of an unmapped block; the free block they end up in, or None if memory runs out."""
        pool = block.pool
        size = _round_up(size, pool.page)
        if not self._reserve(size):
            return None
        pool.remove(block)
        if size < block.size:
            pool.add(block.cut(size))
        block.state = _FREE
        return pool.add_merged(block)

    def _unmap(self, block: _Block) -> None:
        """Unmap the pages wholly inside a free block; drop the segment if nothing in it is mapped any more."""
        pool = block.pool
        first = _round_up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            inside = block.cut(first - block.address)
            pool.add(block)
            block = inside
        if end < block.address + block.size:
            pool.add(block.cut(end - first))
        block.state = _UNMAPPED
        self.reserved -= end - first
        block = pool.add_merged(block)
        if block.prev is None and block.next is None:
            pool.remove(block)
            del self._heads[block.address]


class LiveAllocator:
    """Memory that is taken when it is needed and given back at once, as a CPU's tensors do: no rounding, no cache."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.tell: Tell | None = None
        self._sizes: dict[int, int] = {}
        self._next_address = _FIRST_ADDRESS

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        address = self._next_address
        self._next_address += max(MIN_BLOCK, _round_up(nbytes, MIN_BLOCK))
        self._sizes[address] = nbytes
        self.allocated += nbytes
        self.reserved = self.allocated
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.peak_reserved = self.allocated
        if self.tell is not None:
            self.tell(True, address, nbytes)
        return address

    def free(self, handle: int) -> None:
        nbytes = self._sizes.pop(handle)
        self.allocated -= nbytes
        self.reserved = self.allocated
        if self.tell is not None:
            self.tell(False, handle, nbytes)

    def reset_peaks(self) -> None:
        self.peak_allocated = self.peak_reserved = self.allocated

    def held(self) -> dict[int, int]:
        return dict(self._sizes)

    def state(self, names: Mapping[int, int]) -> object:
        """As `CachingAllocator.state`: there is no cache, so it does not matter where something is."""
        return self.allocated, set(names)

    def segments(self) -> list[tuple[int, int, int]]:
        return []
