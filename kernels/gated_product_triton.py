"""The gated product on a GPU: many tokens' product has the activation in its end, few tokens' leaves parts.

Between them lies what the tables say of the product: where warps have tasks of their own and K is not cut,
act(gate) * up leaves it, and 8-bit codes are made of that. Otherwise the activation's kernel adds up parts,
and makes the codes in the same pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qinfer.kernels import activation_triton
from qinfer.kernels.fused_activation_triton import coded
from qinfer.kernels.gated_product import TURN
from qinfer.kernels.quantize_per_token_triton import fp8_per_token, int8_per_token
from qinfer.kernels.w8a8_triton import multiply


def gated(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> Tensor:
    """As its meaning; declines a weight that does not lie in panels."""
    product, whole = _product(codes, scale, weight, weight_scale, dtype, gelu=gelu)
    return product if whole else activation_triton.run(product, dtype, gelu=gelu, turn=TURN)[0]


def gated_to_int8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """As its meaning; declines a weight that does not lie in panels, and rows longer than 32768."""
    product, whole = _product(codes, scale, weight, weight_scale, dtype, gelu=gelu)
    return int8_per_token(product) if whole else coded(product, torch.int8, gelu=gelu, turn=TURN)


def gated_to_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> tuple[Tensor, Tensor]:
    """As its meaning; declines a weight that does not lie in panels, and rows longer than 32768."""
    product, whole = _product(codes, scale, weight, weight_scale, dtype, gelu=gelu)
    return fp8_per_token(product) if whole else coded(product, torch.float8_e4m3fn, gelu=gelu, turn=TURN)


def _product(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *, gelu: bool
) -> tuple[Tensor, bool]:
    """act(gate) * up and True; or gate and up in turns, perhaps in parts, and False."""
    op = "w8a8_int8" if codes.dtype is torch.int8 else "w8a8_fp8"
    entry = multiply.entry(op, codes, weight, dtype, in_parts=True)
    whole = "STAGES" in entry and entry["SPLITS"] == 1
    gate = None if not whole else "gelu" if gelu else "silu"
    given = codes, scale, weight, weight_scale, dtype, None
    return multiply.run(entry, *given, in_parts=True, gate=gate), whole
