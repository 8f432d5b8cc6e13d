"""The memory ledger: weights + activations + graphs + reserve + KV pool = budget, in plain ints.

The pool is what is left over, so every byte that quantizing the weights saves becomes room for tokens, and
quantizing the cache halves what a token costs on top. The same sum is made twice: from a config.json before
anything is loaded (`qinfer plan`), and by the engine at start-up from what it measured. Whatever does not
fit is refused with both numbers, the needed and the given. No torch here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from qinfer.config import ModelConfig
from qinfer.engine.budget import Demand
from qinfer.engine.footprint import Pages, format_size, pages_of
from qinfer.errors import UserError


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
    planned: Ledger | None = None  # from shapes alone, where this one was measured

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pages * self.block_size

    @property
    def sequences(self) -> int:
        """Sequences of max_model_len tokens that the pool holds at once."""
        return self.pages // -(-self.max_model_len // self.block_size)

    @property
    def ratio(self) -> float | None:
        """KV tokens over those of the unquantized model; None where there is none or it does not fit."""
        return self.tokens / self.unquantized.tokens if self.unquantized and self.unquantized.tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `unquantized` and `planned` are nested or None."""
        out = asdict(self) | {"tokens": self.tokens, "sequences": self.sequences, "ratio": self.ratio}
        for name, other in (("unquantized", self.unquantized), ("planned", self.planned)):
            out[name] = other.to_dict() if other else None
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
        if plan := self.planned:
            lines.append(f"  planned were {plan.tokens:,} tokens: {self.tokens / plan.tokens - 1:+.1%}")
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


def unquantized(config: ModelConfig, ledger: Ledger, demand: Demand) -> Ledger | None:
    """The same budget with weights and cache in the model's own dtype; None where that does not fit.

    `demand` is what the unquantized model takes before its first page.
    """
    page = pages_of(config, config.dtype, ledger.block_size)
    try:
        return plan(config.dtype, ledger.budget, demand, page, ledger.max_model_len)
    except UserError:
        return None
