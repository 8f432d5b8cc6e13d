"""The page pool: cases of section 2 that are about pages, and a state machine against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qinfer.engine.pages import PagePool, page_key


def chain(tokens: list[int], size: int = 16, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) // size * size, size):
        keys.append(page_key(keys[-1] if keys else b"", tokens[start : start + size], salt))
    return keys


def test_k01_ids_beyond_a_byte_have_their_own_key() -> None:
    assert bytes(t & 255 for t in [65] * 16) == bytes(t & 255 for t in [321] * 16)
    assert chain([65] * 16) != chain([321] * 16)


def test_k02_keys_are_sha256_and_rolling_collisions_are_none() -> None:
    def rolling(tokens: list[int]) -> int:
        value = 0
        for token in tokens:
            value = value * 31 + token
        return value

    first = [100] * 16
    second = [100] * 16
    second[3], second[4] = 99, 131
    assert rolling(first) == rolling(second)
    assert chain(first) != chain(second)
    key = chain(first)[0]
    assert isinstance(key, bytes)
    assert len(key) == 32


def test_keys_depend_on_parent_and_salt() -> None:
    tokens = list(range(16))
    assert chain(tokens * 2)[0] == chain(tokens)[0]
    assert chain(tokens * 2)[1] != chain(tokens)[0]
    assert chain(tokens, salt="a") != chain(tokens, salt="b") != chain(tokens)


def test_k08_the_tail_of_a_chain_is_evicted_first() -> None:
    pool = PagePool(3, 16)
    keys = chain(list(range(48)))
    pages = pool.allocate(3)
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    for _ in range(200):
        other = pool.allocate(1)
        pool.release(other)
        hit = pool.find(keys)
        assert hit == pages[:2]
        pool.hold(hit)
        tail = pool.allocate(1)
        pool.publish(tail[0], keys[2])
        pool.release(hit + tail)
        pool.check()


def test_a_page_without_content_is_taken_before_a_cached_one() -> None:
    pool = PagePool(4, 16)
    cached = pool.allocate(1)
    pool.publish(cached[0], b"k" * 32)
    pool.release(cached)
    taken = pool.allocate(3)
    assert cached[0] not in taken
    assert pool.find([b"k" * 32]) == cached


def test_shared_page_is_free_when_its_last_holder_leaves() -> None:
    pool = PagePool(2, 16)
    page = pool.allocate(1)
    pool.publish(page[0], b"k" * 32)
    pool.hold(page)
    pool.release(page)
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release(page)


def test_check_sees_a_lost_page() -> None:
    pool = PagePool(3, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check()


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(2, 16, caching=False)
    page = pool.allocate(1)
    pool.publish(page[0], b"k" * 32)
    assert pool.find([b"k" * 32]) == []


class PagesMachine(RuleBasedStateMachine):
    """Sequences from a tiny alphabet come, grow and go; contents are what was last published in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, 2)
        self.live: list[tuple[list[int], list[int]]] = []  # (tokens, pages)
        self.content: dict[int, tuple[int, ...]] = {}  # page -> whole prefix that it ends

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, tokens: list[int]) -> None:
        keys = chain(tokens, 2)
        hit = self.pool.find(keys)
        for i, page in enumerate(hit):
            assert self.content[page] == tuple(tokens[: 2 * (i + 1)]), "a hit on other tokens"
        new = self.pool.pages_for(len(tokens)) - len(hit)
        if new > self.pool.num_free - self.pool.num_idle(hit):
            return
        self.pool.hold(hit)
        pages = hit + self.pool.allocate(new)
        for page in pages[len(hit) :]:
            self.content.pop(page, None)
        self._publish(tokens, pages)
        self.live.append((tokens, pages))

    def _publish(self, tokens: list[int], pages: list[int]) -> None:
        for i, key in enumerate(chain(tokens, 2)):
            self.pool.publish(pages[i], key)
            self.content[pages[i]] = tuple(tokens[: 2 * (i + 1)])

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        tokens, pages = self.live[which % len(self.live)]
        if self.pool.pages_for(len(tokens) + 1) > len(pages):
            if not self.pool.num_free:
                return
            pages += self.pool.allocate(1)
            self.content.pop(pages[-1], None)
        tokens.append(token)
        self._publish(tokens, pages)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        _, pages = self.live.pop(which % len(self.live))
        self.pool.release(pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def books_are_in_order(self) -> None:
        self.pool.check([pages for _, pages in self.live])
        held = {page for _, pages in self.live for page in pages}
        assert self.pool.num_free == 8 - len(held)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_survey_counts_every_page_once() -> None:
    pool = PagePool(10, 4)
    pages = pool.allocate(7)
    pool.hold(pages[:2])
    for page in pages[4:]:
        pool.publish(page, bytes([page]))
    pool.release(pages[4:])
    assert pages == [1, 2, 3, 4, 5, 6, 7]
    whole = pool.survey(100)
    assert (whole.num_pages, whole.pages_per_cell) == (10, 1)
    assert whole.held == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert whole.shared == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert whole.cached == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    coarse = pool.survey(4)
    assert (coarse.pages_per_cell, coarse.held, coarse.shared, coarse.cached) == (
        3,
        [3, 1, 0, 0],
        [2, 0, 0, 0],
        [0, 2, 1, 0],
    )
