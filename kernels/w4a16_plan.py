"""How a product with 4-bit weights is cut into programs: sizes and shares, without a GPU.

A row of the table (or of `FORMULA`) holds

    BM, BN        tokens and rows of weight of an output tile
    MODE          where the scales go (see w4a16_product_triton.py)
    UNROLL        tiles of 128 inputs a step; the loop's own cost is shared
    WARPS STAGES  of the kernel; TMA: tokens come by the copy engine
    REGISTERS     of a thread at most, or 0: with fewer, a core holds one program more
    AHEAD         tiles of 128 inputs that a program asks the L2 cache for before it waits for the tokens
    SLOTS PIECES  as many tiles as fill SLOTS evenly are whole, PIECES programs share the others (pieces.py)
    EARLY         when the next kernel may start and wait: 1 at once, 2 after the last multiplication
    BY_WARPS      w4a16_warps_triton.py's kernel; of the above it has all but WARPS, TMA, REGISTERS and AHEAD
    QUARTERS      w4a16_quarters_triton.py's kernel, with BM, MODE, STAGES and EARLY
    DEQUANTIZE    instead of all these: unpack the weight, then torch.mm
"""

from __future__ import annotations

from typing import NamedTuple

from qinfer.kernels.pieces import Cut, cut
from qinfer.kernels.tiles import Tile
from qinfer.kernels.w4a16 import INPUTS, PAD_ROWS

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
    """The tile where nobody measured: the H200's usual ones; tiles are cut where they do not fill the GPU."""
    shape = next((shape for upper, shape in FORMULA if m <= upper), None)
    if shape is None:
        return {"DEQUANTIZE": 1}
    held = cores if m > 128 else 2 * cores  # programs at once
    tiles = -(-n // shape["BN"]) * -(-m // shape["BM"])
    pieces = min(held, tiles * k // (2 * INPUTS)) if tiles < 0.8 * held else 0
    rest = {
        "TMA": int(m > 32),
        "REGISTERS": 0,
        "AHEAD": 8,
        "EARLY": 2,
        "SLOTS": held,
        "PIECES": pieces,
    }
    return {**shape, **rest}


class Launch(NamedTuple):
    """What a row of the table means for a size."""

    rows: int  # of a tile: BN, or less where that does not divide the padded weight
    blocks: int  # of tokens
    steps: int  # of a tile
    cut: Cut

    def equal_parts(self, n: int) -> int:
        """Into how many pieces of equal length every tile of a weight of n rows is cut; 0 if it is not so."""
        return self.cut.equal_parts(-(-n // self.rows) * self.blocks, self.steps)


def plan(config: Tile, m: int, n: int, k: int) -> Launch:
    """The programs for M tokens and a weight [n, k]; Declined where their steps are too many to count."""
    fits = "BY_WARPS" in config or -(-n // PAD_ROWS) * PAD_ROWS % config["BN"] == 0
    rows = config["BN"] if fits else PAD_ROWS
    blocks, steps = -(-m // config["BM"]), -(-k // (INPUTS * config.get("UNROLL", 1)))
    return Launch(rows, blocks, steps, cut(-(-n // rows) * blocks, steps, config["SLOTS"], config["PIECES"]))
