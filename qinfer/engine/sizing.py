"""How large the KV pool becomes: the ledger of `memory.py` filled in with what was loaded and measured.

On the CPU the pool is taken from the RAM that is available after the weights are in, and is as large as
`max_num_seqs` full sequences at most; pages that are never used cost nothing there. On a GPU it is what a
budget leaves beside the weights, the largest step, which is run to measure its peak, and a reserve. A fixed
number of pages, or of bytes for them, overrides this. The longest sequence is one that the pool holds.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from qinfer import backend
from qinfer.dtypes import name_of
from qinfer.engine import budget, footprint, memory
from qinfer.engine.activations import Build, cpu_step_bytes, gpu_step_bytes
from qinfer.engine.budget import Demand, Space
from qinfer.engine.footprint import Pages, WeightFormat
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.engine.profile import StepUse, measure_use
from qinfer.env import host_memory
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder
from qinfer.model.head import saved_bytes
from qinfer.model.storage import tensor_bytes
from qinfer.quant import W4A16, Dense

logger = logging.getLogger(__name__)


class Sized(NamedTuple):
    """The limits that fit the memory, and where it goes."""

    limits: StepLimits
    ledger: Ledger


def size_pool(
    decoder: Decoder, options: EngineOptions, limits: StepLimits, kv_cache_dtype: str, label: str
) -> Sized:
    """Limits and ledger of an engine; the model is loaded, the pool not yet allocated.

    max_model_len is the limits', or, where nobody chose one, what the pool holds of it; a pool of
    `num_kv_blocks` is taken as it is. Raises UserError where the weights, a step and one page do not fit, or
    the pages or one sequence of the length that were asked for.
    """
    config = decoder.config
    page = footprint.pages_of(config, kv_cache_dtype, limits.block_size)
    num_pages = _fixed_pages(options, page, decoder.device)
    space, weights = space_of(decoder.device), tensor_bytes(decoder)
    space = space._replace(available=space.available + weights)  # they are loaded already
    given, build = limits, build_of(decoder, kv_cache_dtype)
    if space.on_gpu:
        if num_pages is None or options.memory is not None:
            limits = _fitting(build, options, limits, space, weights)
        use = _use_of_gpu(decoder, build, options, limits)
        demand = Demand(weights, *use, budget.gpu_reserve(page))
    else:
        demand = Demand(weights, cpu_step_bytes(config, limits, decoder.dtype.itemsize))
    if num_pages is not None and options.memory is None:
        total = demand.total + num_pages * page.num_bytes
    else:
        total = budget.budget_of(space, demand, page, limits, options)
    ledger = memory.plan(label, total, demand, page, limits.max_model_len, num_pages)
    if options.num_kv_blocks is None:
        ledger = memory.settle_length(ledger, chosen=options.max_model_len is not None)
    _say_if_shorter(limits, ledger)
    dense = budget.unquantized_demand(config, options, given, demand, total if space.on_gpu else None)
    ledger = replace(ledger, unquantized=memory.unquantized(config, ledger, dense))
    if space.on_gpu and num_pages is None:
        ledger = replace(ledger, planned=_planned(decoder, build, limits, ledger))
    return Sized(limits._replace(max_model_len=ledger.max_model_len), ledger)


def _fixed_pages(options: EngineOptions, page: Pages, device: torch.device) -> int | None:
    """The number of pages that was chosen, perhaps in bytes; UserError where they are not free."""
    num_pages = options.num_kv_blocks
    if num_pages is None and options.kv_cache_memory_bytes is not None:
        num_pages = options.kv_cache_memory_bytes // page.num_bytes
        if not num_pages:
            raise UserError(
                f"kv_cache_memory_bytes {options.kv_cache_memory_bytes} is less than one page of "
                f"{page.num_bytes} bytes",
                "kv_cache_memory_bytes",
            )
    if num_pages is not None and num_pages * page.num_bytes > (free := available_memory(device)):
        raise UserError(
            f"a KV pool of {footprint.format_size(num_pages * page.num_bytes)} is more than the "
            f"{footprint.format_size(free)} that are free: ask for fewer than {num_pages:,} pages",
            "num_kv_blocks",
        )
    return num_pages


def _fitting(
    build: Build, options: EngineOptions, limits: StepLimits, space: Space, weights: int
) -> StepLimits:
    """Limits of steps that suit a GPU's budget; says so where it shortens them."""
    if options.max_num_batched_tokens is not None:
        return limits
    total = budget.budget_for(space.total, space.available, options.gpu_memory_utilization, options.memory)
    fitting = budget.shorten_steps(build, limits, total - weights)
    if fitting != limits:
        logger.warning(
            "max_num_batched_tokens is %s instead of %s: longer steps would take too much of the %s that the "
            "weights leave; choose it to have them",
            f"{fitting.max_num_batched_tokens:,}",
            f"{limits.max_num_batched_tokens:,}",
            footprint.format_size(total - weights),
        )
    return fitting


def _planned(decoder: Decoder, build: Build, limits: StepLimits, ledger: Ledger) -> Ledger | None:
    """The ledger as it was to be expected; None where nothing was."""
    config = decoder.config
    demand = budget.planned_demand(build, limits, on_gpu=True)
    page = footprint.pages_of(config, build.kv_cache_dtype, ledger.block_size)
    head = "auto" if isinstance(decoder.head.scheme, Dense) else "int8"
    weights = demand.weights - saved_bytes(config, head, decoder.dtype.itemsize)
    demand = demand._replace(weights=weights, graphs=demand.graphs if ledger.graphs else 0)
    try:
        return memory.plan(ledger.label, ledger.budget, demand, page, ledger.max_model_len)
    except UserError:
        return None


def _use_of_gpu(decoder: Decoder, build: Build, options: EngineOptions, limits: StepLimits) -> StepUse:
    """What steps and graphs take: measured, or where both twins of every op run, twice what is planned.

    In the step that is measured sequences share a page, for which the twins would be called different.
    """
    if backend.settings().check:
        return StepUse(2 * gpu_step_bytes(build, limits), 0)
    return measure_use(decoder, options, limits, build.kv_cache_dtype)


def _say_if_shorter(limits: StepLimits, ledger: Ledger) -> None:
    if ledger.max_model_len < limits.max_model_len:
        logger.warning(
            "the model's context is %s tokens and the KV pool of %s holds %s: max_model_len is %s",
            f"{limits.max_model_len:,}",
            footprint.format_size(ledger.kv_pool),
            f"{ledger.tokens:,}",
            f"{ledger.max_model_len:,}",
        )


def build_of(decoder: Decoder, kv_cache_dtype: str) -> Build:
    """A loaded model in words; the format is that of the MLP's weights, the largest."""
    scheme = decoder.layers[0].mlp.gate_up.scheme
    weight_format = WeightFormat(scheme.name)
    if isinstance(scheme, W4A16):
        weight_format = WeightFormat(scheme.name, scheme.group_size, scheme.symmetric)
    return Build(decoder.config, weight_format, name_of(decoder.dtype), kv_cache_dtype)


def space_of(device: torch.device) -> Space:
    """The device's memory: all of it, and what this process may still fill."""
    if device.type == "cpu":
        return Space(False, *host_memory())
    return Space(True, torch.cuda.mem_get_info(device)[1], available_memory(device))


def available_memory(device: torch.device) -> int:
    """Bytes of the device that this process may still fill: free ones, and those that torch keeps for it."""
    if device.type == "cpu":
        return host_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
