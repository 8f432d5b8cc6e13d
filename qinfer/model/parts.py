"""The two blocks of a decoder layer, attention and MLP, for all families, without the residual stream.

Both take the normed input and return what is to be added. The families differ by data: which biases and norms
exist, which activation, whether this layer turns its heads and how far it looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from qinfer import ops
from qinfer.config import ModelConfig
from qinfer.model.linear import Linear
from qinfer.model.rotary import Rope

Tap = Callable[[str, Tensor], None]
"""Called with a group's name ("qkv", "o", "gate_up", "down") and the input [T, K] that its linears see."""


class Attend(Protocol):
    """How a layer's tokens see each other: through the engine's pages, or plainly in calibration."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] after the rotation, possibly views; returns [T, Hq, D]."""
        ...


class Attention:
    """Project, normalize heads (some families), turn, attend, project back."""

    def __init__(
        self, config: ModelConfig, index: int, qkv: Linear, o: Linear, norms: Mapping[str, Tensor]
    ) -> None:
        self.config = config
        self.index = index
        self.qkv = qkv
        self.o = o
        self.q_norm = norms.get("self_attn.q_norm.weight")
        self.k_norm = norms.get("self_attn.k_norm.weight")
        self.window = config.windows[index]

    def __call__(self, x: Tensor, rope: Rope, attend: Attend, tap: Tap | None = None) -> Tensor:
        """x [T, H], normed -> [T, H]."""
        config = self.config
        if tap is not None:
            tap("qkv", x)
        heads = self.qkv(x).view(len(x), -1, config.head_dim)
        q, k, v = self._turned(heads, rope)
        context = attend(
            self.index,
            q,
            k,
            v,
            scale=config.attention_scale,
            window=self.window,
            softcap=config.attention_softcap,
        ).flatten(1)
        if tap is not None:
            tap("o", context)
        return self.o(context)

    def _turned(self, heads: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Splits [T, Hq + 2 Hkv, D]; queries and keys turn together, in one op."""
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qk, v = heads[:, : num_q + num_kv], heads[:, num_q + num_kv :]
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(qk[:, :num_q], self.q_norm, config.rms_norm_eps, offset=config.norm_offset)
            k = ops.rms_norm(qk[:, num_q:], self.k_norm, config.rms_norm_eps, offset=config.norm_offset)
            qk = torch.cat((q, k), dim=1)
        if config.rotary_layers[self.index]:
            rotation = rope.full if self.window is None else rope.local
            qk = ops.rope(qk, rotation.cos, rotation.sin)
        return qk[:, :num_q], qk[:, num_q:], v


class Mlp:
    """down(activation(gate) * up)."""

    def __init__(self, config: ModelConfig, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activate = ops.silu_mul if config.activation == "silu" else ops.gelu_mul

    def __call__(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """x [T, H], normed -> [T, H]."""
        if tap is not None:
            tap("gate_up", x)
        inner = self.activate(self.gate_up(x))
        if tap is not None:
            tap("down", inner)
        return self.down(inner)
