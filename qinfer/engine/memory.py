"""The memory ledger: weights + activations + graphs + reserve + KV pool = budget, in plain ints.

The pool is what is left over, so every byte that quantizing the weights saves becomes room for tokens, and
quantizing the cache halves what a token costs on top. The same sum is made twice: from a config.json before
anything is loaded (`qinfer plan`), and by the engine at start-up from what it measured. All sizes are whole
bytes and are computed here and nowhere else; a page is `block_size` tokens of K and V of all layers.

What is given up: `activation_bytes` is an upper estimate from shapes. The engine replaces it with a measured
peak where it has one. No torch here.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from qinfer.checkpoint.names import global_tensors, layer_modules, layer_prefix, layer_tensors, linear_shape
from qinfer.config import ModelConfig
from qinfer.engine.options import KV_CACHE_DTYPES
from qinfer.errors import UserError

logger = logging.getLogger(__name__)

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_POOL = 2 * GIB  # a CPU engine's KV pool unless it is told otherwise: 93,200 bf16 tokens of SmolLM2-135M
CPU_SHARE = 0.9  # and never more than this share of the RAM that is available now
_UNITS = {f"{p}{u}": b**i for i, p in enumerate("kmgt", 1) for u, b in (("ib", 1024), ("b", 1000))} | {"b": 1}


def parse_size(text: str | int) -> int:
    """Bytes of '24GiB', '1.5 GB' (powers of 1000) or a plain number; UserError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    unit = match and (match[2] or "b")
    if match is None or unit not in _UNITS:
        raise UserError(
            f"{text!r} is not a size: write a number with B, KiB, MiB, GiB or TiB, such as 24GiB", "memory"
        )
    return int(float(match[1]) * _UNITS[str(unit)])


def format_size(num_bytes: int) -> str:
    """'8.46 GiB', '257.1 MiB' or '640 B'."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if abs(num_bytes) >= 2**20 else f"{num_bytes} B"


class WeightFormat(NamedTuple):
    """A scheme by name, with what w4a16 needs to know besides."""

    scheme: str = "dense"
    group_size: int = 128
    symmetric: bool = True


DENSE = WeightFormat()


def linear_bytes(weight_format: WeightFormat, out_features: int, in_features: int, item_bytes: int) -> int:
    """Bytes in the file of one linear's weight [N, K], its scales and zero points (compressed-tensors).

    `item_bytes` is the model dtype's, in which scales are stored. UserError for an unknown scheme.
    """
    scheme, group_size, symmetric = weight_format
    words = 4 * out_features  # one int32 per row and per `32 / bits` columns
    shape = 2 * 8  # `weight_shape`: two int64
    match scheme:
        case "dense":
            return out_features * in_features * item_bytes
        case "w8a8-int8" | "w8a8-fp8":
            return out_features * (in_features + item_bytes)
        case "w8a16-int8":
            return words * -(-in_features // 4) + out_features * item_bytes + shape
        case "w4a16":
            groups = -(-in_features // group_size)
            zero_points = 0 if symmetric else 4 * -(-out_features // 8) * groups
            return words * -(-in_features // 8) + out_features * groups * item_bytes + zero_points + shape
    raise UserError(f"no scheme is called {scheme!r}", "scheme")


def weight_bytes(config: ModelConfig, weight_format: WeightFormat = DENSE, dtype: str | None = None) -> int:
    """Bytes of all tensors that a checkpoint of this model holds when the layers' linears have this format.

    Embeddings, lm_head, norms and biases stay in `dtype` (None: the config's), as the writer leaves them.
    """
    item_bytes = ITEM_BYTES[dtype or config.dtype]
    dense = sum(map(prod, global_tensors(config).values()))
    quantized = 0
    for i in range(config.num_layers):
        linears = {f"{layer_prefix(config, i)}{module}.weight" for module in layer_modules(config)}
        dense += sum(prod(shape) for name, shape in layer_tensors(config, i).items() if name not in linears)
        quantized += sum(
            linear_bytes(weight_format, *linear_shape(config, module), item_bytes)
            for module in layer_modules(config)
        )
    return dense * item_bytes + quantized


def kv_bytes_per_token(config: ModelConfig, kv_cache_dtype: str = "auto") -> int:
    """Bytes of K and V of one token over all layers; int8 includes a float32 scale per token and head."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UserError(
            f"kv_cache_dtype {kv_cache_dtype!r}: choose from {', '.join(KV_CACHE_DTYPES)}", "kv_cache_dtype"
        )
    dtype = config.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    head_bytes = config.head_dim * ITEM_BYTES.get(dtype, 1) + (4 if dtype == "int8" else 0)
    return config.num_layers * 2 * config.num_kv_heads * head_bytes


def blocks_for(
    num_bytes: int, config: ModelConfig, kv_cache_dtype: str = "auto", block_size: int = 16
) -> int:
    """Whole pages of `block_size` tokens that fit into `num_bytes`."""
    return max(0, num_bytes) // (block_size * kv_bytes_per_token(config, kv_cache_dtype))


def activation_bytes(config: ModelConfig, num_tokens: int, num_seqs: int, item_bytes: int) -> int:
    """Upper estimate of a step's peak beside weights and pool: `num_tokens` rows, `num_seqs` samples.

    The largest of three moments that never coincide: the MLP (residual, normed input, output, gate|up and
    their product), attention (q, k, v and the output beside the stream), and sampling (float32 logits, a
    sorted copy, its int64 order, probabilities).
    """
    stream = 3 * config.hidden_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = num_tokens * (stream + max(3 * config.intermediate_size, heads)) * item_bytes
    return max(layer, num_seqs * config.vocab_size * (4 + 4 + 8 + 4))


def measured_use(free_before: int, free_after: int) -> int:
    """Bytes that a load or a profile run took, from free memory before and after; never negative.

    A neighbour may release memory meanwhile: then free memory grows, and that is a warning, not an error.
    """
    if free_after > free_before:
        logger.warning(
            "free memory grew from %s to %s while it was measured: another process released some",
            format_size(free_before),
            format_size(free_after),
        )
    return max(0, free_before - free_after)


def budget_for(total: int, free: int, utilization: float = 0.92, memory: int | None = None) -> int:
    """Bytes that this engine may use: `memory` or a share of the device; UserError if they are not free."""
    if memory is None and not 0 < utilization <= 1:
        raise UserError(f"gpu_memory_utilization {utilization} must lie in (0, 1]", "gpu_memory_utilization")
    budget = int(total * utilization) if memory is None else memory
    if budget > free:
        asked = f"{utilization} of {format_size(total)}" if memory is None else "asked for"
        raise UserError(
            f"a memory budget of {format_size(budget)} ({asked}) is more than the {format_size(free)} "
            "that are free: lower it or free memory",
            "memory",
        )
    return budget


def require_weights_fit(weights: int, available: int, memory: int | None) -> None:
    """UserError with both numbers, before anything is loaded, when the weights alone exceed the budget.

    `weights` are the bytes of the checkpoint's files, `available` those of free memory, `memory` a budget.
    """
    budget = available if memory is None else budget_for(available, available, memory=memory)
    if weights >= budget:
        what = "memory that is free" if memory is None else "memory budget"
        raise UserError(
            f"the weights are {format_size(weights)} and the {what} is {format_size(budget)}: "
            "nothing was loaded; take a smaller model, quantize it, or give it more memory",
            "memory",
        )


class Demand(NamedTuple):
    """What must fit before the first KV page, in bytes."""

    weights: int
    activations: int = 0
    graphs: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Pages(NamedTuple):
    """One page of the pool: `block_size` tokens in `num_bytes`."""

    block_size: int
    num_bytes: int


def pages_of(config: ModelConfig, kv_cache_dtype: str, block_size: int) -> Pages:
    """A page of this model's cache."""
    return Pages(block_size, block_size * kv_bytes_per_token(config, kv_cache_dtype))


def cpu_budget(
    available: int, demand: Demand, page: Pages, max_tokens: int, memory: int | None = None
) -> int:
    """Budget of a CPU engine: `memory` if given, else `demand` and a pool for `max_tokens`, at most CPU_POOL.

    Never more than the RAM that is `available` (CPU_SHARE of it when nobody chose); else a UserError.
    """
    if memory is not None:
        return budget_for(available, available, memory=memory)
    wanted = min(CPU_POOL, -(-max_tokens // page.block_size) * page.num_bytes)
    return min(int(available * CPU_SHARE), demand.total + wanted)


@dataclass(frozen=True)
class Ledger:
    """Where a budget goes. Bytes, except pages, tokens and `sequences` of max_model_len tokens each."""

    label: str  # "w8a8-fp8 + fp8 KV"
    budget: int
    weights: int
    activations: int
    graphs: int
    reserve: int
    kv_pool: int  # bytes of whole pages
    pages: int
    block_size: int
    max_model_len: int
    unquantized: Ledger | None = None  # the same model in its own dtype under the same budget

    @property
    def tokens(self) -> int:
        return self.pages * self.block_size

    @property
    def sequences(self) -> int:
        return self.pages // -(-self.max_model_len // self.block_size)

    @property
    def ratio(self) -> float | None:
        """KV tokens over those of the unquantized model; None where there is none or it does not fit."""
        return self.tokens / self.unquantized.tokens if self.unquantized and self.unquantized.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `unquantized` is nested or None."""
        out = asdict(self) | {"tokens": self.tokens, "sequences": self.sequences, "ratio": self.ratio}
        out["unquantized"] = self.unquantized.to_dict() if self.unquantized else None
        return out

    def to_text(self) -> str:
        """A few lines for a person."""
        rows = [
            (name, format_size(getattr(self, name)))
            for name in ("weights", "activations", "graphs", "reserve")
        ]
        lines = [f"memory: {self.label} in {format_size(self.budget)}"]
        lines += [f"  {name:<12}{size:>12}" for name, size in rows]
        lines.append(
            f"  {'KV pool':<12}{format_size(self.kv_pool):>12}  {self.pages:,} pages of {self.block_size} = "
            f"{self.tokens:,} tokens = {self.sequences:,} sequences of {self.max_model_len:,}"
        )
        if other := self.unquantized:
            gain = (
                f"{other.tokens:,} → {self.tokens:,} tokens, {self.ratio:.2f}×"
                if self.ratio
                else "does not fit"
            )
            lines.append(f"  against {other.label}: {gain}")
        return "\n".join(lines)


def plan(
    label: str, budget: int, demand: Demand, page: Pages, max_model_len: int, num_pages: int | None = None
) -> Ledger:
    """Ledger of a budget: all that `demand` leaves is pool, or just `num_pages` where they are fixed.

    UserError with both numbers when demand and one page (or the fixed pages) do not fit.
    """
    needed = demand.total + (1 if num_pages is None else num_pages) * page.num_bytes
    if needed > budget:
        raise UserError(
            f"{label} needs {format_size(needed)} ({format_size(demand.weights)} of weights) but the memory "
            f"budget is {format_size(budget)}: raise the budget, shorten the batch or quantize further",
            "memory",
        )
    pages = (budget - demand.total) // page.num_bytes if num_pages is None else num_pages
    return Ledger(
        label=label,
        budget=budget,
        **demand._asdict(),
        kv_pool=pages * page.num_bytes,
        pages=pages,
        block_size=page.block_size,
        max_model_len=max_model_len,
    )


def require_full_length(ledger: Ledger) -> None:
    """UserError, with both numbers, unless one sequence of max_model_len tokens fits into the pool."""
    if ledger.sequences < 1:
        raise UserError(
            f"max_model_len {ledger.max_model_len} is more than the {ledger.tokens} tokens that the KV pool "
            f"of {format_size(ledger.kv_pool)} holds: lower it, raise the memory budget or use an 8-bit "
            "kv_cache_dtype",
            "max_model_len",
        )
