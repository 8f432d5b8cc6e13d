"""The decoder: one definition for all families, which `ModelConfig` tells apart.

Tokens of all sequences of a step lie in one row of length T; nothing here knows where a sequence begins. That
is the business of `attend`, which the caller passes in: the engine's goes through its pages, calibration's
sees whole sequences. Hidden states are [T, H] in the decoder's dtype, logits float32.

Parameters begin as NaN and are filled from the file, and one that holds NaN afterwards is named in an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from qinfer import ops
from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.names import (
    Shape,
    global_tensors,
    layer_groups,
    layer_modules,
    layer_prefix,
    layer_tensors,
    router,
)
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError
from qinfer.model.experts import Experts
from qinfer.model.head import make_head
from qinfer.model.linear import FileTensors, Linear
from qinfer.model.parts import Attend, Attention, Mlp, Tap
from qinfer.model.rotary import Rope, RotaryEmbedding
from qinfer.model.storage import Aside

_CPU = torch.device("cpu")


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
        groups = {
            group.name: Linear(
                [linears[module] for module in group.modules],
                _joined_bias(group.modules, others),
                device=device,
                dtype=dtype,
            )
            for group in layer_groups(config)
        }
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
        self, x: ops.Product | None, hidden: Tensor, rope: Rope, attend: Attend, tap: Tap | None = None
    ) -> tuple[ops.Product, Tensor]:
        """The layer from norm to norm: takes what the last layer left to add to the stream, leaves its own.

        So each addition and the norm of the sum are one op. x (None: nothing) and hidden [T, H].
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
        x = self.attention(normed, rope, attend, tap)
        if self.attention_out_norm is not None:
            x = ops.rms_norm(x, self.attention_out_norm, eps, offset=offset)
        normed, hidden = ops.add_rms_norm_to(
            mlp_codes, x, hidden, self.mlp_norm, eps, offset=offset, multiplier=multiplier, wide=mlp_wide
        )
        x = self.mlp(normed, tap)
        if self.mlp_out_norm is not None:
            x = ops.rms_norm(x, self.mlp_out_norm, eps, offset=offset)
        return x, hidden


class Decoder:
    """Embedding, layers, final norm and head; callers wrap it in `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Tensor,
        head: Linear,
    ) -> None:
        """`embedding` [V, H], `norm` [H] and what `make_head` made: on one device, of one dtype."""
        self.config = config
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._int8_rows = all(layer.attention.qkv.codes is torch.int8 for layer in self.layers)
        # Gemma's root of H was rounded to the model's dtype in training, and is so here
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        self.set_context_len(config.context_len)

    def set_context_len(self, context_len: int) -> None:
        """Settles the longest sequence to come, in tokens; longrope and dynamic scaling turn by it.

        Before the first step, or with an empty cache: keys turned otherwise would no longer fit.
        """
        config = self.config
        self._rotary = RotaryEmbedding(config.rope, context_len, self.device)
        self._local_rotary = (
            RotaryEmbedding(config.local_rope, context_len, self.device) if config.local_rope else None
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> hidden states [T, H]."""
        hidden = F.embedding(token_ids, self.embedding)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier

    def rope(self, positions: Tensor) -> Rope:
        """The rotations of one step, for all its layers; positions [T]."""
        dtype = torch.float32 if self._int8_rows and ops.is_int8_row(torch.int8, positions) else self.dtype
        full = self._rotary(positions, dtype)
        return Rope(full, self._local_rotary(positions, dtype) if self._local_rotary else full)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids and positions [T] -> hidden states after the final norm [T, H]."""
        config = self.config
        x: ops.Product | None = None
        hidden = self.embed(token_ids)
        rope = self.rope(positions)
        for layer in self.layers:
            x, hidden = layer.step(x, hidden, rope, attend)
        assert x is not None
        if isinstance(x, Tensor):
            x, hidden = x.to(self.dtype), hidden.to(self.dtype)  # float32, where one token ran by rows
        eps, offset, multiplier = config.rms_norm_eps, config.norm_offset, config.residual_multiplier
        return ops.add_rms_norm(x, hidden, self.norm, eps, offset=offset, multiplier=multiplier)[0]

    def logits(self, hidden: Tensor, *, to_compare: bool = False) -> Tensor:
        """Normed hidden states [rows, H] -> [rows, V] float32, or of the model's dtype if only `to_compare`.

        The greatest of a row is the same then, without a pass over all logits to widen them.
        """
        config = self.config
        logits = self.head(hidden)
        if logits.shape[1] > config.vocab_size:
            logits = logits[:, : config.vocab_size].contiguous()
        if to_compare and config.logits_divisor == 1.0 and config.logits_softcap is None:
            return logits
        logits = logits.float()
        if config.logits_divisor != 1.0:
            logits = logits / config.logits_divisor
        if config.logits_softcap is not None:
            logits = torch.tanh(logits / config.logits_softcap) * config.logits_softcap
        return logits


def _joined_bias(modules: Sequence[str], others: Mapping[str, Tensor]) -> Tensor | None:
    names = [f"{module}.bias" for module in modules]
    if not any(name in others for name in names):
        return None
    return torch.cat([others[name] for name in names])


def load_decoder(
    checkpoint: Checkpoint,
    *,
    device: torch.device = _CPU,
    dtype: torch.dtype | None = None,
    lm_head_dtype: str = "auto",
    progress: bool = False,
) -> Decoder:
    """Reads the whole model; `dtype` of activations and unquantized weights, the checkpoint's when None.

    Raises CheckpointError naming a tensor that is missing or holds NaN, UserError for a `lm_head_dtype` that
    is not one of head.LM_HEAD_DTYPES.
    """
    config = checkpoint.config
    dtype = dtype or getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    aside = Aside(device)
    embedding, norm, head = aside(partial(_ends, checkpoint, device, dtype, lm_head_dtype))
    aside.give_back()  # the ends are by far the largest
    indices: Iterable[int] = range(config.num_layers)
    if progress:
        indices = tqdm(indices, desc="loading", unit="layer", delay=1.0)
    layers = [aside(partial(load_layer, checkpoint, i, device=device, dtype=dtype)) for i in indices]
    return Decoder(config, embedding, layers, norm, head)


def load_ends(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, lm_head_dtype: str = "auto"
) -> Decoder:
    """The decoder without its layers, to make logits of hidden states that are known; as `load_decoder`."""
    embedding, norm, head = _ends(checkpoint, device, dtype, lm_head_dtype)
    return Decoder(checkpoint.config, embedding, [], norm, head)


def _ends(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, lm_head_dtype: str
) -> tuple[Tensor, Tensor, Linear]:
    """Embedding, final norm and head."""
    config = checkpoint.config
    ends = _filled(checkpoint, global_tensors(config), device, dtype)
    embedding, norm = (ends[f"{config.tensor_prefix}{name}.weight"] for name in ("embed_tokens", "norm"))
    head = embedding if config.tie_word_embeddings else ends.pop("lm_head.weight")
    return embedding, norm, make_head(head, lm_head_dtype)


def load_layer(checkpoint: Checkpoint, index: int, *, device: torch.device, dtype: torch.dtype) -> Layer:
    """Reads one layer; raises like `load_decoder`."""
    config = checkpoint.config
    prefix = layer_prefix(config, index)
    modules = layer_modules(config)
    weights = {f"{prefix}{module}.weight" for module in modules}
    shapes = {n: shape for n, shape in layer_tensors(config, index).items() if n not in weights}
    others = _filled(checkpoint, shapes, device, dtype)
    return Layer.build(
        config,
        index,
        {module: _linear(checkpoint, prefix + module, device, dtype) for module in modules},
        {name.removeprefix(prefix): tensor for name, tensor in others.items()},
        device=device,
        dtype=dtype,
    )


def _filled(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of these names and shapes, NaN until the file's tensors are copied in."""
    parameters = {
        name: torch.full(shape, math.nan, device=device, dtype=dtype) for name, shape in shapes.items()
    }
    for name, parameter in parameters.items():
        tensor = checkpoint.tensor(name, device)
        assert tensor.shape == parameter.shape, name  # the checkpoint has checked; copy_ would broadcast
        _refuse_overflow(checkpoint, name, tensor, dtype)
        parameter.copy_(tensor)
    _refuse_nan(checkpoint, parameters)
    return parameters


def _linear(checkpoint: Checkpoint, module: str, device: torch.device, dtype: torch.dtype) -> FileTensors:
    """A linear's scheme and file tensors, whose presence and shapes the checkpoint has checked."""
    tensors = checkpoint.module(module, device)
    _refuse_nan(checkpoint, {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
    for suffix, tensor in tensors.items():
        _refuse_overflow(checkpoint, f"{module}.{suffix}", tensor, dtype)
    return checkpoint.scheme(module), tensors


def _refuse_nan(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise CheckpointError(f"{checkpoint.path}: {name} holds NaN, so this checkpoint is broken")


def _refuse_overflow(checkpoint: Checkpoint, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """CheckpointError for a number of the file that float16, the one narrow dtype, makes infinite."""
    if dtype is not torch.float16 or tensor.dtype not in (torch.bfloat16, torch.float32):
        return
    largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise CheckpointError(
            f"{checkpoint.path}: {name} holds {largest:.4g}, which float16 cannot: load it as bfloat16 or "
            "float32"
        )
