"""Every scheme side by side under one memory budget, from a config.json alone.

The point of quantizing weights is what the engine does with the memory that it frees. So a plan is a table:
each row one scheme with one KV-cache dtype, its weights, what a step needs besides, the KV pool that is
left, and how many tokens and full-length sequences fit, against the same model in its own dtype. Nothing is
loaded; the numbers are those of engine/footprint.py and memory.py, which the engine uses too. Without a
budget a row is what `qinfer serve` would take on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from qinfer.backend import model_device
from qinfer.calibrate.recipe import PRESETS, settle
from qinfer.checkpoint.names import layer_modules, linear_shape
from qinfer.config import ModelConfig
from qinfer.engine import budget, memory
from qinfer.engine.activations import Build
from qinfer.engine.budget import Space
from qinfer.engine.footprint import (
    DENSE,
    ITEM_BYTES,
    WeightFormat,
    kv_bytes_per_token,
    pages_of,
    weight_bytes,
)
from qinfer.engine.kv_pool import resolve_kv_cache_dtype
from qinfer.engine.memory import Ledger
from qinfer.engine.options import KV_CACHE_DTYPES, EngineOptions, StepLimits
from qinfer.engine.sizing import space_of
from qinfer.errors import UserError
from qinfer.model.head import saved_bytes
from qinfer.quant import SCHEMES, settle_group_size

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Setting:
    """What every row shares; `options.memory` None: what serve would take.

    `reserve` in bytes, None: what serve keeps.
    """

    options: EngineOptions
    limits: StepLimits
    space: Space
    reserve: int | None = None
    lm_head_dtype: str = "auto"


@dataclass(frozen=True)
class Row:
    """One scheme with one KV dtype; `ledger` is None, and `shortfall` says why, where it does not fit.

    `limits` may have shorter steps than those of the setting.
    """

    scheme: str
    kv_cache_dtype: str
    weights: int
    limits: StepLimits
    ledger: Ledger | None
    shortfall: str = ""

    @property
    def label(self) -> str:
        """Both by name, as a table has them."""
        return f"{self.scheme} + {SHORT.get(self.kv_cache_dtype, self.kv_cache_dtype)} KV"


def place(device: str | None, budget: int | None) -> Space:
    """Where the model is to run: `device`, else the GPU of this machine, else by whether there is a budget.

    A budget in bytes is most often that of a GPU elsewhere. Raises UserError for an unknown device, and for
    a GPU of which neither this machine nor a budget tells the size.
    """
    if device not in (None, *DEVICES):
        raise UserError(f"--device must be one of {', '.join(DEVICES)}, not {device!r}", "device")
    here = space_of(model_device())
    if device == "cpu":
        return space_of(torch.device("cpu"))
    if here.on_gpu or (device is None and budget is None):
        return here
    if budget is None:
        raise UserError(
            "--device cuda: there is no GPU here to ask for its memory; say it, such as --memory 24GiB",
            "memory",
        )
    return Space(True, budget, budget)


def weight_formats(config: ModelConfig) -> Iterator[tuple[str, WeightFormat]]:
    """(label, format) of each scheme that this model can have; w4a16 with the group size its widths allow."""
    yield "dense", DENSE
    for name in SCHEMES:
        if name not in ("dense", "w4a16"):
            yield name, WeightFormat(name)
    widths = {module: linear_shape(config, module)[1] for module in layer_modules(config)}
    try:
        group_size = settle_group_size(widths, 128)
    except UserError:
        return  # no group size divides this model's widths: w4a16 does not exist for it
    for symmetric in (False, True):
        label = f"w4a16 g{group_size} {'sym' if symmetric else 'asym'}"
        yield label, WeightFormat("w4a16", group_size, symmetric)


def schemes_named(config: ModelConfig, name: str) -> list[str]:
    """Labels that a preset of `qinfer quantize`, a scheme's name or the beginning of one stands for.

    Raises UserError for what is none of these, and where this model cannot have the scheme.
    """
    if name in PRESETS:
        return [settle(config, name).scheme.label]
    labels = [label for label, _ in weight_formats(config)]
    found = [name] if name in labels else [label for label in labels if name and label.startswith(name)]
    if not found and name in SCHEMES:
        settle(config, name)  # says why there is none
    if not found:
        raise UserError(f"--scheme {name!r}: choose from {', '.join([*PRESETS, *SCHEMES])}", "scheme")
    return found


def kv_dtypes(config: ModelConfig, wanted: str | None) -> list[str]:
    """The KV dtypes to plan: the one that is wanted, else the model's own and the 8-bit ones."""
    if wanted is None:
        wide = ("float32", "bfloat16") if config.dtype == "float32" else (config.dtype,)
        return [*wide, "int8", "fp8"]
    if wanted not in KV_CACHE_DTYPES:
        raise UserError(
            f"--kv-cache-dtype {wanted!r}: choose from {', '.join(KV_CACHE_DTYPES)}", "kv_cache_dtype"
        )
    return [resolve_kv_cache_dtype(wanted, config.dtype)]


def side_by_side(
    config: ModelConfig, setting: Setting, scheme: str | None = None, kv_cache_dtype: str | None = None
) -> list[Row]:
    """The table, the unquantized model with its own KV dtype first; only what is asked for, if anything is.

    Raises UserError where no row fits.
    """
    dtypes = kv_dtypes(config, kv_cache_dtype)
    labels = None if scheme is None else schemes_named(config, scheme)
    rows = [
        _row(config, setting, label, weight_format, dtype)
        for label, weight_format in weight_formats(config)
        if labels is None or label in labels
        for dtype in dtypes
    ]
    _require_one(config, rows, setting.space)
    return rows


def _row(
    config: ModelConfig, setting: Setting, label: str, weight_format: WeightFormat, kv_dtype: str
) -> Row:
    options, space = setting.options, setting.space
    on_gpu, total = space.on_gpu, options.memory  # taken as it is: it may be another machine's
    weights = weight_bytes(config, weight_format, place="gpu" if on_gpu else "cpu")
    weights -= saved_bytes(config, setting.lm_head_dtype, ITEM_BYTES[config.dtype])
    row = Row(label, kv_dtype, weights, setting.limits, None)
    build = Build(config, weight_format, config.dtype, kv_dtype)
    try:
        if on_gpu:
            if total is None:
                total = budget.budget_for(space.total, space.available, options.gpu_memory_utilization)
            if options.max_num_batched_tokens is None:
                row = replace(row, limits=budget.shorten_steps(build, setting.limits, total - weights))
        demand = budget.planned_demand(build, row.limits, on_gpu=on_gpu)._replace(weights=weights)
        if setting.reserve is not None:
            demand = demand._replace(reserve=setting.reserve)
        page = pages_of(config, kv_dtype, row.limits.block_size)
        if total is None:
            total = budget.budget_of(space, demand, page, row.limits, options)
        ledger = memory.plan(row.label, total, demand, page, row.limits.max_model_len)
        ledger = memory.settle_length(ledger, chosen=options.max_model_len is not None)
    except UserError as error:
        return replace(row, shortfall=str(error))
    dense = budget.unquantized_demand(config, options, setting.limits, demand, total if on_gpu else None)
    return replace(row, ledger=replace(ledger, unquantized=memory.unquantized(config, ledger, dense)))


def _require_one(config: ModelConfig, rows: Sequence[Row], space: Space) -> None:
    if not any(row.ledger for row in rows):
        smallest = min(rows, key=lambda row: (row.weights, kv_bytes_per_token(config, row.kv_cache_dtype)))
        where = "on a GPU (--device cpu plans this machine's CPU)" if space.on_gpu else "on this CPU"
        raise UserError(
            f"nothing fits {where}, not even the smallest ({smallest.label}): {smallest.shortfall}", "memory"
        )
