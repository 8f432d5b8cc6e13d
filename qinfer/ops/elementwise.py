"""What is done number by number between the products: the gates of the MLP and the rotation of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qinfer import backend
from qinfer.kernels import activation as _activation
from qinfer.kernels import fused_activation as _fused_activation
from qinfer.kernels import int8_row_cpu as _int8_row_cpu
from qinfer.kernels import rope as _rope
from qinfer.kernels import rope_angles as _rope_angles
from qinfer.ops.forms import Activations, Codes, Parts, Product, is_int8_row


def gelu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """gelu_tanh(gate) * up: [T, 2 I], all of the gate first or in turns of `turn` columns -> [T, I]."""
    if gate_up.is_cuda:
        return backend.run(_activation.gelu_mul, gate_up, turn)
    return _activation.gelu_mul(gate_up, turn)


def silu_mul(gate_up: Tensor, turn: int | None = None) -> Tensor:
    """silu(gate) * up: [T, 2 I], all of the gate first or in turns of `turn` columns -> [T, I]."""
    if gate_up.is_cuda:
        return backend.run(_activation.silu_mul, gate_up, turn)
    return _activation.silu_mul(gate_up, turn)


_GATED_TO: dict[tuple[Callable[[Tensor], Tensor], torch.dtype], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    (silu_mul, torch.int8): _fused_activation.silu_mul_int8,
    (silu_mul, torch.float8_e4m3fn): _fused_activation.silu_mul_fp8,
    (gelu_mul, torch.int8): _fused_activation.gelu_mul_int8,
    (gelu_mul, torch.float8_e4m3fn): _fused_activation.gelu_mul_fp8,
}


_GATED_PARTS: dict[Callable[[Tensor], Tensor], Callable[[Tensor, torch.dtype], Tensor]] = {
    silu_mul: _fused_activation.silu_mul_parts,
    gelu_mul: _fused_activation.gelu_mul_parts,
}


def gated_to(codes: torch.dtype | None, gate: Callable[[Tensor], Tensor], gate_up: Product) -> Activations:
    """`gate`, which is silu_mul or gelu_mul, for a product that wants `codes`: see `add_rms_norm_to`."""
    if isinstance(gate_up, Parts):
        sums, dtype = gate_up
        if codes is None:
            return backend.run(_GATED_PARTS[gate], sums, dtype)
        return Codes(*backend.run(_GATED_TO[gate, codes], sums), dtype)
    if is_int8_row(codes, gate_up):
        return _int8_row_cpu.silu_mul(gate_up) if gate is silu_mul else _int8_row_cpu.gelu_mul(gate_up)
    if codes is None or not gate_up.is_cuda:
        return gate(gate_up)
    return Codes(*backend.run(_GATED_TO[gate, codes], gate_up), gate_up.dtype)


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [T, N, D] by cos and signed sin [T, R]; returns a new [T, N, D]."""
    if heads.is_cuda:
        return backend.run(_rope.rope, heads, cos, sin)
    return _rope.rope(heads, cos, sin)


def rope_angles(
    positions: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `rope` takes, of positions [T] int64 and frequencies [R / 2] float32: cos and sin [T, R]."""
    if positions.is_cuda:
        return backend.run(_rope_angles.rope_angles, positions, frequencies, magnitude, dtype)
    return _rope_angles.rope_angles(positions, frequencies, magnitude, dtype)
