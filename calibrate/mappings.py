"""Which earlier operation a scale of a linear's input can be moved into, for every family.

Dividing channel j of a linear's input by s_j and multiplying column j of its weight by s_j changes nothing,
provided that whatever made the input can be divided instead. In a decoder layer four makers can: the norm
before q/k/v, the norm before gate/up, v_proj before o_proj (attention mixes tokens, never channels of v),
and up_proj before down_proj (the input of down is act(gate) * up). Norms of q and k, soft caps and the
norms that Gemma 2/3 put behind attention and MLP lie elsewhere, so they do not matter; in those models the
norm before gate/up has another name.

Under grouped-query attention one channel of v feeds several query heads, so the scale of o_proj's columns
must be the same across the heads that share a kv head: it is found in v's width and expanded.

The norm of the file is stored in the model's dtype, and rounding it after the division would change the
function by up to 2^-9 in bfloat16. So the norm is rounded first and the columns take the ratio that really
results: the product is exact whatever the dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.checkpoint.names import layer_groups
from qinfer.config import ModelConfig

Block = dict[str, Tensor]  # one layer's dense tensors, float32, by relative name


class SharedHeads(NamedTuple):
    """Channels of v that reach o_proj `repeats` times."""

    num_kv_heads: int
    repeats: int
    head_dim: int


class ScaleMapping(NamedTuple):
    """One place where a scale fits: the linears of `group` multiply it in, `source` divides it out."""

    name: str
    group: str
    consumers: tuple[str, ...]
    source: str  # relative name of a norm or of a linear
    is_norm: bool
    rows: tuple[int, int] | None = None  # of a linear source fused in the file: first and last + 1
    heads: SharedHeads | None = None

    def reduce(self, x: Tensor) -> Tensor:
        """Statistics [K] of the consumers' input -> [channels of the source], mean over shared heads."""
        if self.heads is None:
            return x
        kv, repeats, dim = self.heads
        return x.view(kv, repeats, dim).mean(1).reshape(-1)

    def expand(self, scale: Tensor) -> Tensor:
        """A scale per channel of the source -> one per column of the consumers."""
        if self.heads is None:
            return scale
        kv, repeats, dim = self.heads
        return scale.view(kv, 1, dim).expand(kv, repeats, dim).reshape(-1)


def scale_mappings(config: ModelConfig) -> tuple[ScaleMapping, ...]:
    """The four mappings of a layer, in the order in which the layer runs: qkv, o, gate_up, down.

    With experts the norm before them, which they and the router share, stays; up -> down is each one's own.
    """
    groups = {group.name: group.modules for group in layer_groups(config)}
    mlp_norm = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    keys = config.num_kv_heads * config.head_dim
    value_start = config.num_heads * config.head_dim + keys
    inner = config.intermediate_size
    heads = SharedHeads(config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    fused = config.fused_projections
    value = groups["qkv"][-1]
    attention = (
        ScaleMapping("norm->qkv", "qkv", groups["qkv"], "input_layernorm", True),
        ScaleMapping(
            "v->o",
            "o",
            groups["o"],
            value,
            False,
            (value_start, value_start + keys) if fused else None,
            heads,
        ),
    )
    if config.num_experts:
        own = [
            ScaleMapping(f"up->down.{i}", f"down.{i}", groups[f"down.{i}"], groups[f"gate_up.{i}"][-1], False)
            for i in range(config.num_experts)
        ]
        return (*attention, *own)
    up = groups["gate_up"][-1]
    return (
        *attention,
        ScaleMapping("norm->gate_up", "gate_up", groups["gate_up"], mlp_norm, True),
        ScaleMapping("up->down", "down", groups["down"], up, False, (inner, 2 * inner) if fused else None),
    )


def apply_scale(
    block: Block, mapping: ScaleMapping, scale: Tensor, *, norm_offset: float, dtype: torch.dtype
) -> Tensor:
    """Moves `scale` through one mapping of `block`, in place; the layer's function stays the same.

    `scale` is float32, positive, one per channel of the source; `dtype` is that of the stored norm. Returns
    the factor that each column of the consumers was multiplied by, [K]: the caller divides the inputs that
    it keeps by it.
    """
    if mapping.is_norm:
        scale = _divide_norm(block, f"{mapping.source}.weight", scale, norm_offset, dtype)
    else:
        _divide_rows(block, mapping, scale)
    columns = mapping.expand(scale)
    for module in mapping.consumers:
        block[f"{module}.weight"] = block[f"{module}.weight"] * columns
    return columns


def _divide_norm(block: Block, name: str, scale: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """Divides a norm's gain and returns the ratio of the old to the rounded new one.

    A channel whose gain is zero, or would become so (1 + w close to zero in bfloat16), is left as it was.
    """
    gain = block[name] + offset
    rounded = (gain / scale - offset).to(dtype).float()
    alive = (gain != 0) & (rounded + offset != 0)
    ratio = torch.where(alive, gain / torch.where(alive, rounded + offset, 1.0), 1.0)
    alive &= ratio > 0  # a sign that flips in rounding would make the columns' scale negative
    block[name] = torch.where(alive, rounded, block[name])
    return torch.where(alive, ratio, 1.0)


def _divide_rows(block: Block, mapping: ScaleMapping, scale: Tensor) -> None:
    weight = block[f"{mapping.source}.weight"].clone()
    first, last = mapping.rows or (0, weight.shape[0])
    weight[first:last] /= scale[:, None]
    block[f"{mapping.source}.weight"] = weight
    if (bias := block.get(f"{mapping.source}.bias")) is not None:
        bias = bias.clone()
        bias[first:last] /= scale
        block[f"{mapping.source}.bias"] = bias
