"""Pages of a KV cache by number: which are free, who holds which, and which full ones another sequence may share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class Pages:
    """A fixed count of pages, each for `size` tokens of one sequence in all layers.

    A full page may have a key: that of all tokens up to its end. A sequence that begins with the same tokens holds the same
    page. Pages that nobody holds any more keep their key until they are needed, those given back first before others.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Held by nobody, and still known by a key; the longest unused first."""
        self._key: dict[int, Hashable] = {}
        self._page: dict[Hashable, int] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """So many pages; there must be as many."""
        if count > self.available:
            raise ValueError(f"{count} pages of {self.available}")
        found = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page[self._key.pop(page)]
            self._holders[page] = 1
            found.append(page)
        return found

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less of each. The last of a sequence's pages goes first: what begins a prompt is shared most."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._free.append(page)

    def shared(self, keys: Sequence[Hashable]) -> list[int]:
        """The pages of as many first keys as are known; they are held once more."""
        found = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            found.append(page)
        return found

    def name(self, page: int, key: Hashable) -> None:
        """A page is full and computed; the first of those with the same tokens is found by their key."""
        if key not in self._page and page not in self._key:
            self._key[page], self._page[key] = key, page

    def forget(self) -> None:
        """No page is found by a key any more, as after new weights."""
        self._free.extend(self._idle)
        for page in self._idle:
            self._holders[page] = 0
        self._idle.clear()
        self._key.clear()
        self._page.clear()
