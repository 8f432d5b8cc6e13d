"""How 4- and 8-bit codes share 32-bit words in a `pack-quantized` checkpoint.

A code is signed, from -2^(b-1) to 2^(b-1)-1; adding 2^(b-1) makes it unsigned. Element i of a row takes bits
[i*b, (i+1)*b) of a stream of little-endian words, so for 4 bits the first code is the lowest nibble:

    b = 4   word w:   bit 31                                  bit 0
                      | 8w+7 | 8w+6 | 8w+5 | 8w+4 | 8w+3 | 8w+2 | 8w+1 | 8w |
            in bytes: | 8w, 8w+1 | 8w+2, 8w+3 | ...     (low nibble first)
    b = 8   word w:   | 4w+3 | 4w+2 | 4w+1 | 4w |           one code a byte

A row whose length fills no whole word is padded with zero bits. Weights are packed along a row (dim 1). Zero
points of an asymmetric format are packed by the same rule down a column (dim 0): [N, G] -> [ceil(N*b/32), G].
Format: compressed-tensors `pack-quantized`.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def packed_length(length: int, num_bits: int) -> int:
    """Words that `length` codes of `num_bits` bits take."""
    return -(-length * num_bits // WORD_BITS)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Packs signed codes, int8 [R, C], along the rows into int32 [R, ceil(C*b/32)]; b is 4 or 8."""
    assert codes.dtype is torch.int8
    assert num_bits in (4, 8)
    rows, columns = codes.shape
    per_word = WORD_BITS // num_bits
    unsigned = torch.zeros(
        rows, packed_length(columns, num_bits) * per_word, dtype=torch.uint8, device=codes.device
    )
    unsigned[:, :columns] = codes.view(torch.uint8) + (1 << (num_bits - 1))  # modulo 256
    if num_bits == 4:
        unsigned = unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
    return unsigned.view(torch.int32)


def unpack(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """Signed codes, int8 [R, columns], of int32 [R, words]; the padding is dropped."""
    assert packed.dtype is torch.int32
    assert num_bits in (4, 8)
    unsigned = packed.contiguous().view(torch.uint8)
    if num_bits == 4:
        unsigned = torch.stack((unsigned & 15, unsigned >> 4), -1).flatten(1)
    return (unsigned[:, :columns] - (1 << (num_bits - 1))).view(torch.int8)


def pack_zero_points(zero_points: Tensor, num_bits: int) -> Tensor:
    """Zero points int8 [N, G] -> int32 [ceil(N*b/32), G]."""
    return pack(zero_points.T.contiguous(), num_bits).T.contiguous()


def unpack_zero_points(packed: Tensor, num_bits: int, rows: int) -> Tensor:
    """Zero points int8 [rows, G] of int32 [ceil(rows*b/32), G]."""
    return unpack(packed.T.contiguous(), num_bits, rows).T.contiguous()
