"""Finds and applies the scales of one layer, for SmoothQuant and AWQ alike.

Both methods move a scale through the layer's mappings and differ in which mappings they use and which scales
they propose. A proposal is judged by what it is for: the module's output (attention for q/k/v, MLP for
gate/up, the linear itself for o and down) with the group's weights, and where the scheme says so its inputs,
really quantized, against the same module dense; inputs are those that reach the layer in the quantized
model. The losses see the weights of a mapping before later mappings change them, as in both papers' code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qinfer import ops
from qinfer.calibrate import awq, smoothquant
from qinfer.calibrate.block import Batch
from qinfer.calibrate.mappings import Block, ScaleMapping, apply_scale, scale_mappings
from qinfer.calibrate.observe import GroupStats, LayerTap
from qinfer.calibrate.roundtrip import judged
from qinfer.calibrate.search import Choice, search_scale
from qinfer.calibrate.stages import get_linear, with_linear
from qinfer.config import ModelConfig
from qinfer.model.layer import Layer
from qinfer.model.linear import Linear
from qinfer.quant import W4A16, Scheme, W8A8Fp8Static


@dataclass(frozen=True)
class Workbench:
    """A dense layer, what was observed of it, and how its quantized form is to be computed."""

    config: ModelConfig
    index: int
    layer: Layer
    batches: list[Batch]  # those whose inputs the tap kept, in its order
    tap: LayerTap
    schemes: Mapping[str, Scheme]  # by group
    storage: torch.dtype  # of scales and norms in the checkpoint
    device: torch.device
    dtype: torch.dtype  # of the computation

    @property
    def where(self) -> str:
        """The layer's name in messages."""
        return f"layer {self.index}"

    def outputs(self, group: str, inputs: list[Tensor], linear: Linear | None = None) -> list[Tensor]:
        """Outputs of the group's module for inputs of its linears; `linear` stands in for the group's own."""
        linear = linear or get_linear(self.layer, group)
        if group == "o" or group.startswith("down"):
            return [linear(x) for x in inputs]
        layer = with_linear(self.layer, group, linear)
        if group == "gate_up":
            return [ops.scaled(layer.mlp(x)) for x in inputs]
        pairs = zip(inputs, self.batches, strict=True)
        return [ops.scaled(layer.attention(x, batch.rope, batch.attend)) for x, batch in pairs]


def transform(bench: Workbench, block: Block, method: str) -> list[Choice]:
    """Searches the method's scales and applies them to `block` and, divided, to the kept inputs, in place."""
    choices = []
    for mapping in scale_mappings(bench.config):
        if method == "smoothquant" and mapping.name not in smoothquant.MAPPINGS:
            continue
        inputs = bench.tap.inputs[mapping.group]
        reference = bench.outputs(mapping.group, inputs)
        choice = search_scale(
            bench.where,
            mapping.name,
            _candidates(bench, block, mapping, method),
            partial(_loss, bench, block, mapping, inputs, reference),
        )
        columns = apply_scale(
            block, mapping, choice.scale, norm_offset=bench.config.norm_offset, dtype=bench.storage
        )
        bench.tap.inputs[mapping.group] = [x / columns.to(x) for x in inputs]
        choices.append(choice)
    return choices


def _candidates(
    bench: Workbench, block: Block, mapping: ScaleMapping, method: str
) -> Iterator[tuple[dict[str, float], Tensor]]:
    stats: GroupStats = bench.tap.stats[mapping.group]
    weight = torch.cat([block[f"{module}.weight"] for module in mapping.consumers])
    if method == "smoothquant":
        return smoothquant.candidates(mapping.reduce(stats.absmax), mapping.reduce(weight.abs().amax(0)))
    scheme = bench.schemes[mapping.group]
    group_size = scheme.group_size if isinstance(scheme, W4A16) else weight.shape[1]
    magnitude = awq.relative_magnitude(weight, group_size)
    return awq.candidates(mapping.reduce(stats.mean), mapping.reduce(magnitude))


def _loss(
    bench: Workbench,
    block: Block,
    mapping: ScaleMapping,
    inputs: list[Tensor],
    reference: list[Tensor],
    scale: Tensor,
) -> float:
    """Mean squared error of the module's output with the group quantized after `scale`."""
    columns, scheme = mapping.expand(scale), bench.schemes[mapping.group]
    divided = [x / columns.to(x) for x in inputs]
    absmax = max(float(x.abs().amax()) for x in divided) if isinstance(scheme, W8A8Fp8Static) else 0.0
    shards = [
        judged(scheme, block[f"{module}.weight"] * columns, absmax, dtype=bench.storage)
        for module in mapping.consumers
    ]
    bias = get_linear(bench.layer, mapping.group).bias
    linear = Linear(shards, bias, device=bench.device, dtype=bench.dtype)
    outputs = bench.outputs(mapping.group, divided, linear)
    total = sum(float((o - r).float().square_().sum()) for o, r in zip(outputs, reference, strict=True))
    return total / sum(r.numel() for r in reference)
