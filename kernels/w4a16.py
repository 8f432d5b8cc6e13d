"""Product with 4-bit weights in groups along the input; activations stay as they are: the meaning.

    w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g]        g = k // group size, q and zero in 0..15

Kernel layout: two codes a byte, the even k in the low nibble, which is the checkpoint's order of bits too.

On a GPU the codes lie in fragment order: where a Hopper tensor core wants its operand. There, of 16 inputs of
a row, thread t of 0..3 holds inputs 2t, 2t+1, 2t+8 and 2t+9. So a word holds, for one t and one block of 32
inputs, the eight codes of that thread, in nibbles that masks and shifts turn into pairs of 16-bit floats:

    input of a tile = 32 block + 16 s + 8 h + 2 t + p   is nibble   (2 s + h) + 4 p   of word   4 t + block

A tile is 64 rows of 128 inputs, 4 KiB: words int32 [N/64, K/128, 64, 16]. Whoever loads it 16 bytes a thread
has its operand in registers and moves nothing. `scale_zero` int32 [G, N] holds a scale's bits low and, high,
the bits of zero plus the power of two that unpacking by masks leaves on a code (`MAGIC`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS, INPUTS = 64, 128  # of a tile
PAD_ROWS = 128  # rows are padded to two tiles, so that a kernel may take them by two
# A code or-ed into the low mantissa bits of this power of two is exactly their sum.
MAGIC = {torch.bfloat16: 128, torch.float16: 1024}


def unpack_nibbles(weight: Tensor) -> Tensor:
    """uint8 [N, K/2] -> codes 0..15, uint8 [N, K]."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [N, K] with even K -> uint8 [N, K/2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def dequantize_w4(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 [N, K] of weight uint8 [N, K/2], scale [N, G] and zero uint8 [N, G]."""
    steps = unpack_nibbles(weight).float().view(*scale.shape, -1) - zero.unsqueeze(-1)
    return (steps * scale.float().unsqueeze(-1)).flatten(-2)


def w4a16(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [T, K], weight uint8 [N, K/2], scale and zero uint8 [N, G] -> [T, N] in x's dtype; float32 sum."""
    return (x.float() @ dequantize_w4(weight, scale, zero).T).to(x.dtype)


def pack_fragments(weight: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """`words` and `scale_zero` of weight uint8 [N, K/2], scale bfloat16 or float16 and zero uint8 [N, G].

    `words` is padded with zero codes to whole tiles. The memory of `scale_zero` is padded too, with zeros,
    but its shape stays [G, N]: it says what was padded.
    """
    rows, groups = scale.shape
    inputs = 2 * weight.shape[1]
    tiles = pad(weight, (0, (-inputs % INPUTS) // 2, 0, -rows % PAD_ROWS))
    # bytes: [tile row, row, tile, block, s, h, t]; the two nibbles of a byte are p = 0, 1
    pairs = tiles.view(tiles.shape[0] // ROWS, ROWS, -1, 4, 4, 4).permute(4, 0, 2, 1, 5, 3)
    words = torch.zeros(pairs.shape[1:], dtype=torch.int32, device=weight.device)
    for i, byte in enumerate(pairs):  # i = 2 s + h
        wide = byte.int()
        words |= ((wide & 15) | ((wide & 240) << 12)) << (4 * i)
    magic_zero = (zero + float(MAGIC[scale.dtype])).to(scale.dtype)
    both = (_bits(magic_zero) << 16 | _bits(scale)).T
    # A group that ends inside the padded last tile is followed by groups of zeros.
    padding = tiles.shape[1] * 2 * groups // inputs - groups
    scale_zero = pad(both, (0, -rows % PAD_ROWS, 0, padding)).contiguous()
    return {"words": words.flatten(-2), "scale_zero": scale_zero[:groups, :rows]}


def unpack_fragments(
    words: Tensor, scale_zero: Tensor, inputs: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """weight, scale and zero as `pack_fragments` got them, for scales of `dtype`."""
    pairs = words.view(*words.shape[:3], 4, 4).permute(0, 2, 1, 4, 3)  # [tile row, row, tile, block, t]
    codes = torch.stack([pairs >> (4 * i) for i in range(4)], dim=4)
    tiles = ((codes & 15) | ((codes >> 12) & 240)).to(torch.uint8)
    rows = scale_zero.shape[1]
    weight = tiles.reshape(tiles.shape[0] * ROWS, -1)[:rows, : inputs // 2].contiguous()
    scale, magic_zero = (half.T.to(torch.int16).view(dtype) for half in (scale_zero, scale_zero >> 16))
    return weight, scale.contiguous(), (magic_zero.float() - MAGIC[dtype]).to(torch.uint8).contiguous()


def w4a16_fragments(x: Tensor, words: Tensor, scale_zero: Tensor) -> Tensor:
    """`w4a16` of x [T, K] in the scales' dtype on what `pack_fragments` made -> [T, N] in x's dtype."""
    return w4a16(x, *unpack_fragments(words, scale_zero, x.shape[1], x.dtype))


def w4a16_parts(x: Tensor, words: Tensor, scale_zero: Tensor) -> Tensor:
    """`w4a16_fragments` for an op that adds up partial sums; there is one here, and a twin may leave more."""
    return w4a16_fragments(x, words, scale_zero)


def _bits(x: Tensor) -> Tensor:
    """The 16 bits of each element, in int32."""
    return x.contiguous().view(torch.int16).int() & 0xFFFF
