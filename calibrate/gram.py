"""Second moments of a linear's inputs, X^T X over every token: all that GPTQ and the range searches look at.

On a processor with bfloat16 matrix units activations are bfloat16. Their products are exact in float32, and
the units add them up in float32, but a product of two bfloat16 matrices comes back rounded to bfloat16, which
would leave X^T X not positive. So the operands are handed over as float32 with leave to multiply them in
bfloat16, which loses nothing here and takes a fifth less time than float32. Only blocks on and above the
diagonal are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

_BLOCKS = 4  # of a row: 10 of 16 products are made, for 1536 columns products still large enough
_TOKENS = 4096  # widened at a time


class Inputs:
    """The inputs [T, K] of a group's linears, batch by batch, and what is computed of them, once."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    @cached_property
    def gram(self) -> Tensor:
        """Sum over the tokens of x x^T, float32 [K, K]."""
        return gram(self.batches)

    @cached_property
    def squares(self) -> Tensor:
        """Sum over the tokens of x^2, float32 [K]."""
        if "gram" in self.__dict__:
            return self.gram.diagonal()
        total = torch.zeros(self.batches[0].shape[1], dtype=torch.float64, device=self.batches[0].device)
        for x in self.batches:
            total += x.float().square().sum(0)
        return total.float()

    @cached_property
    def channel_absmax(self) -> Tensor:
        """The largest magnitude of each channel, float32 [K]."""
        return torch.stack([x.abs().amax(0) for x in self.batches]).amax(0).float()

    @property
    def absmax(self) -> float:
        """The largest magnitude of all."""
        return float(self.channel_absmax.amax())

    @property
    def outliers(self) -> float:
        """How many times the largest channel's magnitude is that of the median channel; 0 without any."""
        median = float(self.channel_absmax.median())
        return self.absmax / median if median else 0.0

    def moments(self, group_size: int) -> Tensor:
        """Sum over the tokens of x_g x_g^T for each group of columns: float32 [K / group_size, g, g]."""
        if "gram" in self.__dict__:  # whose blocks on the diagonal they are
            parts = self.gram.view(len(self.gram) // group_size, group_size, -1, group_size)
            return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
        return second_moments(self.batches, group_size)


def second_moments(inputs: Sequence[Tensor], group_size: int) -> Tensor:
    """Sum over the tokens of x_g x_g^T for each group: tensors [T, K] -> [groups, g, g], float32."""
    first = inputs[0]
    moments = torch.zeros(first.shape[1] // group_size, group_size, group_size, device=first.device)
    for x in _portions(inputs):
        groups = x.view(len(x), -1, group_size).transpose(0, 1)
        moments += groups.transpose(1, 2) @ groups
    return moments


def gram(inputs: Sequence[Tensor]) -> Tensor:
    """Sum over the tokens of x x^T: tensors [T, K] -> float32 [K, K], symmetric."""
    width = inputs[0].shape[1]
    total = torch.zeros(width, width, device=inputs[0].device)
    step = max(128, -(-width // _BLOCKS))
    with _exact_products_of(inputs[0]):
        for x in _portions(inputs):
            for start in range(0, width, step):
                total[start : start + step, start:] += x[:, start : start + step].T @ x[:, start:]
    return torch.triu(total) + torch.triu(total, 1).T


def _portions(inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    for x in inputs:
        for start in range(0, len(x), _TOKENS):
            yield x[start : start + _TOKENS].float()


@contextmanager
def _exact_products_of(x: Tensor) -> Iterator[None]:
    """Lets float32 products on a CPU be made in bfloat16 while nothing but bfloat16 numbers is multiplied."""
    if x.dtype is not torch.bfloat16 or x.is_cuda:
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
