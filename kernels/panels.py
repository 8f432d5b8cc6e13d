"""The layouts in which the GPU kernels read 8-bit weights, made once at load; plain torch both ways.

*Panels*: [ceil(K / 128), N, 128] instead of [N, K]. The tile of any 8, 16 ... 256 rows in one step along K is
then one run of memory, which DRAM and the prefetch to the L2 cache like better than as many short ones, and
K is padded with zeros.

*Fragments*: panels whose 64-byte runs are permuted. Hopper's matrix instruction can take its first operand
from registers, where thread t of four holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16. So that one
16-byte load gives a thread just what it will multiply, word (t, s) of the 4 x 4 words of a run holds the
columns k = 16 s + 8 h + 2 t + p as its bytes (h, p) = 00, 10, 01, 11, lowest byte first. The kernel widens
them two at a time with masks, without moving any to another thread.
"""

import torch
from torch import Tensor
from torch.nn import functional

WIDTH = 128  # columns of a panel


def to_panels(codes: Tensor) -> Tensor:
    """8-bit codes [N, K] -> the same dtype [ceil(K / 128), N, 128]."""
    padded = functional.pad(codes.view(torch.uint8), (0, -codes.shape[1] % WIDTH))
    return padded.view(codes.shape[0], -1, WIDTH).transpose(0, 1).contiguous().view(codes.dtype)


def from_panels(panels: Tensor, columns: int) -> Tensor:
    """The codes [N, columns] that `to_panels` took."""
    rows = panels.view(torch.uint8).transpose(0, 1).flatten(1)
    return rows[:, :columns].contiguous().view(panels.dtype)


def to_fragments(codes: Tensor) -> Tensor:
    """8-bit codes [N, K] -> int32 [ceil(K / 128), N, 32]."""
    panels = to_panels(codes).view(torch.uint8)
    runs = panels.view(*panels.shape[:2], 2, 4, 2, 4, 2)  # [panel, N, run, s, h, t, p]
    return runs.permute(0, 1, 2, 5, 3, 6, 4).contiguous().flatten(2).view(torch.int32)


def from_fragments(words: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The codes [N, columns] of `dtype` that `to_fragments` took."""
    runs = words.view(torch.uint8).view(*words.shape[:2], 2, 4, 4, 2, 2)  # [panel, N, run, t, s, p, h]
    return from_panels(runs.permute(0, 1, 2, 4, 6, 3, 5).flatten(2).contiguous(), columns).view(dtype)


def rows_of(weight: Tensor, columns: int) -> Tensor:
    """8-bit codes [N, columns] of a weight that lies in rows or in panels."""
    return weight if weight.dim() == 2 else from_panels(weight, columns)
