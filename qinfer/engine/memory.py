"""The memory ledger: weights + activations + graphs + reserve + KV pool = budget, in plain ints.

The pool is what is left over, so every byte that quantizing the weights saves becomes room for tokens, and
quantizing the cache halves what a token costs on top. The same sum is made twice: from a config.json before
anything is loaded (`qinfer plan`), and by the engine at start-up from what it measured. Whatever does not
fit is refused with both numbers, the needed and the given. No torch here.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from qinfer.config import ModelConfig
from qinfer.engine.footprint import GIB, Pages, activation_bytes, format_size, pages_of, weight_bytes
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.errors import UserError

logger = logging.getLogger(__name__)

CPU_POOL = 2 * GIB  # a CPU engine's KV pool unless it is told otherwise: 93,200 bf16 tokens of SmolLM2-135M
CPU_SHARE = 0.9  # and never more than this share of the RAM that is available now


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
            f"the weights alone need {format_size(weights)} and the {what} is {format_size(budget)}: "
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


def demand_of(
    config: ModelConfig, limits: StepLimits, weights: int, item_bytes: int, reserve: int = 0
) -> Demand:
    """What an engine of these limits takes before its first page; `item_bytes` are an activation's."""
    activations = activation_bytes(config, limits.max_num_batched_tokens, limits.max_num_seqs, item_bytes)
    return Demand(weights, activations, reserve=reserve)


class Space(NamedTuple):
    """Memory of the device that a model runs on, in bytes."""

    on_gpu: bool
    total: int
    available: int


def budget_of(space: Space, demand: Demand, page: Pages, limits: StepLimits, options: EngineOptions) -> int:
    """The budget of an engine in this space: the same for `serve` and, before anything is loaded, `plan`."""
    if space.on_gpu:
        return budget_for(space.total, space.available, options.gpu_memory_utilization, options.memory)
    max_tokens = limits.max_num_seqs * limits.max_model_len
    return cpu_budget(space.available, demand, page, max_tokens, options.memory)


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


def settle_length(ledger: Ledger, *, chosen: bool) -> Ledger:
    """The ledger with a max_model_len that fits: lowered to what the pool holds if nobody chose it.

    UserError, with both numbers, where it was `chosen` and is more than the pool holds.
    """
    if ledger.sequences:
        return ledger
    if chosen:
        raise UserError(
            f"max_model_len {ledger.max_model_len} is more than the {ledger.tokens} tokens that the KV pool "
            f"of {format_size(ledger.kv_pool)} holds: lower it to {ledger.tokens} or less, raise the memory "
            "budget or use an 8-bit kv_cache_dtype",
            "max_model_len",
        )
    return replace(ledger, max_model_len=ledger.tokens)


def unquantized(config: ModelConfig, ledger: Ledger) -> Ledger | None:
    """The same budget with weights and cache in the model's own dtype; None where that does not fit."""
    demand = Demand(weight_bytes(config), ledger.activations, ledger.graphs, ledger.reserve)
    page = pages_of(config, config.dtype, ledger.block_size)
    try:
        return plan(config.dtype, ledger.budget, demand, page, ledger.max_model_len)
    except UserError:
        return None
