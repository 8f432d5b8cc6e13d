"""Pieces of products: every step of every tile is some program's, once, and the adding kernel finds them."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from qinfer.kernels.pieces import MOST, Cut, cut
from qinfer.kernels.pieces_triton import add_up, workspace
from qinfer.kernels.tiles import Declined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shares(how: Cut, tiles: int, steps: int) -> list[tuple[int, int]]:
    """Of each program: where its steps begin and end, over all tiles; written apart from the kernel."""
    line = (tiles - how.whole) * steps
    lengths = [steps] * how.whole
    lengths += [line // how.pieces + (piece < line % how.pieces) for piece in range(how.pieces)]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


@given(*(st.integers(1, high) for high in (400, 120, 300, 700)))
@settings(max_examples=200)
def test_programs_share_the_steps(tiles: int, steps: int, slots: int, pieces: int) -> None:
    how = cut(tiles, steps, slots, pieces)
    found = shares(how, tiles, steps)
    assert len(found) == how.programs
    assert found[-1][1] == tiles * steps
    for low, high in found:
        assert low < high
        assert (high - 1) // steps - low // steps <= 1  # two tiles at most
    if how.pieces:
        assert tiles - how.whole < how.pieces <= MOST * (tiles - how.whole)
        lengths = {high - low for low, high in found[how.whole :]}
        assert max(lengths) - min(lengths) <= 1
    else:
        assert how.whole == tiles


def test_too_many_steps() -> None:
    with pytest.raises(Declined, match="31 bits"):
        cut(1 << 20, 1 << 11, 1, 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "blocks", "steps", "slots", "pieces"),
    [
        (5, 72, 1, 7, 9, 3),
        (5, 72, 1, 7, 9, 14),
        (5, 200, 1, 5, 3, 3),
        (30, 130, 2, 3, 4, 8),
        (1, 64, 1, 40, 9, 16),
    ],
)
def test_adding_up(m: int, n: int, blocks: int, steps: int, slots: int, pieces: int, bias: bool) -> None:
    """Each program's sum of ones is the number of its steps in a tile, so a tile's total is `steps`."""
    bm, bn, tiles = 16, 64, -(-n // 64) * blocks
    how = cut(tiles, steps, slots, pieces)
    parts = workspace(how, bm * bn, torch.device(DEVICE)).fill_(float("nan")).view(how.pieces, 2, -1)
    for piece, (low, high) in enumerate(shares(how, tiles, steps)[how.whole :]):
        for second, tile in enumerate(range(low // steps, (high - 1) // steps + 1)):
            parts[piece, second] = min(high, (tile + 1) * steps) - max(low, tile * steps)
    out = torch.full((m, n), -1.0, device=DEVICE)
    row = torch.arange(n, device=DEVICE)
    add_up(parts, row.half() if bias else None, out, how, steps, blocks, (bm, bn))
    tile_of = row // bn * blocks + torch.arange(m, device=DEVICE)[:, None] // bm
    expected: Tensor = (steps + row * bias).float().expand(m, n)
    assert torch.equal(out, torch.where(tile_of < how.whole, -1.0, expected))
