"""Product with 4-bit weights in groups along the input; activations stay as they are: the meaning.

    w[n, k] = (q[n, k] - zero[n, g]) * scale[n, g]        g = k // group size, q and zero in 0..15

Kernel layout: two codes a byte, the even k in the low nibble, which is the checkpoint's order of bits too.
"""

import torch
from torch import Tensor


def unpack_nibbles(weight: Tensor) -> Tensor:
    """uint8 [N, K/2] -> codes 0..15, uint8 [N, K]."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [N, K] with even K -> uint8 [N, K/2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def dequantize_w4(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 [N, K] of weight uint8 [N, K/2], scale [N, G] and zero uint8 [N, G]."""
    steps = unpack_nibbles(weight).float().unflatten(-1, (scale.shape[-1], -1)) - zero.unsqueeze(-1)
    return (steps * scale.float().unsqueeze(-1)).flatten(-2)


def w4a16(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [T, K], weight uint8 [N, K/2], scale and zero uint8 [N, G] -> [T, N] in x's dtype; float32 sum."""
    return (x.float() @ dequantize_w4(weight, scale, zero).T).to(x.dtype)
