"""A linear layer as the model sees it: one input, one output, whatever the weights are stored as.

Linears that share their input (q, k, v; gate, up) are one product where their schemes are equal, which on a
CPU saves two of three calls and two of three quantizations of the input. Where they differ each runs alone
and the outputs are joined. Biases belong to the model, not to the scheme, and are added afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qinfer.quant.scheme import Scheme

FileTensors = tuple[Scheme, Mapping[str, Tensor]]  # a linear as it lies in the file


class Linear:
    """x [T, K] -> [T, N]: shards side by side along N, in the order given."""

    def __init__(
        self,
        shards: Sequence[FileTensors],
        bias: Tensor | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        schemes = [scheme for scheme, _ in shards]
        tensors = [shard for _, shard in shards]
        if len(shards) > 1 and all(scheme == schemes[0] for scheme in schemes):
            schemes, tensors = schemes[:1], [schemes[0].fuse(tensors)]
        self.bias = bias
        self.parts = [(s, s.prepare(t, device, dtype)) for s, t in zip(schemes, tensors, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [scheme.matmul(x, prepared) for scheme, prepared in self.parts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return out if self.bias is None else out + self.bias
