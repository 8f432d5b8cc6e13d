"""What a step takes beside weights and KV pages, from shapes alone, as plain ints. No torch.

The engine measures it on a GPU (`profile.py`); `qinfer plan` and a CPU engine take these numbers. A step has
moments that never coincide: the MLP's and attention's of one layer, where everything grows with the tokens of
the step, and sampling, where it grows with the sequences and the vocabulary. The largest counts. What copies
rows of logits (penalties, log-probabilities, the scores of a prompt) goes by slices and does not grow.
"""

from __future__ import annotations

from qinfer.config import ModelConfig
from qinfer.engine.footprint import DENSE, ITEM_BYTES, WeightFormat
from qinfer.engine.options import StepLimits

MIB = 1 << 20
RUNTIME = 576 * MIB  # of a GPU: CUDA's context, kernels and libraries, and what the allocator cannot use
SLICE = 96 * MIB  # copies of a slice of logits, for penalties or log-probabilities
LEAST_TOKENS = 512  # of a step, below which a GPU's products are no longer efficient
SHARE = 32  # a step's share of what the weights leave of a budget is one part of so many, at most


def cpu_step_bytes(config: ModelConfig, limits: StepLimits, item_bytes: int) -> int:
    """Upper estimate for a CPU: rows of `item_bytes` numbers for the tokens, and samples for the sequences.

    The MLP: residual, normed input, output, gate|up and their product. Attention: q, k, v and the output
    beside the stream. Sampling: float32 logits, a sorted copy, its int64 order, probabilities.
    """
    stream = 3 * config.hidden_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = limits.max_num_batched_tokens * (stream + max(3 * config.intermediate_size, heads)) * item_bytes
    return max(layer, limits.max_num_seqs * config.vocab_size * (4 + 4 + 8 + 4))


def gpu_step_bytes(
    config: ModelConfig, limits: StepLimits, weight_format: WeightFormat = DENSE, dtype: str | None = None
) -> int:
    """Planned peak on a GPU; `dtype` is the activations' (None: the config's).

    A layer: the stream before and after, what is to be added to it twice, and the normed input; then gate|up
    with their product, or q, k, v with the context. Weight-only schemes widen one weight besides. Sampling:
    the step's hidden states, logits in the model's dtype and in float32, and copies of a slice.
    """
    item = ITEM_BYTES[dtype or config.dtype]
    tokens, hidden, inner = limits.max_num_batched_tokens, config.hidden_size, config.intermediate_size
    coded = weight_format.scheme.startswith("w8a8")
    widened = 0 if coded or weight_format.scheme == "dense" else 2 * inner * hidden * item
    stream = 5 * tokens * hidden * item
    gated = tokens * inner * (2 * item + (1 if coded else item))
    mlp = max(gated, tokens * inner * 2 * item + widened)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = tokens * (heads * item + 2 * config.head_dim * 4)
    logits = limits.max_num_seqs * config.vocab_size * (item + 4)
    return max(stream + max(mlp, attention), 2 * tokens * hidden * item + logits + SLICE)


def graph_bytes(config: ModelConfig, limits: StepLimits) -> int:
    """Planned memory of the CUDA graphs that an engine captures: none yet."""
    return 0
