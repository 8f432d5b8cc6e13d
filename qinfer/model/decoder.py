"""The decoder: one definition for all families, which `ModelConfig` tells apart.

Tokens of all sequences of a step lie in one row of length T; nothing here knows where a sequence begins. That
is the business of `attend`, which the caller passes in: the engine's goes through its pages, calibration's
sees whole sequences. Hidden states are [T, H] in the decoder's dtype, logits float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from qinfer import ops
from qinfer.checkpoint.checkpoint import CPU, Checkpoint
from qinfer.checkpoint.names import global_tensors
from qinfer.config import ModelConfig
from qinfer.dtypes import DTYPES
from qinfer.model.head import make_head
from qinfer.model.layer import Layer, load_layer
from qinfer.model.linear import Linear
from qinfer.model.parameters import filled
from qinfer.model.parts import Attend
from qinfer.model.rotary import Rope, RotaryEmbedding
from qinfer.model.storage import Aside


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

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """token_ids and positions [T] -> hidden states after the final norm [T, H], or only of `rows`.

        Of the last layer nobody needs the other tokens but their keys and values.
        """
        config = self.config
        x: ops.Product | None = None
        hidden = self.embed(token_ids)
        rope = self.rope(positions)
        for layer in self.layers[:-1]:
            x, hidden = layer.step(x, hidden, rope, attend)
        x, hidden = self.layers[-1].step(x, hidden, rope, attend, rows=rows)
        if isinstance(x, Tensor):
            x, hidden = x.to(self.dtype), hidden.to(self.dtype)  # float32, where one token ran by rows
        eps, offset, multiplier = config.rms_norm_eps, config.norm_offset, config.residual_multiplier
        return ops.add_rms_norm(x, hidden, self.norm, eps, offset=offset, multiplier=multiplier)[0]

    def normed(self, hidden: Tensor) -> Tensor:
        """The stream behind the last layer after the final norm, [T, H]."""
        return ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps, offset=self.config.norm_offset)

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


def load_decoder(
    checkpoint: Checkpoint,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype | None = None,
    lm_head_dtype: str = "auto",
    progress: bool = False,
) -> Decoder:
    """Reads the whole model; `dtype` of activations and unquantized weights, the checkpoint's when None.

    Raises CheckpointError naming a tensor that is missing or holds NaN, UserError for a `lm_head_dtype` that
    is not one of head.LM_HEAD_DTYPES.
    """
    config = checkpoint.config
    dtype = dtype or DTYPES[config.dtype]
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
    ends = filled(checkpoint, global_tensors(config), device, dtype)
    embedding, norm = (ends[f"{config.tensor_prefix}{name}.weight"] for name in ("embed_tokens", "norm"))
    head = embedding if config.tie_word_embeddings else ends.pop("lm_head.weight")
    return embedding, norm, make_head(head, lm_head_dtype)
