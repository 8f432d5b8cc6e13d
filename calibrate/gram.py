"""What rounding looks at of a linear's inputs: second moments, X^T X over every token, and magnitudes.

On a processor with bfloat16 matrix units activations are bfloat16. Their products are exact in float32, and
the units add them up in float32, but a product of two bfloat16 matrices comes back rounded to bfloat16, which
would leave X^T X not positive. So the operands are handed over as float32 with leave to multiply them in
bfloat16, on a GPU in TF32, which holds them too: that loses nothing here and on a CPU takes a fifth less time
than float32. Only blocks on and above the diagonal are computed.

Inputs may have to be made anew for each look (rest.py), so all that is wanted is gathered in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

_BLOCKS = 4  # of a row: 10 of 16 products are made, for 1536 columns products still large enough
_TOKENS = 2048  # widened at a time
_ROWS = 1024  # of a gram's lower half filled at a time


class Inputs:
    """The inputs [T, K] of a group's linears, batch by batch, and what is computed of them, once.

    `first` is the first `sample` tokens of all batches together, as many of each.
    """

    def __init__(self, batches: Sequence[Tensor], *, sample: int = 0) -> None:
        self.batches = batches
        self.first: list[Tensor] = []
        self._share = -(-sample // len(batches))
        self._known: dict[str, Tensor] = {}

    def look(self, *, gram: bool = False, squares: bool = False, group_size: int | None = None) -> None:
        """Passes over all batches for these; the gram holds the other two. Magnitudes come along."""
        sums: dict[str, _Sum] = {"absmax": _AbsMax()}
        if gram:
            sums["gram"] = _Gram()
        elif squares:
            sums["squares"] = _Squares()
        if group_size is not None and not gram:
            sums[f"moments {group_size}"] = _Moments(group_size)
        first = []
        for x in self.batches:
            for of in sums.values():
                of.add(x)
            if self._share:
                first.append(x[: self._share].clone())
        self.first = first
        self._known |= {name: of.total() for name, of in sums.items()}

    @property
    def gram(self) -> Tensor:
        """Sum over the tokens of x x^T, float32 [K, K]."""
        if "gram" not in self._known:
            self.look(gram=True)
        return self._known["gram"]

    @property
    def squares(self) -> Tensor:
        """Sum over the tokens of x^2, float32 [K]."""
        if "gram" in self._known:
            return self.gram.diagonal()
        if "squares" not in self._known:
            self.look(squares=True)
        return self._known["squares"]

    @property
    def channel_absmax(self) -> Tensor:
        """The largest magnitude of each channel, float32 [K]."""
        if "absmax" not in self._known:
            self.look()
        return self._known["absmax"]

    @property
    def absmax(self) -> float:
        """The largest magnitude of all."""
        return float(self.channel_absmax.amax())

    @property
    def outliers(self) -> float:
        """How many times the largest channel's magnitude is that of the median channel; 0 without any."""
        median = float(self.channel_absmax.median())
        return self.absmax / median if median else 0.0

    def share_beyond(self, limit: float) -> float:
        """Share of the first tokens' numbers with a magnitude above `limit`."""
        beyond = sum(int((x.abs().float() > limit).sum()) for x in self.first)
        return beyond / sum(x.numel() for x in self.first)

    @property
    def range_used(self) -> float:
        """What all but one in 10,000 of the first tokens' numbers need of the largest magnitude."""
        magnitudes = torch.cat([x.abs().flatten() for x in self.first]).float()
        largest = magnitudes.topk(1 + len(magnitudes) // 10_000).values
        return float(largest[-1]) / self.absmax if self.absmax else 0.0

    def moments(self, group_size: int) -> Tensor:
        """Sum over the tokens of x_g x_g^T for each group of columns: float32 [K / group_size, g, g]."""
        if "gram" in self._known:  # whose blocks on the diagonal they are
            parts = self.gram.view(len(self.gram) // group_size, group_size, -1, group_size)
            return parts.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
        name = f"moments {group_size}"
        if name not in self._known:
            self.look(group_size=group_size)
        return self._known[name]


def second_moments(inputs: Sequence[Tensor], group_size: int) -> Tensor:
    """Sum over the tokens of x_g x_g^T for each group: tensors [T, K] -> [groups, g, g], float32."""
    return _summed(_Moments(group_size), inputs)


def gram(inputs: Sequence[Tensor]) -> Tensor:
    """Sum over the tokens of x x^T: tensors [T, K] -> float32 [K, K], symmetric."""
    return _summed(_Gram(), inputs)


class _Sum(Protocol):
    """Something that is gathered batch by batch."""

    def add(self, x: Tensor) -> None: ...
    def total(self) -> Tensor: ...


def _summed(what: _Sum, inputs: Sequence[Tensor]) -> Tensor:
    for x in inputs:
        what.add(x)
    return what.total()


class _AbsMax:
    def __init__(self) -> None:
        self._largest: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        if x.element_size() != 2:
            self._largest.append(x.abs().amax(0))
            return
        # without their signs numbers are in the order of their bits, and a CPU compares integers 5x as fast
        self._largest.append((x.view(torch.int16) & 0x7FFF).amax(0).view(x.dtype))

    def total(self) -> Tensor:
        return torch.stack(self._largest).amax(0).float()


class _Squares:
    _total: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        self._total = self._total + x.float().square().sum(0).double()

    def total(self) -> Tensor:
        assert isinstance(self._total, Tensor)
        return self._total.float()


class _Moments:
    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self._total: Tensor | None = None

    def add(self, x: Tensor) -> None:
        if self._total is None:
            shape = x.shape[1] // self._size, self._size, self._size
            self._total = torch.zeros(shape, device=x.device)
        for part in _portions(x):
            groups = part.view(len(part), -1, self._size).transpose(0, 1)
            self._total += groups.transpose(1, 2) @ groups

    def total(self) -> Tensor:
        assert self._total is not None
        return self._total


class _Gram:
    _total: Tensor | None = None

    def add(self, x: Tensor) -> None:
        width = x.shape[1]
        if self._total is None:
            self._total = torch.zeros(width, width, device=x.device)
        step = max(128, -(-width // _BLOCKS))
        with _exact_products_of(x):
            for part in _portions(x):
                for start in range(0, width, step):
                    stop = start + step
                    self._total[start:stop, start:].addmm_(part[:, start:stop].T, part[:, start:])

    def total(self) -> Tensor:
        """Only once: the lower half is filled in place, as a second matrix may be gigabytes."""
        assert self._total is not None
        total = self._total
        for start in range(0, len(total), _ROWS):
            stop = start + _ROWS
            total[start:stop, start:stop].triu_()
            total[start:stop, start:stop] += total[start:stop, start:stop].triu(1).T
            total[stop:, start:stop] = total[start:stop, stop:].T
        return total


def _portions(x: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(x), _TOKENS):
        yield x[start : start + _TOKENS].float()


@contextmanager
def _exact_products_of(x: Tensor) -> Iterator[None]:
    """Lets float32 products be made in a narrower format while nothing is multiplied but what it holds."""
    if x.dtype is not torch.bfloat16:
        yield
        return
    backends = torch.backends  # whose types do not know mkldnn.matmul
    settings = backends.cuda.matmul if x.is_cuda else backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if x.is_cuda else "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
