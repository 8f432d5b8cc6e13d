"""Names and shapes of every tensor of a decoder in its file, from the configuration alone.

All families write the same names, those of transformers: `model.layers.3.self_attn.q_proj.weight`. What
differs is data: a prefix, biases, norms of q and k, two more norms around the blocks (Gemma), projections
that are fused in the file (Phi-3). So loading, checking, quantizing and planning memory all read the list
from here, and none of them opens a file for it.

A *group* is the linears that see one input: they must have one scheme, and a smoothing or AWQ scale
belongs to the group, not to the linear. A *module* is the path of a linear inside its layer,
`self_attn.q_proj`. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from qinfer.config import ModelConfig

Shape = tuple[int, ...]


class LinearGroup(NamedTuple):
    """Linears of one layer that share their input; `modules` are paths relative to the layer."""

    name: str
    modules: tuple[str, ...]


_SEPARATE = (
    LinearGroup("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    LinearGroup("o", ("self_attn.o_proj",)),
    LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    LinearGroup("down", ("mlp.down_proj",)),
)
_FUSED = (
    LinearGroup("qkv", ("self_attn.qkv_proj",)),
    LinearGroup("o", ("self_attn.o_proj",)),
    LinearGroup("gate_up", ("mlp.gate_up_proj",)),
    LinearGroup("down", ("mlp.down_proj",)),
)


@lru_cache(16)
def layer_groups(config: ModelConfig) -> tuple[LinearGroup, ...]:
    """The groups of a layer in the order in which they run: qkv, o, gate_up, down.

    With experts the last two are each expert's own: gate_up.0, down.0, gate_up.1, ...
    """
    groups = _FUSED if config.fused_projections else _SEPARATE
    if config.expert_names is None:
        return groups
    gate, up, down = config.expert_names.linears
    experts = []
    for i in range(config.num_experts):
        prefix = f"{config.expert_names.block}.experts.{i}."
        experts.append(LinearGroup(f"gate_up.{i}", (prefix + gate, prefix + up)))
        experts.append(LinearGroup(f"down.{i}", (prefix + down,)))
    return (*groups[:2], *experts)


def router(config: ModelConfig) -> str:
    """Relative name of the linear that chooses a token's experts; it is never quantized."""
    assert config.expert_names is not None
    return f"{config.expert_names.block}.gate"


def unquantized(config: ModelConfig) -> list[str]:
    """Linears that no scheme is for, as `ignore` of a quantization_config names them: head and routers."""
    if config.expert_names is None:
        return ["lm_head"]
    return ["lm_head", f"re:.*{config.expert_names.block}\\.gate$"]


def relative_name(config: ModelConfig, module: str) -> str:
    """A linear's name within its layer: 'self_attn.q_proj' of 'model.layers.3.self_attn.q_proj'."""
    return module.removeprefix(f"{config.tensor_prefix}layers.").partition(".")[2]


@lru_cache(16)
def layer_modules(config: ModelConfig) -> tuple[str, ...]:
    """Relative names of a layer's linears, group by group."""
    return tuple(module for group in layer_groups(config) for module in group.modules)


def layer_prefix(config: ModelConfig, i: int) -> str:
    """What stands before the relative names of layer `i`: 'model.layers.3.'."""
    return f"{config.tensor_prefix}layers.{i}."


def all_modules(config: ModelConfig) -> tuple[str, ...]:
    """Full names of every linear inside the layers ('model.layers.0.self_attn.q_proj'), layer by layer."""
    return tuple(
        layer_prefix(config, i) + module for i in range(config.num_layers) for module in layer_modules(config)
    )


def linear_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """(out_features, in_features) of a relative module name; KeyError for a name that no layer has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.expert_names is not None and ".experts." in module:
        return (hidden, inner) if module.endswith(f".{config.expert_names.linears[2]}") else (inner, hidden)
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.qkv_proj": (queries + 2 * keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.gate_up_proj": (2 * inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }[module]


def num_weights(config: ModelConfig, modules: Iterable[str]) -> int:
    """Weights of these linears of one layer, by their relative names."""
    return sum(prod(linear_shape(config, module)) for module in modules)


def module_has_bias(config: ModelConfig, module: str) -> bool:
    """Whether the file holds `<module>.bias` for a relative module name."""
    if not module.startswith("self_attn."):
        return config.mlp_bias
    return config.o_bias if module == "self_attn.o_proj" else config.qkv_bias


def layer_norms(config: ModelConfig) -> dict[str, Shape]:
    """Relative names and shapes of a layer's norm weights."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms: dict[str, Shape] = {f"{name}.weight": (config.hidden_size,) for name in names}
    if config.qk_norm:
        norms["self_attn.q_norm.weight"] = norms["self_attn.k_norm.weight"] = (config.head_dim,)
    return norms


def layer_tensors(config: ModelConfig, i: int) -> dict[str, Shape]:
    """Full name -> shape of each tensor of layer `i` when nothing is quantized: weights, biases, norms."""
    tensors: dict[str, Shape] = {}
    for module in layer_modules(config):
        tensors[f"{module}.weight"] = linear_shape(config, module)
        if module_has_bias(config, module):
            tensors[f"{module}.bias"] = linear_shape(config, module)[:1]
    tensors |= layer_norms(config)
    if config.expert_names is not None:
        tensors[f"{router(config)}.weight"] = (config.num_experts, config.hidden_size)
    return {layer_prefix(config, i) + name: shape for name, shape in tensors.items()}


def global_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Full name -> shape of the tensors outside the layers; `lm_head.weight` only when it is not tied."""
    table = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {
        f"{config.tensor_prefix}embed_tokens.weight": table,
        f"{config.tensor_prefix}norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = table
    return tensors
