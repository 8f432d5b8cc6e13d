"""What a step takes beside weights and KV pages, from shapes alone, as plain ints. No torch.

The engine measures it on a GPU (`profile.py`); `qinfer plan` and a CPU engine take these numbers. A step has
moments that never coincide: the MLP's and attention's of one layer, where everything grows with the tokens of
the step, and sampling, where it grows with the sequences and the vocabulary. The largest counts. What copies
rows of logits (penalties, log-probabilities, the scores of a prompt) goes by slices and does not grow.
"""

from __future__ import annotations

from typing import NamedTuple

from qinfer.config import ModelConfig
from qinfer.engine.footprint import DENSE, ITEM_BYTES, WeightFormat
from qinfer.engine.options import StepLimits
from qinfer.engine.plan import shapes

MIB = 1 << 20
# On a GPU, in bytes; measured on an H200 with torch 2.11
RUNTIME = 720 * MIB  # CUDA's context (527), libraries and kernels
WORKSPACE = 40 * MIB  # of cuBLAS (32), and what a step's tensors lie in
SLICE, COPIES = 16 * MIB, 6  # of logits in float32 that are copied at a time; with all that is copied
WIDE_TOKENS, WIDE_PER_ROW, WIDE_BYTES = 32768, 20, 128 * MIB  # 8-bit pages of a step's chunks, widened
GRAPH_LAYER = 64 << 10  # of one layer in one CUDA graph
WIDENED_ABOVE = {"w4a16": 1024, "w8a16-int8": 2048}  # tokens for which a weight is widened
GATED_ABOVE, TURN = {"w8a8-int8": 256, "w8a8-fp8": 256}, 64  # tokens for which a product ends with its gates
# float32 tiles of a product that is cut into pieces, at most: up to 128 tokens, and up to where it is widened
PIECES = {"w4a16": (264 * 2 * 8192 * 4, 132 * 2 * 32768 * 4)}
LEAST_TOKENS = 512  # of a step, below which a GPU's products are no longer efficient
SHARE = 48  # a step's share of what the weights leave of a budget is one part of so many, at most


def cpu_step_bytes(config: ModelConfig, limits: StepLimits, item_bytes: int) -> int:
    """Upper estimate for a CPU: rows of `item_bytes` numbers for the tokens, and samples for the sequences.

    The MLP: residual, normed input, output, gate|up and their product. Attention: q, k, v and the output
    beside the stream. Sampling: float32 logits, a sorted copy, its int64 order, probabilities.
    """
    stream = 3 * config.hidden_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = limits.max_num_batched_tokens * (stream + max(3 * config.intermediate_size, heads)) * item_bytes
    return max(layer, limits.max_num_seqs * config.vocab_size * (4 + 4 + 8 + 4))


class Build(NamedTuple):
    """What a model is made of: its linears' format, its activations' dtype and, resolved, its cache's."""

    config: ModelConfig
    weight_format: WeightFormat
    dtype: str
    kv_cache_dtype: str

    @classmethod
    def unquantized(cls, config: ModelConfig) -> Build:
        """The model in its own dtype."""
        return cls(config, DENSE, config.dtype, config.dtype)


def layer_bytes(build: Build, tokens: int) -> int:
    """Planned peak of a layer on a GPU, for a step of so many tokens.

    The stream before and after, what was added to it, the normed input, and rotations in float32; then
    gate|up or their product alone with its codes, or q, k, v with the context. Weight-only schemes widen one
    weight besides where there are many tokens, or cut a product into pieces, which are added up at its end;
    8-bit pages are widened for prompts.
    """
    config, scheme, item = build.config, build.weight_format.scheme, ITEM_BYTES[build.dtype]
    hidden, inner = config.hidden_size, config.intermediate_size
    code = 1 if scheme.startswith("w8a8") else item
    widened = 2 * inner * hidden * item if tokens > WIDENED_ABOVE.get(scheme, tokens) else 0
    pieces = 0 if widened or scheme not in PIECES else PIECES[scheme][tokens > 128]
    stream = tokens * (hidden * (4 * item + code) + 2 * config.head_dim * 4)
    gate_up = 2 * tokens * inner * item
    gated = gate_up + tokens * inner * code
    if _ends_with_gates(build, tokens):  # shorter steps have both
        few = GATED_ABOVE[scheme] * inner * (2 * item + code)
        gate_up, gated = gate_up // 2, max(tokens * inner * (item + code), few)
    mlp = max(gated, gate_up + widened, tokens * inner * code + pieces)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = tokens * heads * item + max(_wide_pages(build, tokens), pieces)
    return stream + max(mlp, attention)


def _ends_with_gates(build: Build, tokens: int) -> bool:
    """Whether the product of gate and up leaves act(gate) * up: see `Linear.of_gate_and_up`."""
    config, scheme = build.config, build.weight_format.scheme
    takes_turns = config.intermediate_size % TURN == 0 and not config.mlp_bias
    return scheme in GATED_ABOVE and tokens > GATED_ABOVE[scheme] and takes_turns and build.dtype != "float32"


def with_gaps(num_bytes: int) -> int:
    """What tensors of a step lie in that takes so much: between them a quarter is not used."""
    return num_bytes * 5 // 4


def _wide_pages(build: Build, tokens: int) -> int:
    if build.kv_cache_dtype in ITEM_BYTES:
        return 0
    token = 2 * build.config.num_kv_heads * build.config.head_dim * ITEM_BYTES[build.dtype]
    return max(min(WIDE_BYTES, min(WIDE_TOKENS, WIDE_PER_ROW * tokens) * token), tokens * token)


def gpu_step_bytes(build: Build, limits: StepLimits) -> int:
    """Planned peak of a step on a GPU: a layer's, or that of sampling.

    There are the hidden states and logits, in the model's dtype and in float32, then copies of a slice. Page
    tables are there all the time.
    """
    seqs, item = limits.max_num_seqs, ITEM_BYTES[build.dtype]
    tokens = min(limits.max_num_batched_tokens, seqs * limits.max_model_len)
    logits = seqs * build.config.vocab_size
    copies = COPIES * min(SLICE, 4 * logits)
    sampling = tokens * build.config.hidden_size * item + 4 * logits + max(item * logits, copies)
    tables = 3 * seqs * 8 * -(-limits.max_model_len // limits.block_size)
    return max(layer_bytes(build, tokens), sampling) + tables + WORKSPACE


def graph_bytes(build: Build, limits: StepLimits) -> int:
    """Planned memory of the CUDA graphs: the driver's for each padded shape, and the largest one's peak.

    They share a pool, in which decode steps make logits too.
    """
    captured = shapes(limits)
    largest = captured[0].num_tokens
    hidden = limits.max_num_seqs * build.config.hidden_size * ITEM_BYTES[build.dtype]
    by_driver = len(captured) * build.config.num_layers * GRAPH_LAYER
    logits = limits.max_num_seqs * build.config.vocab_size * ITEM_BYTES[build.dtype]
    return max(layer_bytes(build, largest), logits) + hidden + by_driver + WORKSPACE
