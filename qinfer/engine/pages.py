"""Pages of the KV cache as numbers: who holds which, what they contain, which to take next. No torch.

A page is in one of three states: held by one or more sequences (counted), free with nothing of value, or free
but still holding a full page of a known prefix. The last kind is the prefix cache. It costs nothing: such a
page is taken for something else as soon as no blank one is left, the longest unused first.

What a full page contains is named by a SHA-256 over the name of the page before it, its token ids (8 bytes
each) and, for the first page, the request's salt. Equal names mean equal prefixes of equal salt, so a hit
needs no comparison, and nobody can craft a collision.

Pages of an ended sequence are released from its tail to its head, so that of a chain the tail is reused
first: what is left is still a prefix. Page 0 is never handed out; padding may point there.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple


def page_key(parent: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Name of a full page [32 bytes]: parent is the name of the page before it, b"" for the first."""
    digest = sha256(parent)
    digest.update(array("q", token_ids).tobytes())
    if not parent:
        digest.update(salt.encode())
    return digest.digest()


class PageMap(NamedTuple):
    """What the pages hold, in order, summed over cells of `pages_per_cell` (the last may have fewer)."""

    num_pages: int
    pages_per_cell: int
    held: list[int]  # pages of a cell that sequences hold
    shared: list[int]  # of those, by more than one
    cached: list[int]  # free pages that still hold a known prefix


class PagePool:
    """`num_pages` pages, numbered from 1, of `page_size` tokens each."""

    def __init__(self, num_pages: int, page_size: int, *, caching: bool = True) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = caching
        self._holders = [0] * (num_pages + 1)
        self._blank = list(range(num_pages, 0, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # free pages with a key, longest unused first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out."""
        return len(self._blank) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest known beginning of a chain of keys; nothing is held by asking."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds: holding them makes `num_free` smaller by as much."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds one holder to each of these pages, which `find` has just returned."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` pages to a new holder; the caller has made sure of `num_free`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Names the contents of a full page that is held, unless another page has that name already."""
        assert self._holders[page] > 0
        if self.caching and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page of a sequence, the tail first."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def forget(self) -> None:
        """Empties the prefix cache; pages that are held stay with their holders, without a name."""
        self._blank += self._cached
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def survey(self, max_cells: int) -> PageMap:
        """A map of at most `max_cells` cells, for a person to look at."""
        size = -(-self.num_pages // max_cells)
        starts = range(1, self.num_pages + 1, size)
        cells = [self._holders[start : start + size] for start in starts]
        cached = [0] * len(cells)
        for page in self._cached:
            cached[(page - 1) // size] += 1
        held = [len(cell) - cell.count(0) for cell in cells]
        shared = [few - cell.count(1) for few, cell in zip(held, cells, strict=True)]
        return PageMap(self.num_pages, size, held, shared, cached)

    def check(self, holders: Iterable[Sequence[int]] = ()) -> None:
        """Asserts that the books are in order when exactly these page lists are held."""
        counts = Counter(page for pages in holders for page in pages)
        assert counts[0] == 0, "page 0 was handed out"
        held = {page: count for page, count in enumerate(self._holders) if count}
        assert held == dict(counts), f"held {held}, expected {dict(counts)}"
        free = [*self._blank, *self._cached]
        assert len(free) + len(held) == self.num_pages, "a page is lost"
        assert len(set(free)) == len(free), "a page is free twice"
        assert held.keys().isdisjoint(free), "a held page is free"
        assert {key: page for page, key in self._key_of.items()} == self._page_of, "keys and pages disagree"
        assert self._cached.keys() <= self._key_of.keys(), "a cached page has no key"
        assert self._key_of.keys().isdisjoint(self._blank), "a blank page has a key"
