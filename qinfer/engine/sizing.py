"""How large the KV pool becomes: the ledger of `memory.py` filled in with what was loaded.

On the CPU the pool is taken from the RAM that is available after the weights are in, and is as large as
`max_num_seqs` full sequences at most; pages that are never used cost nothing there. On a GPU it is what a
share of the device leaves, `gpu_memory_utilization`. A fixed number of pages, a number of bytes for them, or
a budget for everything overrides this. The longest sequence is one that the pool holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qinfer.engine import footprint, memory
from qinfer.engine.memory import Ledger, Space
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.env import host_memory
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder

logger = logging.getLogger(__name__)


def size_pool(
    decoder: Decoder, options: EngineOptions, limits: StepLimits, kv_cache_dtype: str, label: str
) -> Ledger:
    """The ledger of an engine; the model is loaded, the pool not yet allocated.

    Its max_model_len is the limits', or, where nobody chose one, what the pool holds of it; a pool of
    `num_kv_blocks` is taken as it is. Raises UserError where the weights and one page do not fit, or the
    pages or one sequence of the length that were asked for.
    """
    config = decoder.config
    weights = tensor_bytes(decoder)
    page = footprint.pages_of(config, kv_cache_dtype, limits.block_size)
    demand = memory.demand_of(config, limits, weights, decoder.dtype.itemsize)
    num_pages = options.num_kv_blocks
    if num_pages is None and options.kv_cache_memory_bytes is not None:
        num_pages = options.kv_cache_memory_bytes // page.num_bytes
        if not num_pages:
            raise UserError(
                f"kv_cache_memory_bytes {options.kv_cache_memory_bytes} is less than one page of "
                f"{page.num_bytes} bytes",
                "kv_cache_memory_bytes",
            )
    if num_pages is not None and num_pages * page.num_bytes > (free := available_memory(decoder.device)):
        raise UserError(
            f"a KV pool of {footprint.format_size(num_pages * page.num_bytes)} is more than the "
            f"{footprint.format_size(free)} that are free: ask for fewer than {num_pages:,} pages",
            "num_kv_blocks",
        )
    if num_pages is not None and options.memory is None:
        budget = demand.total + num_pages * page.num_bytes
    else:
        space = space_of(decoder.device)
        space = space._replace(available=space.available + weights)  # they are loaded already
        budget = memory.budget_of(space, demand, page, limits, options)
    ledger = memory.plan(label, budget, demand, page, limits.max_model_len, num_pages)
    if options.num_kv_blocks is None:
        ledger = memory.settle_length(ledger, chosen=options.max_model_len is not None)
    if ledger.max_model_len < limits.max_model_len:
        logger.warning(
            "the model's context is %s tokens and the KV pool of %s holds %s: max_model_len is %s",
            f"{limits.max_model_len:,}",
            footprint.format_size(ledger.kv_pool),
            f"{ledger.tokens:,}",
            f"{ledger.max_model_len:,}",
        )
    return replace(ledger, unquantized=memory.unquantized(config, ledger))


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


def tensor_bytes(model: Any) -> int:
    """Bytes of all memory that the tensors within an object refer to, each counted once."""
    sizes = {}
    for tensor in _tensors(model, set()):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif type(value).__module__.startswith("qinfer."):
        children = list(getattr(value, "__dict__", {}).values())
    else:
        children = []
    for child in children:
        yield from _tensors(child, seen)
