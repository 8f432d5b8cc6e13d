"""The plain way to attend: whole sequences at once, keys and values at hand, nothing cached.

Calibration runs the decoder's layers with it over its batches; tests hold the paged cache against it.
"""

from __future__ import annotations

from torch import Tensor

from qinfer import ops
from qinfer.model.heads import Heads


class CausalAttention:
    """An `Attend` over `num_sequences` sequences of equal length, laid one after another in T."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences

    def __call__(
        self,
        layer: int,
        heads: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        q, k, v = heads.turned()
        return ops.attention(
            q, k, v, num_sequences=self.num_sequences, scale=scale, window=window, softcap=softcap
        )
