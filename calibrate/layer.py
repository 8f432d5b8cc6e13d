"""What happens to one layer: watch it dense, move scales, then round group by group while walking through it.

    dense layer on all batches -> magnitudes per channel, inputs of some batches  (only for SmoothQuant, AWQ)
    search scales, move them into norms and neighbours
    for each group: inputs as the quantized linears before it make them -> ranges -> round -> put it in place

The walk's end is the next layer's input. A method that looks at weights alone walks nowhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.calibrate import health
from qinfer.calibrate.block import Batch, biases_and_norms, dense_layer, observe
from qinfer.calibrate.devices import give_memory_back
from qinfer.calibrate.gram import Inputs
from qinfer.calibrate.groups import HowToRound, RoundedGroup, round_group
from qinfer.calibrate.kv_scales import WatchedAttention, head_maxima
from qinfer.calibrate.mappings import Block
from qinfer.calibrate.report import LayerReport
from qinfer.calibrate.roundtrip import dequantized
from qinfer.calibrate.search import Choice
from qinfer.calibrate.stages import get_linear, set_linear, starved, walk
from qinfer.calibrate.transform import Workbench, transform
from qinfer.checkpoint.names import layer_groups, layer_prefix, linear_shape
from qinfer.config import ModelConfig
from qinfer.model.experts import Experts
from qinfer.model.layer import Layer
from qinfer.model.linear import Linear
from qinfer.quant import Scheme, W8A8Fp8Static
from qinfer.quant.rounding import FP8_MAX

logger = logging.getLogger(__name__)

ERROR_TOKENS = 2048  # tokens that the reported errors of outputs are measured on


@dataclass(frozen=True)
class LayerPlan:
    """What is to be done to one layer; `schemes` by group, `storage` is the dtype of scales in the file."""

    config: ModelConfig
    index: int
    schemes: Mapping[str, Scheme]
    transform: str | None
    ranges: str
    by_gptq: bool
    storage: torch.dtype
    device: torch.device
    dtype: torch.dtype  # of the computation

    @property
    def prefix(self) -> str:
        """What stands before the layer's relative names."""
        return layer_prefix(self.config, self.index)

    def how(self, group: str) -> HowToRound:
        """How a group is rounded; ranges judged by outputs are for groups of weights, others take all."""
        scheme = self.schemes[group]
        ranges = self.ranges
        if ranges == "output" and scheme.name != "w4a16":
            ranges = "absmax"
        return HowToRound(scheme, ranges, self.by_gptq, self.storage)


class QuantizedLayer(NamedTuple):
    """Tensors by relative name, the largest key and value of each head {"k", "v": [Hkv]}, the report."""

    tensors: dict[str, Tensor]
    kv_maxima: dict[str, Tensor]
    report: LayerReport


def quantize_layer(plan: LayerPlan, block: Block, batches: Sequence[Batch]) -> QuantizedLayer:
    """Quantizes a layer; the batches move on through it. A method that needs no text has no batches.

    `block` is the dense layer, which scales are moved into in place.
    """
    start = time.perf_counter()
    choices: list[Choice] = []
    if plan.transform and batches:
        choices = _transformed(plan, block, batches)
    rounding = _Rounding(plan, block)
    maxima: dict[str, Tensor] = {}
    if batches:
        layer = dense_layer(plan.config, plan.index, block, device=plan.device, dtype=plan.dtype)
        attends = [WatchedAttention(batch.num_sequences) for batch in batches]
        for group, inputs in walk(layer, batches, attends):
            if group == "gate_up.0":
                rounding.notes |= _starved_notes(plan.index, layer, inputs)
            rounding.group(group, Inputs(inputs, sample=ERROR_TOKENS), layer)
        del inputs
        give_memory_back()
        maxima = head_maxima(attends)
    else:
        for linear_group in layer_groups(plan.config):
            rounding.group(linear_group.name, None, None)
    tensors = {f"{m}.{suffix}": t for m, file in rounding.linears.items() for suffix, t in file.items()}
    tensors |= biases_and_norms(plan.config, block)
    report = LayerReport(
        index=plan.index,
        seconds=time.perf_counter() - start,
        weight_errors=rounding.weight_errors,
        output_errors=rounding.output_errors,
        input_absmax=rounding.input_absmax,
        outliers=rounding.outliers,
        scales=[
            {"mapping": c.mapping, **c.setting, "loss": c.loss, "unscaled_loss": c.unscaled_loss}
            for c in choices
        ],
        clipping=rounding.clipping,
        clipped=rounding.clipped,
        input_clipped=rounding.input_clipped,
        range_used=rounding.range_used,
        groups={group.name: list(group.modules) for group in layer_groups(plan.config)},
        kv_absmax={name: absmax.tolist() for name, absmax in maxima.items()},
        notes=rounding.notes,
    )
    return QuantizedLayer(tensors, maxima, report)


def _transformed(plan: LayerPlan, block: Block, batches: Sequence[Batch]) -> list[Choice]:
    layer = dense_layer(plan.config, plan.index, block, device=plan.device, dtype=plan.dtype)
    kept = [batch for batch in batches if batch.keep]
    bench = Workbench(
        plan.config,
        plan.index,
        layer,
        kept,
        observe(layer, batches),
        plan.schemes,
        plan.storage,
        plan.device,
        plan.dtype,
    )
    assert plan.transform is not None
    return transform(bench, block, plan.transform)


def _starved_notes(index: int, layer: Layer, inputs: Sequence[Tensor]) -> dict[str, str]:
    """Names the experts that the calibration text did not reach, in the log and by group."""
    assert isinstance(layer.mlp, Experts)
    experts = starved(layer.mlp, inputs)
    if experts:
        logger.warning(
            "layer %d: the router chose %d of %d experts for none of %d calibration tokens; they were "
            "calibrated on all of them",
            *(index, len(experts), len(layer.mlp.experts), sum(map(len, inputs))),
        )
    note = "chosen for no calibration token, calibrated on all of them"
    return {f"{group}.{i}": note for i in experts for group in ("gate_up", "down")}


class _Rounding:
    """The layer's linears as they become quantized, one group after another, with what is reported."""

    def __init__(self, plan: LayerPlan, block: Block) -> None:
        self.plan = plan
        self.block = block
        self.linears: dict[str, dict[str, Tensor]] = {}
        self.weight_errors: dict[str, float] = {}
        self.output_errors: dict[str, float] = {}
        self.input_absmax: dict[str, float] = {}
        self.outliers: dict[str, float] = {}
        self.clipping: dict[str, float] = {}
        self.clipped: dict[str, float] = {}
        self.input_clipped: dict[str, float] = {}
        self.range_used: dict[str, float] = {}
        self.notes: dict[str, str] = {}
        self._modules = {group.name: group.modules for group in layer_groups(plan.config)}

    def group(self, group: str, inputs: Inputs | None, layer: Layer | None) -> None:
        """Rounds one group; with `layer`, whose linears are being replaced, puts it in place."""
        plan, scheme = self.plan, self.plan.schemes[group]
        weights = {module: self.block[f"{module}.weight"] for module in self._modules[group]}
        rounded: RoundedGroup = round_group(weights, inputs, plan.how(group), plan.prefix)
        read_back = {}
        for module, tensors in rounded.linears.items():
            shape = linear_shape(plan.config, module)
            health.check_linear(plan.prefix + module, tensors, scheme, shape, plan.storage)
            read_back[module] = scheme.dequantize(tensors)
            self.weight_errors[module] = relative_error(read_back[module], weights[module])
        self.linears |= rounded.linears
        self.clipping |= rounded.clipping
        self.clipped |= rounded.clipped
        if rounded.note:
            self.notes[group] = rounded.note
        if layer is not None and inputs is not None:
            shards = [dequantized(scheme, rounded.linears[m], w) for m, w in read_back.items()]
            dense = get_linear(layer, group)
            linear = Linear(shards, dense.bias, device=plan.device, dtype=plan.dtype)
            self.output_errors[group] = _output_error(linear, dense, inputs)
            self.input_absmax[group] = inputs.absmax
            self.outliers[group] = inputs.outliers
            if isinstance(scheme, W8A8Fp8Static):
                scale = rounded.linears[self._modules[group][0]]["input_scale"]  # one for all of the group
                self.input_clipped[group] = inputs.share_beyond(FP8_MAX * float(scale))
                self.range_used[group] = inputs.range_used
            set_linear(layer, group, linear)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, 0 where the reference is."""
    norm = float(reference.norm())
    return float((out - reference).norm()) / norm if norm else 0.0


def _output_error(linear: Linear, dense: Linear, inputs: Inputs) -> float:
    """Relative error of the output on the first tokens of every batch, bias included in both."""
    difference = size = 0.0
    for x in inputs.first:
        reference = dense(x).float()
        difference += float((linear(x).float() - reference).square_().sum())
        size += float(reference.square_().sum())
    return (difference / size) ** 0.5 if size else 0.0
