"""Every scheme side by side under one memory budget, from a config.json alone.

The point of quantizing weights is what the engine does with the memory that it frees. So a plan is a table:
each row one scheme with one KV-cache dtype, its weights, what a step needs besides, the KV pool that is
left, and how many tokens and full-length sequences fit, against the same model in its own dtype. Nothing is
loaded; the numbers are those of engine/footprint.py and memory.py, which the engine uses too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qinfer.checkpoint.names import layer_modules, linear_shape
from qinfer.config import ModelConfig
from qinfer.engine.footprint import (
    DENSE,
    ITEM_BYTES,
    WeightFormat,
    activation_bytes,
    pages_of,
    weight_bytes,
)
from qinfer.engine.memory import Demand, Ledger, plan
from qinfer.errors import UserError
from qinfer.quant import settle_group_size

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Setting:
    """What every row of the table shares: budget and reserve in bytes, lengths in tokens."""

    budget: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    reserve: int


@dataclass(frozen=True)
class Row:
    """One scheme with one KV dtype; `ledger` is None, and `shortfall` says why, where it does not fit."""

    scheme: str
    kv_cache_dtype: str
    weights: int
    ledger: Ledger | None
    shortfall: str = ""

    @property
    def label(self) -> str:
        return f"{self.scheme} + {SHORT.get(self.kv_cache_dtype, self.kv_cache_dtype)} KV"


def weight_formats(config: ModelConfig) -> Iterator[tuple[str, WeightFormat]]:
    """(label, format) of each scheme that this model can have; w4a16 with the group size its widths allow."""
    yield "dense", DENSE
    for name in ("w8a8-int8", "w8a16-int8", "w8a8-fp8"):
        yield name, WeightFormat(name)
    widths = {module: linear_shape(config, module)[1] for module in layer_modules(config)}
    try:
        group_size = settle_group_size(widths, 128)
    except UserError:
        return  # no group size divides this model's widths: w4a16 does not exist for it
    for symmetric in (False, True):
        label = f"w4a16 g{group_size} {'sym' if symmetric else 'asym'}"
        yield label, WeightFormat("w4a16", group_size, symmetric)


def side_by_side(config: ModelConfig, setting: Setting) -> list[Row]:
    """The table: the unquantized model with its own KV dtype first, then every scheme and KV dtype."""
    kv_dtypes = list(
        dict.fromkeys((config.dtype, "bfloat16" if config.dtype == "float32" else "", "int8", "fp8"))
    )
    rows = [
        _row(config, setting, label, weight_format, kv_dtype)
        for label, weight_format in weight_formats(config)
        for kv_dtype in kv_dtypes
        if kv_dtype
    ]
    return _against(rows[0], rows)


def _row(
    config: ModelConfig, setting: Setting, label: str, weight_format: WeightFormat, kv_dtype: str
) -> Row:
    weights = weight_bytes(config, weight_format)
    activations = activation_bytes(
        config, setting.max_num_batched_tokens, setting.max_num_seqs, ITEM_BYTES[config.dtype]
    )
    demand = Demand(weights, activations, reserve=setting.reserve)
    page = pages_of(config, kv_dtype, setting.block_size)
    row = Row(label, kv_dtype, weights, None)
    try:
        return replace(row, ledger=plan(row.label, setting.budget, demand, page, setting.max_model_len))
    except UserError as error:
        return replace(row, shortfall=str(error))


def _against(baseline: Row, rows: Sequence[Row]) -> list[Row]:
    """The rows, each ledger knowing the baseline's (where that fits)."""
    return [
        replace(row, ledger=replace(row.ledger, unquantized=baseline.ledger)) if row.ledger else row
        for row in rows
    ]
