"""Which line is next: the longest of a block, none from beyond two blocks, none twice, none forgotten."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.batch.lines import Line
from qinfer.batch.window import Window


class Disk:
    """What a window asks of its output."""

    def __init__(self, first=0):
        self.first, self.held = first, 0
        self.done = set()

    def put(self, place):
        self.done.add(place)
        while self.first in self.done:
            self.first += 1


def lines(lengths, size=10):
    for place, length in enumerate(lengths):
        yield Line(place, place + 1, str(place), "/v1/completions", {"max_tokens": length}, size)


def test_the_longest_of_a_block_comes_first():
    async def ask():
        disk = Disk()
        window = Window(lines([5, 9, 9, 1, 30, 2, 40]), disk, block_lines=4)
        first = [(await window.next()).place for _ in range(4)]
        assert first == [1, 2, 0, 3]
        second = [(await window.next()).place for _ in range(3)]
        for place in first:
            disk.put(place)
        return first + second + [await window.next()]

    assert asyncio.run(ask()) == [1, 2, 0, 3, 6, 4, 5, None]


def test_a_third_block_waits_for_the_first():
    async def ask():
        disk = Disk()
        window = Window(lines([1] * 6), disk, block_lines=2)
        asked = [(await window.next()).place for _ in range(4)]
        third = asyncio.ensure_future(window.next())
        for place in (0, 3):
            disk.put(place)
            window.wrote()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not third.done()
        disk.put(1)
        window.wrote()
        return asked, (await third).place

    assert asyncio.run(ask()) == ([0, 1, 2, 3], 4)


def test_while_much_is_held_lines_keep_their_order():
    async def ask():
        disk = Disk()
        window = Window(lines([1, 2, 3, 4]), disk, block_lines=4, held_bytes=100)
        asked = [(await window.next()).place]
        disk.held = 101
        asked += [(await window.next()).place for _ in range(2)]
        disk.held = 100
        return [*asked, (await window.next()).place, await window.next()]

    assert asyncio.run(ask()) == [3, 0, 1, 2, None]


@given(
    lengths=st.lists(st.integers(1, 9), max_size=40),
    workers=st.integers(1, 7),
    block=st.integers(1, 6),
    block_bytes=st.sampled_from([10, 25, 1000]),
    data=st.data(),
)
def test_every_line_once_and_at_most_two_blocks_at_hand(lengths, workers, block, block_bytes, data):
    asked = []
    pulled = 0

    def counted():
        nonlocal pulled
        for line in lines(lengths):
            pulled += 1
            yield line

    async def work(window, disk):
        while (line := await window.next()) is not None:
            asked.append(line.place)
            assert pulled - disk.first <= 2 * block + 1  # islice looks at no line more than a block has
            for _ in range(data.draw(st.integers(0, 3))):
                await asyncio.sleep(0)
            disk.put(line.place)
            window.wrote()

    async def run():
        disk = Disk()
        window = Window(counted(), disk, block_lines=block, block_bytes=block_bytes)
        await asyncio.gather(*(work(window, disk) for _ in range(workers)))

    asyncio.run(run())
    assert sorted(asked) == list(range(len(lengths)))


def test_a_block_ends_at_its_bytes():
    async def ask():
        window = Window(lines([1, 5, 9], size=60), Disk(), block_lines=100, block_bytes=100)
        return [(await window.next()).place for _ in range(2)]

    assert asyncio.run(ask()) == [1, 0]


def test_lines_of_about_one_length_keep_their_order():
    async def ask():
        window = Window(lines([100, 101, 99, 108, 200, 104]), Disk(), block_lines=6)
        return [(await window.next()).place for _ in range(6)]

    assert asyncio.run(ask()) == [4, 0, 1, 2, 3, 5]


@pytest.mark.parametrize("count", [0, 1])
def test_the_end(count):
    async def ask():
        window = Window(lines([1] * count), Disk(), block_lines=2)
        return [await window.next() for _ in range(count + 2)]

    assert [line is None for line in asyncio.run(ask())] == [False] * count + [True, True]
