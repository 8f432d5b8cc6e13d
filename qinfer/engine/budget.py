"""How much memory an engine may use, and what must fit into it before the first page: plain ints, no torch.

A GPU's budget is a share of the whole device, or a number of bytes for everything that the process has there,
CUDA's own context included; what other processes hold is not there to be taken. A CPU's is what the engine
needs and a modest pool. Where a GPU's budget is small and nobody chose the tokens of a step, a step becomes
smaller, so that its peak does not eat what the weights leave for pages.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from qinfer.config import ModelConfig
from qinfer.engine.activations import (
    LEAST_TOKENS,
    RUNTIME,
    SHARE,
    Build,
    cpu_step_bytes,
    gpu_step_bytes,
    graph_bytes,
    with_gaps,
)
from qinfer.engine.footprint import (
    GIB,
    ITEM_BYTES,
    Pages,
    format_size,
    pages_of,
    weight_bytes,
)
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.engine.plan import GRAPHED
from qinfer.errors import UserError

logger = logging.getLogger(__name__)

CPU_POOL = 2 * GIB  # a CPU engine's KV pool unless it is told otherwise: 93,200 bf16 tokens of SmolLM2-135M
CPU_SHARE = 0.9  # and never more than this share of the RAM that is available now


def warn_if_released(free_before: int, free_after: int) -> None:
    """A neighbour on the device may release memory while use of it is measured: a warning, not an error.

    What this process uses is told by torch, and so never negative.
    """
    if free_after > free_before:
        logger.warning(
            "free memory grew from %s to %s while it was measured: another process released some",
            format_size(free_before),
            format_size(free_after),
        )


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


class Demand(NamedTuple):
    """What must fit before the first KV page, in bytes."""

    weights: int
    activations: int = 0
    graphs: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        """All of it."""
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


class Space(NamedTuple):
    """Memory of the device that a model runs on, in bytes."""

    on_gpu: bool
    total: int
    available: int


def require_weights_fit(weights: int, space: Space, options: EngineOptions) -> None:
    """UserError with both numbers, before anything is loaded, where the weights alone exceed the budget.

    `weights` are the bytes of the checkpoint's files. So is a budget beyond the memory that is free.
    """
    budget, what = space.available, "memory that is free"
    if options.memory is not None or (space.on_gpu and not options.has_fixed_pool):
        budget = budget_for(space.total, space.available, options.gpu_memory_utilization, options.memory)
        what = "memory budget"
    if weights >= budget:
        raise UserError(
            f"the weights alone need {format_size(weights)} and the {what} is {format_size(budget)}: "
            "nothing was loaded; take a smaller model, quantize it, or give it more memory",
            "memory",
        )


def budget_of(space: Space, demand: Demand, page: Pages, limits: StepLimits, options: EngineOptions) -> int:
    """The budget of an engine in this space: the same for `serve` and, before anything is loaded, `plan`."""
    if space.on_gpu:
        return budget_for(space.total, space.available, options.gpu_memory_utilization, options.memory)
    max_tokens = limits.max_num_seqs * limits.max_model_len
    return cpu_budget(space.available, demand, page, max_tokens, options.memory)


def gpu_reserve(page: Pages) -> int:
    """What is kept of a GPU's budget for the runtime, and for page 0, which is nobody's."""
    return RUNTIME + page.num_bytes


def planned_demand(build: Build, limits: StepLimits, *, on_gpu: bool) -> Demand:
    """What an engine of these limits is planned to take before its first page."""
    config, weight_format, dtype, kv_cache_dtype = build
    if on_gpu:
        weights = weight_bytes(config, weight_format, dtype, place="gpu")
        reserve = gpu_reserve(pages_of(config, kv_cache_dtype, limits.block_size))
        return Demand(weights, with_gaps(gpu_step_bytes(build, limits)), graph_bytes(build, limits), reserve)
    weights = weight_bytes(config, weight_format, dtype, place="cpu")
    return Demand(weights, cpu_step_bytes(config, limits, ITEM_BYTES[dtype]))


def shorten_steps(build: Build, limits: StepLimits, room: int) -> StepLimits:
    """Limits with so few tokens a step that its planned peak is a small part of `room`, on a GPU.

    `room` is what weights leave of the budget, in bytes. Steps are not shortened where that saves little, and
    there are always tokens for every sequence, and for the longest prompt where it may not be split. Of
    steps of 2,000 tokens it is half where those are graphs, which cost no more a token.
    """
    wanted = limits.max_num_batched_tokens
    least = max(LEAST_TOKENS, limits.max_num_seqs, 0 if limits.chunked_prefill else limits.max_model_len)
    while room < SHARE * gpu_step_bytes(build, limits):
        shorter = limits._replace(max_num_batched_tokens=limits.max_num_batched_tokens // 2)
        saves_little = gpu_step_bytes(build, shorter) > 0.9 * gpu_step_bytes(build, limits)
        if shorter.max_num_batched_tokens < least or saves_little:
            break
        limits = shorter
    are_graphs = max(least, limits.max_num_seqs + 1) <= GRAPHED
    if are_graphs and GRAPHED < limits.max_num_batched_tokens <= min(2 * GRAPHED, wanted - 1):
        limits = limits._replace(max_num_batched_tokens=GRAPHED)
    return limits


def unquantized_demand(
    config: ModelConfig, options: EngineOptions, limits: StepLimits, demand: Demand, total: int | None
) -> Demand:
    """What the unquantized model takes before its first page where the quantized one takes `demand`.

    On a GPU with a budget of `total` bytes it takes shorter steps if it must; on a CPU (None) the same ones.
    """
    if total is None:
        return demand._replace(weights=weight_bytes(config))
    build = Build.unquantized(config)
    if options.max_num_batched_tokens is None:
        limits = shorten_steps(build, limits, total - weight_bytes(config))
    planned = planned_demand(build, limits, on_gpu=True)
    return planned if demand.graphs else planned._replace(graphs=0)
