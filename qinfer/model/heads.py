"""A layer's queries, keys and values between their projection and attention.

What lies between is bias, norms of the heads (some families) and the rotation; then keys and values go to
where the `Attend` keeps them. On a GPU all that is one pass over memory, `ops.qkv_post`. A CPU has no use for
that: its single ops round in between to the model's dtype, which is what makes them fast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinfer import ops
from qinfer.model.rotary import Rotation


class Heads(NamedTuple):
    """The projection [T, (Hq + 2 Hkv) * D], heads in the order q, k, v, and what is still to be done."""

    projected: Tensor | ops.Parts
    dtype: torch.dtype  # of the model's activations
    num_kv_heads: int
    head_dim: int
    bias: Tensor | None
    norms: ops.HeadNorms | None
    rotation: Rotation | None

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D], possibly views; queries and keys turn together, in one op."""
        projected, num_kv = ops.scaled(self.projected), self.num_kv_heads
        if self.bias is not None:
            projected = projected + self.bias
        heads = projected.view(len(projected), -1, self.head_dim)
        num_qk = heads.shape[1] - num_kv
        num_q = num_qk - num_kv
        qk, v = heads.split_with_sizes((num_qk, num_kv), 1)
        if self.norms is not None:
            eps, offset = self.norms.eps, self.norms.offset
            q, k = qk.split_with_sizes((num_q, num_kv), 1)
            q = ops.rms_norm(q, self.norms.q, eps, offset=offset)
            k = ops.rms_norm(k, self.norms.k, eps, offset=offset)
            qk = torch.cat((q, k), dim=1)
        if self.rotation is not None:
            qk = ops.rope(qk, *self.rotation)
        q, k = qk.split_with_sizes((num_q, num_kv), 1)
        return q, k, v

    def into_pages(self, pages: ops.KVPages, places: Tensor) -> Tensor:
        """Stores k and v at `places`, from `ops.kv_places`, of the pages; returns q [T, Hq, D]."""
        if places.is_cuda:
            return ops.qkv_post(
                self.projected, pages, places, rotation=self.rotation, norms=self.norms, bias=self.bias
            )
        if self.projected.dtype is not self.dtype and isinstance(self.projected, Tensor):  # one token's
            return ops.qkv_row(
                self.projected,
                pages,
                places,
                rotation=self.rotation,
                norms=self.norms,
                bias=self.bias,
                dtype=self.dtype,
            )
        q, k, v = self.turned()
        ops.write_kv(k, v, pages, places)
        return q
