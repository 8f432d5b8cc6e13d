"""Product of `w4a16` on the CPU: torch's int4 op for few rows, weights unpacked per call for more.

torch's op reads a layout of its own and w = (q - 8) * scale + offset, so a zero point becomes
offset = (8 - zero) * scale, rounded to bfloat16: at most scale / 64 off, less than the rounding of w itself
to bfloat16 (measured against float64: 0.0019 relative, a bfloat16 linear on the unpacked weight 0.0023).

For more rows the weight is unpacked from `nibbles`, uint8 [K, N/2], inputs down the rows, with output n < N/2
in the low nibble and n + N/2 in the high one:

           one byte of row k:   bit 7 | q[n + N/2, k] | q[n, k] | bit 0

So nibbles are split without interleaving, and a group's zero and scale are broadcast along contiguous
outputs, which vectorises (along the inputs of a group the same arithmetic took three times as long).

The two together hold one byte a weight. Measured on one core of a Xeon with AMX, us, weight 1536 x 576 in
groups of 64, bfloat16, at 1 / 4 / 8 / 16 / 64 rows: int4 op 74 / 120 / 250 / 505 / 2275; unpacking and
multiplying 1000 to 1160 for any of these; a dense bfloat16 linear 150 / 141 / 146 / 152 / 252.
"""

import torch
from torch import Tensor

from qinfer.kernels.linear_cpu import linear
from qinfer.kernels.w4a16 import unpack_nibbles

MAX_ROWS_OF_INT4_OP = 32


def pack(weight: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """From the layout of `w4a16`: `nibbles` uint8 [K, N/2], `scale` and `zero` int8 [G, N].

    With bfloat16 scales and N a multiple of 16 also what torch's op wants: `int4`, its packing, and
    `scale_offset` bfloat16 [G, N, 2].
    """
    codes = unpack_nibbles(weight)
    assert codes.shape[0] % 2 == 0, "outputs are halved into the nibbles of a byte"
    half = codes.shape[0] // 2
    packed = {
        "nibbles": (codes[:half] | (codes[half:] << 4)).T.contiguous(),
        "scale": scale.T.contiguous(),
        "zero": zero.T.to(torch.int8).contiguous(),
    }
    if scale.dtype is torch.bfloat16 and codes.shape[0] % 16 == 0:
        steps = packed["scale"].float()
        packed["int4"] = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        packed["scale_offset"] = torch.stack((steps, (8 - packed["zero"]) * steps), -1).to(torch.bfloat16)
    return packed


def w4a16_cpu(
    x: Tensor,
    nibbles: Tensor,
    scale: Tensor,
    zero: Tensor,
    int4: Tensor | None = None,
    scale_offset: Tensor | None = None,
) -> Tensor:
    """x [T, K] times the weight made ready by `pack` -> [T, N] in x's dtype."""
    if int4 is not None and x.shape[0] <= MAX_ROWS_OF_INT4_OP:
        assert scale_offset is not None
        group_size = x.shape[1] // scale.shape[0]
        return torch._weight_int4pack_mm_for_cpu(x, int4, group_size, scale_offset)
    return linear(x, unpack(nibbles, scale, zero).T)


def unpack(nibbles: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weight transposed, [K, N], in scale's dtype."""
    groups, outputs = scale.shape
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=1).view(torch.int8).view(groups, -1, outputs)
    return codes.sub_(zero.unsqueeze(1)).to(scale.dtype).mul_(scale.unsqueeze(1)).view(-1, outputs)
