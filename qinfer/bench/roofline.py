"""The least time that a machine could take for the same work, by what it moves and what it multiplies.

Prompts multiply: each token costs two operations for every weight of the layers, and four for every number
of the keys it attends to; of the last layer all but a prompt's last token need keys and values only. Answers
move memory: each step reads all weights once, whatever the batch, and each sequence reads the keys and values
of what came before. So

    prefill = max(operations / rate, bytes / bandwidth)        steps of max_num_batched_tokens
    decode  = max(operations / rate, bytes / bandwidth)        steps of max_num_seqs sequences

and their sum is the roofline. A machine that overlapped the two perfectly would be faster still. The rates
are measured in the same run (machine.py), not taken from a data sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from qinfer.checkpoint.names import layer_groups, layer_modules, linear_shape
from qinfer.config import ModelConfig
from qinfer.engine.footprint import ITEM_BYTES, kv_bytes_per_token


class Machine(NamedTuple):
    """What was measured of it: bytes/s of a copy, read and written; operations/s of a large product."""

    name: str
    bandwidth: float
    rate: float

    def seconds(self, moved: float, operations: float) -> float:
        """The least time for moving so many bytes while doing so many operations."""
        return max(operations / self.rate, moved / self.bandwidth)


class Work(NamedTuple):
    """One request: its prompt, of which `cached` tokens need no computing, and `n` answers."""

    prompt_len: int
    output_len: int
    n: int = 1
    cached: int = 0


class Costs(NamedTuple):
    """What a model costs: bytes per step and per token of context, operations per token."""

    config: ModelConfig
    step_bytes: int  # weights that every step reads
    token_bytes: int  # keys and values of one token, all layers
    token_ops: int  # products of the layers
    head_ops: int  # the product that makes logits
    last_ops: int = 0  # of token_ops those after the last layer's attention

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_cache_dtype: str) -> Costs:
        """`weight_bytes`: of all tensors; an embedding that is not also the head is only looked up."""
        table = config.vocab_size * config.hidden_size
        looked_up = 0 if config.tie_word_embeddings else table * ITEM_BYTES[config.dtype]
        weights = {module: prod(linear_shape(config, module)) for module in layer_modules(config)}
        layer = sum(weights.values())
        before = sum(weights[module] for module in layer_groups(config)[0].modules)  # queries, keys, values
        return cls(
            config,
            step_bytes=weight_bytes - looked_up,
            token_bytes=kv_bytes_per_token(config, kv_cache_dtype),
            token_ops=2 * config.num_layers * layer,
            head_ops=2 * table,
            last_ops=2 * (layer - before),
        )

    def with_int8_head(self) -> Costs:
        """The same with a head that was quantized while loading, a scale for each of its rows."""
        rows, columns = self.config.vocab_size, self.config.hidden_size
        item_bytes = ITEM_BYTES[self.config.dtype]
        return self._replace(
            step_bytes=self.step_bytes - rows * columns * (item_bytes - 1) + rows * item_bytes
        )

    def seen(self, start: int, stop: int) -> float:
        """Tokens that the positions start..stop-1 attend to, themselves included; mean over the layers."""
        windows = self.config.windows or (None,) * self.config.num_layers
        return sum(_seen(start, stop, window) for window in windows) / len(windows)

    def attention_ops(self, seen: float) -> float:
        """Operations of attention over that many pairs of positions, all layers."""
        config = self.config
        return 4.0 * config.num_layers * config.num_heads * config.head_dim * seen


class Roofline(NamedTuple):
    """Seconds at least, and what they are made of."""

    prefill_seconds: float
    decode_seconds: float
    bytes_moved: float
    operations: float

    @property
    def seconds(self) -> float:
        """Of both together."""
        return self.prefill_seconds + self.decode_seconds


def roofline(
    costs: Costs, machine: Machine, work: Sequence[Work], max_num_seqs: int, max_num_batched_tokens: int
) -> Roofline:
    """The least time for all of `work`, at most so many sequences and tokens at once."""
    prefill, decode = _prefill(costs, work, max_num_batched_tokens), _decode(costs, work, max_num_seqs)
    return Roofline(
        machine.seconds(*prefill), machine.seconds(*decode), prefill[0] + decode[0], prefill[1] + decode[1]
    )


def _prefill(costs: Costs, work: Sequence[Work], max_num_batched_tokens: int) -> tuple[float, float]:
    """(bytes, operations); each prompt ends with one row of logits."""
    computed = sum(item.prompt_len - item.cached for item in work)
    pairs = sum(costs.seen(item.cached, item.prompt_len) for item in work)
    steps = -(-computed // max_num_batched_tokens)
    written = computed * costs.token_bytes
    operations = computed * costs.token_ops + len(work) * costs.head_ops + costs.attention_ops(pairs)
    operations -= (computed - len(work)) * costs.last_ops
    return steps * costs.step_bytes + written, operations


def _decode(costs: Costs, work: Sequence[Work], max_num_seqs: int) -> tuple[float, float]:
    """(bytes, operations) of all tokens but each answer's first, which the prompt's computing gives."""
    tokens = sum(item.n * (item.output_len - 1) for item in work)
    longest = max((item.output_len - 1 for item in work), default=0)
    steps = max(longest, -(-tokens // max_num_seqs))
    pairs = sum(item.n * costs.seen(item.prompt_len, item.prompt_len + item.output_len - 1) for item in work)
    operations = tokens * (costs.token_ops + costs.head_ops) + costs.attention_ops(pairs)
    return steps * costs.step_bytes + pairs * costs.token_bytes, operations


def _seen(start: int, stop: int, window: int | None) -> int:
    """Sum of min(position + 1, window) over start..stop-1."""
    if window is None or stop <= window:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    within = max(start, min(stop, window))
    return _seen(start, within, None) + (stop - within) * window
