"""Products on a CPU without instructions for 8 or 16 bits, as most laptops have: in float32, weights widened.

torch's products of bfloat16 and of int8 are slow there. Measured on two cores of an EPYC with AVX2 alone, us,
weight 3072 x 576, at 2 / 8 / 32 / 512 rows: int8 2004 / 8693 / 33401 / 510041, in float32 863 / 1354 / 2665 /
20786; bfloat16 511 / 2026 / 8234 / 125721, in float32 834 / 2153 / 4091 / 21600.

A float32 holds integers up to 2^24, so the sum of 1024 products of int8 codes is exact in any order, and sums
of as many columns are added as integers: the results are those of int8 instructions, to the bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

EXACT_COLUMNS = 1024  # 1024 * 128 * 127 < 2^24
FEWEST_ROWS = 8  # of bfloat16, for which widening the weight pays
SLICE = 1 << 22  # numbers of a weight that are widened at a time: 16 MB

_INT8 = ("avx512_vnni", "avx_vnni", "amx_int8")
_BFLOAT16 = ("avx512_f", "avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16", "sve_bf16")


@cache
def has_int8_product() -> bool:
    """Whether `torch._int_mm` is fast on this processor and gives the exact integers.

    Instructions before VNNI may saturate at 16 bits. What ARM processors do was not measured: float32 there.
    """
    if not _has_one_of(_INT8):
        return False
    weight = torch.full((32, 256), -128, dtype=torch.int8)
    weight[::2] = 127
    codes = torch.full((17, 256), -127, dtype=torch.int8)
    return torch.equal(torch._int_mm(codes, weight.t()).double(), codes.double() @ weight.double().T)


@cache
def has_bfloat16_product() -> bool:
    """Whether torch's products of bfloat16 are left to it; AVX-512 without more was not measured, and is."""
    return _has_one_of(_BFLOAT16)


def _has_one_of(names: tuple[str, ...]) -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in names)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] @ weight [N, K] transposed -> [T, N], all of one dtype; sums are float32 or better."""
    if x.dtype is not torch.bfloat16 or len(x) < FEWEST_ROWS or has_bfloat16_product():
        return functional.linear(x, weight)
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    for rows in _slices(weight):
        out[:, rows] = functional.linear(wide, weight[rows].float())
    return out


def integer_sums(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 codes as float32 [T, K], times weight int8 [N, K] -> the exact sums, rounded to float32 [T, N]."""
    columns = [slice(start, start + EXACT_COLUMNS) for start in range(0, codes.shape[1], EXACT_COLUMNS)]
    out = codes.new_empty(len(codes), len(weight))
    for rows in _slices(weight):
        parts = (functional.linear(codes[:, some], weight[rows, some].float()) for some in columns)
        if len(columns) == 1:
            out[:, rows] = next(parts)
        else:
            out[:, rows] = sum((part.int() for part in parts), start=torch.zeros((), dtype=torch.int32))
    return out


def _slices(weight: Tensor) -> list[slice]:
    step = max(1, SLICE // weight.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight), step)]
