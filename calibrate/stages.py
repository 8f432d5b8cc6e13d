"""A layer taken group by group, over all batches, while its linears turn into quantized ones.

GPTQ wants the inputs that a linear will really meet, those made by the quantized linears before it. Running
the layer anew for each of its four groups would cost four passes; walking through it once costs one. At each
stop the caller sees the inputs of a group's linears, and puts the quantized linear into the layer before it
goes on. At the end the batches hold the quantized layer's output.

This is `Layer.__call__` in slow motion, and a test holds the two against each other for every family.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from qinfer import ops
from qinfer.calibrate.block import Batch
from qinfer.model.decoder import Layer
from qinfer.model.experts import Experts
from qinfer.model.linear import Linear
from qinfer.model.parts import Attend


class _Through(Linear):
    """Stands in for o_proj and lets its input pass."""

    def __init__(self) -> None:
        self.codes = None

    def summand(self, x: ops.Activations) -> ops.Product:
        assert isinstance(x, Tensor)
        return x


def walk(
    layer: Layer, batches: Sequence[Batch], attends: Sequence[Attend]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields (group, inputs [T, K] of each batch); between two steps `set_linear` may change that group's.

    `attends` are the batches' attention. The batches' hidden states are replaced when all is done.
    """
    config, mlp = layer.config, layer.mlp
    eps, offset, multiplier = config.rms_norm_eps, config.norm_offset, config.residual_multiplier
    inputs = [ops.rms_norm(batch.hidden, layer.input_norm, eps, offset=offset) for batch in batches]
    yield "qkv", inputs
    attention = copy.copy(layer.attention)
    attention.o = _Through()
    inputs = [
        ops.scaled(attention(x, batch.rope, attend))
        for x, batch, attend in zip(inputs, batches, attends, strict=True)
    ]
    yield "o", inputs
    streams = []
    for i, batch in enumerate(batches):
        out = _normed(layer, layer.attention_out_norm, layer.attention.o, inputs[i])
        inputs[i], stream = ops.add_rms_norm(
            out, batch.hidden, layer.mlp_norm, eps, offset=offset, multiplier=multiplier
        )
        streams.append(stream)
    if isinstance(mlp, Experts):
        outs = yield from _through_experts(mlp, inputs)
    else:
        yield "gate_up", inputs
        inputs = [mlp.activate(mlp.gate_up(x)) for x in inputs]
        yield "down", inputs
        outs = [_normed(layer, layer.mlp_out_norm, mlp.down, x) for x in inputs]
    for out, batch, stream in zip(outs, batches, streams, strict=True):
        batch.hidden = torch.add(stream, out, alpha=multiplier)


def _through_experts(
    experts: Experts, inputs: list[Tensor]
) -> Generator[tuple[str, list[Tensor]], None, list[Tensor]]:
    """Each expert's two groups, on all tokens, whoever chose it: none is calibrated on a handful."""
    weights = [experts.route(x) for x in inputs]
    outs = [torch.zeros_like(x) for x in inputs]
    for i, expert in enumerate(experts.experts):
        yield f"gate_up.{i}", inputs
        inner = [expert.activate(expert.gate_up(x)) for x in inputs]
        yield f"down.{i}", inner
        for out, x, weight in zip(outs, inner, weights, strict=True):
            y = ops.scaled(expert.down.summand(x)) * weight[:, i, None]
            out += y.to(out.dtype)
    return outs


def starved(experts: Experts, inputs: list[Tensor]) -> list[int]:
    """Experts that the router chose for none of these tokens."""
    chosen = torch.stack([(experts.route(x) > 0).sum(0) for x in inputs]).sum(0)
    return (chosen == 0).nonzero().flatten().tolist()


def set_linear(layer: Layer, group: str, linear: Linear) -> None:
    """Puts the linear of a group into the layer."""
    setattr(*_place(layer, group), linear)


def get_linear(layer: Layer, group: str) -> Linear:
    """The linear of a group."""
    linear = getattr(*_place(layer, group))
    assert isinstance(linear, Linear)
    return linear


def _place(layer: Layer, group: str) -> tuple[object, str]:
    """What holds a group's linear, and as what: of "down.3" it is the fourth expert."""
    name, _, expert = group.partition(".")
    if name in ("qkv", "o"):
        return layer.attention, name
    if isinstance(layer.mlp, Experts):
        return layer.mlp.experts[int(expert)], name
    return layer.mlp, name


def _normed(layer: Layer, norm: Tensor | None, linear: Linear, x: Tensor) -> Tensor:
    out = ops.scaled(linear.summand(x))
    if norm is None:
        return out
    return ops.rms_norm(out, norm, layer.config.rms_norm_eps, offset=layer.config.norm_offset)
