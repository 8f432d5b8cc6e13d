"""What a step takes beside weights and KV pages, from shapes alone, as plain ints. No torch.

The engine measures it on a GPU (`profile.py`); `qinfer plan` and a CPU engine take these numbers. A step has
moments that never coincide: the MLP's and attention's of one layer, where everything grows with the tokens of
the step, and sampling, where it grows with the sequences and the vocabulary. The largest counts. What copies
rows of logits (penalties, log-probabilities, the scores of a prompt) goes by slices and does not grow.
"""

from __future__ import annotations

from qinfer.config import ModelConfig
from qinfer.engine.footprint import ITEM_BYTES, WeightFormat
from qinfer.engine.options import StepLimits
from qinfer.engine.plan import buckets

MIB = 1 << 20
# On a GPU, in bytes; measured on an H200 with torch 2.11
RUNTIME = 736 * MIB  # CUDA's context (527), libraries and kernels, and what the allocator cannot use
SLICE = 104 * MIB  # copies of a slice of logits, for penalties or log-probabilities
WIDE_PAGES = 128 * MIB  # 8-bit pages of a step's chunks, widened
GRAPH_LAYER = 64 << 10  # of one layer in one CUDA graph
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
    config: ModelConfig, limits: StepLimits, weight_format: WeightFormat, kv_cache_dtype: str, dtype: str
) -> int:
    """Planned peak on a GPU; `dtype` is the activations', `kv_cache_dtype` resolved.

    A layer: the stream before and after, what was added to it, the normed input, and rotations in float32;
    then gate|up with their product, or q, k, v with the context. Weight-only schemes widen one weight
    besides, 8-bit pages are widened for prompts. Sampling: hidden states, logits in the model's dtype and in
    float32, then copies of a slice. Page tables are there all the time.
    """
    item = ITEM_BYTES[dtype]
    tokens, seqs, hidden = limits.max_num_batched_tokens, limits.max_num_seqs, config.hidden_size
    inner, table = config.intermediate_size, 8 * -(-limits.max_model_len // limits.block_size)
    coded = weight_format.scheme.startswith("w8a8")
    code = 1 if coded else item
    widened = 0 if coded or weight_format.scheme == "dense" else 2 * inner * hidden * item
    stream = tokens * (hidden * (4 * item + code) + 2 * config.head_dim * 4)
    mlp = tokens * inner * 2 * item + max(tokens * inner * code, widened)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = tokens * heads * item + (0 if kv_cache_dtype in ITEM_BYTES else WIDE_PAGES)
    logits = seqs * config.vocab_size * 4
    sampling = tokens * hidden * item + logits + max(seqs * config.vocab_size * item, SLICE)
    return max(stream + max(mlp, attention), sampling) + 3 * seqs * table


def graph_bytes(config: ModelConfig, limits: StepLimits) -> int:
    """Planned memory of the CUDA graphs: one for each size of decode step, and the largest one's peak."""
    size = limits.max_num_seqs
    largest = size * (6 * config.hidden_size + 3 * config.intermediate_size) * ITEM_BYTES[config.dtype]
    return largest + len(buckets(size)) * config.num_layers * GRAPH_LAYER
