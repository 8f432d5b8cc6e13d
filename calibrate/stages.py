"""A layer taken group by group, over all batches, while its linears turn into quantized ones.

GPTQ wants the inputs that a linear will really meet, those made by the quantized linears before it. Running
the layer anew for each of its four groups would cost four passes; walking through it once costs one. At each
stop the caller sees the inputs of a group's linears, and puts the quantized linear into the layer before it
goes on. At the end the batches hold the quantized layer's output.

This is `Layer.__call__` in slow motion, and a test holds the two against each other for every family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from qinfer import ops
from qinfer.calibrate.block import Batch
from qinfer.calibrate.rest import made
from qinfer.model.experts import Experts
from qinfer.model.layer import Layer
from qinfer.model.linear import Linear
from qinfer.model.parts import Attend, Mlp


class _Through(Linear):
    """Stands in for o_proj and lets its input pass."""

    def __init__(self) -> None:
        self.codes = None

    def summand(self, x: ops.Activations) -> ops.Product:
        assert isinstance(x, Tensor)
        return x


def walk(
    layer: Layer, batches: Sequence[Batch], attends: Sequence[Attend]
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yields (group, inputs [T, K] of each batch); between two steps `set_linear` may change that group's.

    `attends` are the batches' attention. The batches' hidden states are replaced on the way: by the stream
    between attention and MLP, and at the end by the layer's output.
    """
    config, mlp, rest, count = layer.config, layer.mlp, batches[0].rest, len(batches)

    def normed(norm: Tensor, i: int) -> Tensor:
        return ops.rms_norm(batches[i].hidden, norm, config.rms_norm_eps, offset=config.norm_offset)

    inputs = made(partial(normed, layer.input_norm), count, rest)
    yield "qkv", inputs
    inputs = made(partial(_context, layer, batches, attends, inputs), count, rest)
    yield "o", inputs
    _add(layer, layer.attention.o, layer.attention_out_norm, inputs, batches)
    inputs = made(partial(normed, layer.mlp_norm), count, rest)
    if isinstance(mlp, Experts):
        yield from _through_experts(layer, mlp, inputs, batches)
        return
    yield "gate_up", inputs
    inputs = made(partial(_inner, mlp, inputs), count, rest)
    yield "down", inputs
    _add(layer, mlp.down, layer.mlp_out_norm, inputs, batches)


def _context(
    layer: Layer, batches: Sequence[Batch], attends: Sequence[Attend], inputs: Sequence[Tensor], index: int
) -> Tensor:
    """What attention hands to o_proj."""
    attention = with_linear(layer, "o", _Through()).attention
    return ops.scaled(attention(inputs[index], batches[index].rope, attends[index]))


def _through_experts(
    layer: Layer, experts: Experts, inputs: Sequence[Tensor], batches: Sequence[Batch]
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Each expert's two groups, on all tokens, whoever chose it: none is calibrated on a handful."""
    rest = batches[0].rest
    weights, outs = [], []
    for i, x in enumerate(inputs):
        weights.append(experts.route(x))
        outs.append(rest.slot(f"{i:05d}-experts"))
        outs[-1].put(torch.zeros_like(x))
    for number, expert in enumerate(experts.experts):
        yield f"gate_up.{number}", inputs
        inner = made(partial(_inner, expert, inputs), len(batches), rest)
        yield f"down.{number}", inner
        for slot, x, weight in zip(outs, inner, weights, strict=True):
            y = ops.scaled(expert.down.summand(x)) * weight[:, number, None]
            slot.put(slot.get() + y.to(x.dtype))
    for slot, batch in zip(outs, batches, strict=True):
        batch.hidden = torch.add(batch.hidden, slot.get(), alpha=layer.config.residual_multiplier)


def _inner(mlp: Mlp, inputs: Sequence[Tensor], index: int) -> Tensor:
    return mlp.activate(mlp.gate_up(inputs[index]))


def starved(experts: Experts, inputs: Sequence[Tensor]) -> list[int]:
    """Experts that the router chose for none of these tokens."""
    chosen = torch.stack([(experts.route(x) > 0).sum(0) for x in inputs]).sum(0)
    return (chosen == 0).nonzero().flatten().tolist()


def set_linear(layer: Layer, group: str, linear: Linear) -> None:
    """Puts the linear of a group into the layer."""
    setattr(*_place(layer, group), linear)


def with_linear(layer: Layer, group: str, linear: Linear) -> Layer:
    """The layer with another linear in place of a group's; the given layer stays as it is."""
    layer = copy.copy(layer)
    layer.attention, layer.mlp = copy.copy(layer.attention), copy.copy(layer.mlp)
    set_linear(layer, group, linear)
    return layer


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


def _add(
    layer: Layer, linear: Linear, norm: Tensor | None, inputs: Sequence[Tensor], batches: Sequence[Batch]
) -> None:
    """Adds a linear's outputs, normed where the family does that, to the batches' streams."""
    config = layer.config
    for x, batch in zip(inputs, batches, strict=True):
        out = ops.scaled(linear.summand(x))
        if norm is not None:
            out = ops.rms_norm(out, norm, config.rms_norm_eps, offset=config.norm_offset)
        batch.hidden = torch.add(batch.hidden, out, alpha=config.residual_multiplier)
