"""One layer of a decoder, as it runs and as it is read from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qinfer import ops
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import layer_groups, layer_modules, layer_prefix, layer_tensors, router
from qinfer.config import ModelConfig
from qinfer.model.experts import Experts
from qinfer.model.linear import FileTensors, Linear
from qinfer.model.parameters import file_linear, filled
from qinfer.model.parts import Attend, Attention, Mlp, Tap
from qinfer.model.rotary import Rope


class Layer:
    """Attention and MLP around the residual stream; `build` makes one from tensors as they lie in a file."""

    def __init__(
        self, config: ModelConfig, attention: Attention, mlp: Mlp | Experts, norms: Mapping[str, Tensor]
    ) -> None:
        self.config = config
        self.attention = attention
        self.mlp = mlp
        self.input_norm = norms["input_layernorm.weight"]
        if config.sandwich_norms:
            self.attention_out_norm: Tensor | None = norms["post_attention_layernorm.weight"]
            self.mlp_norm = norms["pre_feedforward_layernorm.weight"]
            self.mlp_out_norm: Tensor | None = norms["post_feedforward_layernorm.weight"]
        else:  # here "post_attention" means before the MLP
            self.attention_out_norm = self.mlp_out_norm = None
            self.mlp_norm = norms["post_attention_layernorm.weight"]
        self._wide_norms = [  # for one token on a CPU
            None if norm.device.type != "cpu" else norm.float() + config.norm_offset
            for norm in (self.input_norm, self.mlp_norm)
        ]

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        index: int,
        linears: Mapping[str, FileTensors],
        others: Mapping[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Layer:
        """Makes layer `index`; q/k/v become one product, gate/up another, so each group has one scheme.

        `linears`: relative module name ("self_attn.q_proj") -> (scheme, file tensors). `others`: relative
        names of norms and biases ("input_layernorm.weight", "self_attn.q_proj.bias"). One missing: KeyError.
        """
        others = {name: tensor.to(device, dtype) for name, tensor in others.items()}
        groups = {}
        for group in layer_groups(config):
            make = Linear.of_gate_and_up if group.name.startswith("gate_up") else Linear
            shards = [linears[module] for module in group.modules]
            bias = _joined_bias(group.modules, others)
            groups[group.name] = make(shards, bias, device=device, dtype=dtype)
        attention = Attention(config, index, groups["qkv"], groups["o"], others)
        if not config.num_experts:
            return cls(config, attention, Mlp(config, groups["gate_up"], groups["down"]), others)
        experts = [
            Mlp(config, groups[f"gate_up.{i}"], groups[f"down.{i}"]) for i in range(config.num_experts)
        ]
        return cls(config, attention, Experts(config, others[f"{router(config)}.weight"], experts), others)

    def __call__(self, hidden: Tensor, rope: Rope, attend: Attend, tap: Tap | None = None) -> Tensor:
        """The residual stream before the layer -> after it, [T, H]."""
        before = hidden.dtype
        x, hidden = self.step(None, hidden, rope, attend, tap)
        total = torch.add(hidden, ops.scaled(x), alpha=self.config.residual_multiplier)
        return total.to(before)

    def step(
        self,
        x: ops.Product | None,
        hidden: Tensor,
        rope: Rope,
        attend: Attend,
        tap: Tap | None = None,
        rows: Tensor | None = None,
    ) -> tuple[ops.Product, Tensor]:
        """The layer from norm to norm: takes what the last layer left to add to the stream, leaves its own.

        So each addition and the norm of the sum are one op. x (None: nothing) and hidden [T, H]. All tokens
        are attended to, but what comes after attention is only done for those in `rows`, None: all.
        """
        config = self.config
        eps, offset, multiplier = config.rms_norm_eps, config.norm_offset, config.residual_multiplier
        qkv_codes = self.attention.qkv.codes if tap is None else None
        mlp_codes = self.mlp.codes if tap is None else None
        wide, mlp_wide = self._wide_norms
        if x is None:
            normed = ops.rms_norm_to(qkv_codes, hidden, self.input_norm, eps, offset=offset, wide=wide)
        else:
            normed, hidden = ops.add_rms_norm_to(
                qkv_codes, x, hidden, self.input_norm, eps, offset=offset, multiplier=multiplier, wide=wide
            )
        x = self.attention(normed, rope, attend, tap, rows)
        hidden = hidden if rows is None else hidden[rows]
        if self.attention_out_norm is not None:
            x = ops.rms_norm(x, self.attention_out_norm, eps, offset=offset)
        normed, hidden = ops.add_rms_norm_to(
            mlp_codes, x, hidden, self.mlp_norm, eps, offset=offset, multiplier=multiplier, wide=mlp_wide
        )
        x = self.mlp(normed, tap)
        if self.mlp_out_norm is not None:
            x = ops.rms_norm(x, self.mlp_out_norm, eps, offset=offset)
        return x, hidden


def load_layer(checkpoint: Checkpoint, index: int, *, device: torch.device, dtype: torch.dtype) -> Layer:
    """Reads one layer; raises like `decoder.load_decoder`."""
    config = checkpoint.config
    prefix = layer_prefix(config, index)
    modules = layer_modules(config)
    weights = {f"{prefix}{module}.weight" for module in modules}
    shapes = {n: shape for n, shape in layer_tensors(config, index).items() if n not in weights}
    others = filled(checkpoint, shapes, device, dtype)
    return Layer.build(
        config,
        index,
        {module: file_linear(checkpoint, prefix + module, device, dtype) for module in modules},
        {name.removeprefix(prefix): tensor for name, tensor in others.items()},
        device=device,
        dtype=dtype,
    )


def _joined_bias(modules: Sequence[str], others: Mapping[str, Tensor]) -> Tensor | None:
    names = [f"{module}.bias" for module in modules]
    if not any(name in others for name in names):
        return None
    return torch.cat([others[name] for name in names])
