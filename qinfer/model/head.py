"""The head, which makes logits of hidden states: dense, or int8 by choice when a model is loaded.

A vocabulary of 128,000 makes the head a fifth of what one token reads of an 8B model in 4 bits. In int8 it is
half as large, with a scale for each token's row, and hidden states stay as they are. The embedding is left
alone: looking up a row of it is cheap. A model whose head is its embedding then keeps both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.model.linear import Linear
from qinfer.quant import Dense, W8A16Int8

LM_HEAD_DTYPES = ("auto", "int8")
_MULTIPLE = 8  # of rows, which kernels want: 32,001 tokens get 7 rows of zeros
_ROWS_AT_ONCE = 16384  # quantized in float32, of which there should not be a whole vocabulary


def check_lm_head_dtype(name: str) -> None:
    """UserError unless `name` is one of LM_HEAD_DTYPES: auto is the dtype of activations."""
    if name not in LM_HEAD_DTYPES:
        raise UserError(
            f"lm_head_dtype must be one of {', '.join(LM_HEAD_DTYPES)}, not {name!r:.100}", "lm_head_dtype"
        )


def make_head(weight: Tensor, lm_head_dtype: str = "auto") -> Linear:
    """hidden [rows, H] -> logits [rows, V] in weight's dtype, on its device; weight [V, H] is not copied.

    An int8 head may have a few logits more, of no token. Raises UserError for an unknown `lm_head_dtype`.
    """
    check_lm_head_dtype(lm_head_dtype)
    if lm_head_dtype == "auto":
        return Linear([(Dense(), {"weight": weight})], device=weight.device, dtype=weight.dtype)
    scheme = W8A16Int8()
    if len(weight) % _MULTIPLE:
        weight = functional.pad(weight, (0, 0, 0, -len(weight) % _MULTIPLE))
    slices = [scheme.quantize(rows, dtype=weight.dtype) for rows in torch.split(weight, _ROWS_AT_ONCE)]
    return Linear([(scheme, scheme.fuse(slices))], device=weight.device, dtype=weight.dtype)


def saved_bytes(config: ModelConfig, lm_head_dtype: str, item_bytes: int) -> int:
    """Bytes that a head of that dtype takes less than a dense one; negative where the embedding stays."""
    if lm_head_dtype == "auto":
        return 0
    rows, width = config.vocab_size, config.hidden_size
    dense = 0 if config.tie_word_embeddings else rows * width * item_bytes
    return dense - -(-rows // _MULTIPLE) * _MULTIPLE * (width + item_bytes)
