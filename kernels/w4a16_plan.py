"""How a product with 4-bit weights is cut into programs: sizes and shares, without a GPU.

A row of the table (or of `FORMULA`) holds

    BM, BN        tokens and rows of weight of an output tile
    MODE          where the scales go (see w4a16_triton.py)
    UNROLL        tiles of 128 inputs a step; the loop's own cost is shared
    WARPS STAGES  of the kernel; TMA: tokens come by the copy engine; PDL: it starts before the last one ends
    REGISTERS     of a thread at most, or 0: with fewer, a core holds one program more
    SLOTS         programs that the GPU holds at once: as many tiles as fill it evenly are whole
    SPLIT, CUT    the rest are cut along the inputs into SPLIT equal pieces or, with CUT, in two at CUT / 32
    DEQUANTIZE    instead of all these: unpack the weight, then torch.mm

28672 rows in tiles of 128 on 132 multiprocessors show why: 224 tiles would take two rounds and leave 40 idle
in the second. So 132 are whole, 92 are cut at 22 / 32, and those 40 take the short pieces, two or three each.
"""

from __future__ import annotations

from typing import NamedTuple

from qinfer.kernels.tiles import Declined, Tile
from qinfer.kernels.w4a16 import INPUTS, PAD_ROWS

MAX_TILES = 1 << 18  # of output, whose pieces are counted

# Eight tokens or fewer take the older tensor instruction, which is content with eight columns.
FORMULA: tuple[tuple[int, Tile], ...] = (
    (8, {"BM": 8, "BN": 64, "MODE": 1, "UNROLL": 1, "WARPS": 2, "STAGES": 6}),
    (16, {"BM": 16, "BN": 128, "MODE": 1, "UNROLL": 1, "WARPS": 4, "STAGES": 5}),
    (32, {"BM": 32, "BN": 128, "MODE": 1, "UNROLL": 1, "WARPS": 4, "STAGES": 4}),
    (64, {"BM": 64, "BN": 128, "MODE": 0, "UNROLL": 1, "WARPS": 4, "STAGES": 4}),
    (128, {"BM": 128, "BN": 64, "MODE": 0, "UNROLL": 1, "WARPS": 4, "STAGES": 3}),
    (1024, {"BM": 256, "BN": 128, "MODE": 0, "UNROLL": 1, "WARPS": 8, "STAGES": 3}),
)


def formula(m: int, n: int, k: int, cores: int) -> Tile:
    """The tile where nobody measured: the H200's usual ones; inputs are cut until the GPU is full."""
    shape = next((shape for upper, shape in FORMULA if m <= upper), None)
    if shape is None:
        return {"DEQUANTIZE": 1}
    slots = (1 if m > 128 else 2) * cores
    tiles = -(-n // shape["BN"]) * -(-m // shape["BM"])
    split = max(1, min(slots // tiles, 16, k // (2 * INPUTS)))
    rest = {"TMA": int(m > 32), "PDL": 1, "REGISTERS": 0, "SLOTS": 1, "SPLIT": split, "CUT": 0}
    return {**shape, **rest}


class Launch(NamedTuple):
    """What a row of the table means for a size."""

    rows: int  # of a tile: BN, or less where that does not divide the padded weight
    blocks: int  # of tokens
    whole: int  # tiles
    split: int
    cut: int  # steps of the first of two pieces, or 0
    programs: int


def plan(config: Tile, m: int, n: int, k: int) -> Launch:
    """The programs for M tokens and a weight [n, k]; Declined where the tiles are too many to count."""
    rows = config["BN"] if -(-n // PAD_ROWS) * PAD_ROWS % config["BN"] == 0 else PAD_ROWS
    blocks = -(-m // config["BM"])
    tiles = -(-n // rows) * blocks
    if tiles > MAX_TILES:
        raise Declined(f"{tiles} tiles of output are more than the {MAX_TILES} that are counted")
    steps = -(-k // (INPUTS * config["UNROLL"]))
    split = min(config["SPLIT"], steps)
    whole = tiles if split == 1 else tiles // config["SLOTS"] * config["SLOTS"]
    cut = max(1, steps * config["CUT"] // 32) if config["CUT"] and split == 2 else 0
    return Launch(rows, blocks, whole, split, cut, whole + (tiles - whole) * split)
