"""Unsigned codes of 2, 3, 4 or 8 bits in a stream of 32-bit words, the way GPTQ and AWQ keep them.

Field i of a row takes bits [i * b, (i + 1) * b) of its words, lowest bit first; 3-bit fields run on from one
word into the next. With 4 and 8 bits that is the order of nibbles and bytes in memory, so nothing is shifted.
compressed-tensors packs a signed code as code + 2^(b-1) by the same rule (quant/packing.py): an unsigned
field is that number already, and words go over unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fields(words: Tensor, num_bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / num_bits]; a field that no whole row of words holds is left out."""
    octets = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return octets
    if num_bits == 4:
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = (octets.unsqueeze(-1) >> shifts & 1).flatten(-2)
    count = bits.shape[1] // num_bits
    whole = bits[:, : count * num_bits].reshape(-1, count, num_bits)
    return (whole << shifts[:num_bits]).sum(-1, dtype=torch.uint8)


def words(codes: Tensor, num_bits: int) -> Tensor:
    """uint8 [R, C] below 2^num_bits -> int32 [R, C * num_bits / 32]; 4 or 8 bits, C fills whole words."""
    assert codes.dtype is torch.uint8
    assert num_bits in (4, 8)
    octets = codes if num_bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    flat = octets.contiguous().flatten()  # one row may pass for contiguous and still refuse the view
    return flat.view(torch.int32).view(octets.shape[0], -1)
