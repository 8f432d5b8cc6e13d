"""A linear layer as the model sees it: one input, one output, whatever the weights are stored as.

Linears that share their input (q, k, v; gate, up) are one product, which on a CPU saves two of three calls
and two of three quantizations of the input. Biases belong to the model, not to the scheme: they are added
afterwards, or on a GPU by the product.

On a GPU few tokens times a weight are cut along the inputs as well, and whatever takes the product in next,
as it passes over it anyway, may add up the parts: `product` and `summand` leave that to it. A layer of 8B
parameters then takes 0.5 to 1.8 us less of 65 to 83 at one token, and in 4 bits 4.6 of 85 at 64 tokens (H200,
in a graph); at 256 tokens it makes no difference beyond the noise.

Where the scheme multiplies 8-bit activations, `codes` says of which kind, so that whoever makes the input may
quantize it on the way; it may also come as plain numbers. The outputs of gate and up then lie in turns on a
GPU, as the product that ends with the activation takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qinfer import ops
from qinfer.quant.scheme import ActivationFormat, Scheme

FileTensors = tuple[Scheme, Mapping[str, Tensor]]  # a linear as it lies in the file

CODES = {
    ActivationFormat.NONE: None,
    ActivationFormat.INT8_PER_TOKEN: torch.int8,
    ActivationFormat.FP8_PER_TOKEN: torch.float8_e4m3fn,
    ActivationFormat.FP8_PER_128: None,  # their products quantize by themselves
    ActivationFormat.FP8_STATIC: None,
}


class Linear:
    """x [T, K] -> [T, N]: shards of one scheme side by side along N, in the order given."""

    def __init__(
        self,
        shards: Sequence[FileTensors],
        bias: Tensor | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        scheme, tensors = shards[0]
        assert all(other == scheme for other, _ in shards), "linears that run as one must have one scheme"
        if len(shards) > 1:
            tensors = scheme.fuse([shard for _, shard in shards])
        self.scheme = scheme
        self.prepared = scheme.prepare(tensors, device, dtype)
        self.bias = bias
        self.dtype = dtype
        self.codes = CODES[scheme.activations]
        self.turn: int | None = None  # outputs of gate, then as many of up; None: all of gate first

    @classmethod
    def of_gate_and_up(
        cls,
        shards: Sequence[FileTensors],
        bias: Tensor | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Linear:
        """Gate and up, two shards or one: in turns where `gated` is faster so, and has what it takes."""
        if not takes_turns(shards, bias, device):
            return cls(shards, bias, device=device, dtype=dtype)
        linear = cls(alternating(shards, ops.TURN), device=device, dtype=dtype)
        linear.turn = ops.TURN
        return linear

    def __call__(self, x: ops.Activations) -> Tensor:
        x = self._given(x)
        if self.bias is not None and self.bias.is_cuda:
            return ops.scaled(self.scheme.matmul(x, self.prepared, self.bias))
        out = ops.scaled(self.scheme.matmul(x, self.prepared))
        return out if self.bias is None else out + self.bias

    def product(self, x: ops.Activations) -> Tensor | ops.Parts:
        """[T, N] without the bias, perhaps not added up yet."""
        product = self.scheme.matmul(self._given(x), self.prepared, in_parts=True)
        return product if isinstance(product, ops.Parts) else ops.scaled(product)

    def gated(self, x: ops.Activations, gelu: bool, codes: torch.dtype | None) -> ops.Activations:
        """act(gate) * up [T, N / 2] for a product that wants `codes`, of a linear in turns."""
        weight, scale = self.prepared["weight"], self.prepared["weight_scale"]
        return ops.gated_product(codes, self._given(x), weight, scale, gelu=gelu)

    def summand(self, x: ops.Activations) -> ops.Product:
        """[T, N] as the residual stream takes it, perhaps not scaled or added up yet."""
        if self.bias is not None:
            return self(x)
        return self.scheme.matmul(ops.as_row(self.codes, self._given(x)), self.prepared, in_parts=True)

    def _given(self, x: ops.Activations) -> ops.Activations:
        """x in the model's dtype: what an int8 product leaves of one token on a CPU is float32."""
        return x.to(self.dtype) if isinstance(x, Tensor) else x


def takes_turns(shards: Sequence[FileTensors], bias: Tensor | None, device: torch.device) -> bool:
    """Whether the product with these gates and ups has its activation in it."""
    if device.type == "cpu" or bias is not None or CODES[shards[0][0].activations] is None:
        return False
    return _outputs(shards) % (2 * ops.TURN) == 0


def alternating(shards: Sequence[FileTensors], turn: int) -> list[FileTensors]:
    """Gate and up, two shards or one of both, as shards of `turn` outputs of each in turn."""
    scheme, inner = shards[0][0], _outputs(shards) // 2
    halves = [tensors for _, tensors in shards]
    if len(halves) == 1:
        halves = [_rows(halves[0], 0, inner), _rows(halves[0], inner, 2 * inner)]
    starts = range(0, inner, turn)
    return [(scheme, _rows(half, start, start + turn)) for start in starts for half in halves]


def _outputs(shards: Sequence[FileTensors]) -> int:
    return sum(len(tensors["weight"]) for _, tensors in shards)


def _rows(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[start:stop] for name, tensor in tensors.items()}
