"""What GPTQ's and AWQ's layouts have in common, once their bits are unpacked, and which scheme runs it.

    w[n, k] = scale[n, g(k)] * (code[n, k] - zero[n, g(k)])        code, zero: unsigned, b bits

Four bits in groups of neighbours are `w4a16`: exactly, whatever the group, for one of 256 inputs (or of a
whole row) is two (or more) of 128 that have the same scale. Groups of inputs that are not neighbours, GPTQ's
act-order, are `w4a16` in another order of the inputs. Eight symmetric bits with a scale for a row are
`w8a16-int8`. The rest has no scheme and is dequantized.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qinfer.checkpoint.words import words
from qinfer.config_types import MAX_COUNT
from qinfer.errors import CheckpointError
from qinfer.quant import GROUP_SIZES, W4A16, Dense, Scheme, W4A16Ordered, W8A16Int8


class GroupedInts(NamedTuple):
    """codes uint8 [N, K], scale float [N, G], zero uint8 [N, G]; group of each input int [K]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group: Tensor

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        group = self.group.long()
        steps = self.codes.float() - self.zero.float()[:, group]
        return steps * self.scale.float()[:, group]


def size_of_group(said: Any, in_features: int) -> int:
    """The inputs that share a scale, where -1 means all; CheckpointError for what is no such number."""
    size = int(said)
    if size != -1 and not 1 <= size <= MAX_COUNT:
        raise CheckpointError(f"quantization_config: group_size is {said!r:.100}; it must be -1 or positive")
    return in_features if size == -1 else size


def scheme_for(num_bits: int, group_size: int, in_features: int, *, symmetric: bool, ordered: bool) -> Scheme:
    """The scheme that means the same as such a linear; Dense where none does."""
    if in_features % group_size:
        return Dense()
    if num_bits == 8 and symmetric and group_size == in_features and not ordered:
        return W8A16Int8()
    size = next((size for size in GROUP_SIZES if group_size % size == 0), None)
    if num_bits != 4 or size is None:
        return Dense()
    if ordered:
        return W4A16Ordered(size, symmetric) if size == group_size else Dense()
    return W4A16(size, symmetric)


def file_tensors(scheme: Scheme, ints: GroupedInts) -> dict[str, Tensor]:
    """File tensors of `scheme`, one that `scheme_for` gave; symmetric ones leave the zero point out."""
    if isinstance(scheme, Dense):
        return {"weight": ints.dequantized()}
    num_bits = 8 if isinstance(scheme, W8A16Int8) else 4
    tensors = {
        "weight_packed": words(ints.codes, num_bits),
        "weight_shape": torch.tensor(ints.codes.shape, device=ints.codes.device),
        "weight_scale": ints.scale.contiguous(),
    }
    if isinstance(scheme, W4A16):
        repeats = ints.codes.shape[1] // scheme.group_size // ints.scale.shape[1]
        tensors["weight_scale"] = ints.scale.repeat_interleave(repeats, 1)
        if not scheme.symmetric:
            zero = ints.zero.repeat_interleave(repeats, 1).T
            padded = torch.nn.functional.pad(zero, (0, -zero.shape[1] % 8))
            tensors["weight_zero_point"] = words(padded.contiguous(), 4).T.contiguous()
    if isinstance(scheme, W4A16Ordered):
        tensors["weight_g_idx"] = ints.group.to(torch.int32)
    return tensors
