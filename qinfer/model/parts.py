"""The two blocks of a decoder layer, attention and MLP, for all families, without the residual stream.

Both take the normed input and return what is to be added, as a product leaves it. The families differ by
data: which biases and norms exist, which activation, whether this layer turns its heads and how far it looks
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from qinfer import ops
from qinfer.config import ModelConfig
from qinfer.model.heads import Heads
from qinfer.model.linear import Linear
from qinfer.model.rotary import Rope

Tap = Callable[[str, Tensor], None]
"""Called with a group's name ("qkv", "o", "gate_up", "down") and the input [T, K] that its linears see."""


class Attend(Protocol):
    """How a layer's tokens see each other: through the engine's pages, or plainly in calibration."""

    def __call__(
        self,
        layer: int,
        heads: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Heads as they were projected; turns them, and returns [T, Hq, D]."""
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
        self.window = config.windows[index]
        self.head_norms: ops.HeadNorms | None = None
        if "self_attn.q_norm.weight" in norms:
            q_norm, k_norm = norms["self_attn.q_norm.weight"], norms["self_attn.k_norm.weight"]
            self.head_norms = ops.HeadNorms(q_norm, k_norm, config.rms_norm_eps, config.norm_offset)

    def __call__(
        self,
        x: ops.Activations,
        rope: Rope,
        attend: Attend,
        tap: Tap | None = None,
        rows: Tensor | None = None,
    ) -> ops.Product:
        """x [T, H], normed -> [T, H], or only its `rows`; a tap needs x as numbers, not as codes."""
        config = self.config
        if tap is not None:
            assert isinstance(x, Tensor)
            tap("qkv", x)
        rotation = rope.full if self.window is None else rope.local
        heads = Heads(
            self.qkv.product(x),
            self.qkv.dtype,
            config.num_kv_heads,
            config.head_dim,
            self.qkv.bias,
            self.head_norms,
            rotation if config.rotary_layers[self.index] else None,
        )
        context = attend(
            self.index,
            heads,
            scale=config.attention_scale,
            window=self.window,
            softcap=config.attention_softcap,
        ).flatten(1)
        if rows is not None:
            context = context[rows]
        if tap is not None:
            tap("o", context)
        return self.o.summand(context)


class Mlp:
    """down(activation(gate) * up)."""

    def __init__(self, config: ModelConfig, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down
        self.codes = gate_up.codes
        self.activate = ops.silu_mul if config.activation == "silu" else ops.gelu_mul

    def __call__(self, x: ops.Activations, tap: Tap | None = None) -> ops.Product:
        """x [T, H], normed -> [T, H]; a tap needs x as numbers, not as codes."""
        if tap is None:
            return self.down.summand(self._gated(x))  # holds nothing else meanwhile
        assert isinstance(x, Tensor)
        tap("gate_up", x)
        inner = self.activate(self.gate_up(x), self.gate_up.turn)
        tap("down", inner)
        return self.down.summand(inner)

    def _gated(self, x: ops.Activations) -> ops.Activations:
        if self.gate_up.turn is not None:
            return self.gate_up.gated(x, self.activate is ops.gelu_mul, self.down.codes)
        gate_up = self.gate_up.product(x) if self.gate_up.bias is None else self.gate_up(x)
        return ops.gated_to(self.down.codes, self.activate, gate_up)
