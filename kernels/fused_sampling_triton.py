# mypy: allow-untyped-calls
"""One token per row on a GPU: the twin of `fused_sampling`, a fixed chain of launches that nothing waits for.

`row_search_triton` tells how it is done. Which launches there are depends on the shape and on which limits
are given at all, never on a row's values, so a chain can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from qinfer.kernels.offline import Variant
from qinfer.kernels.row_draw_triton import finish
from qinfer.kernels.row_search_triton import gather, narrow, survey
from qinfer.kernels.rows_triton import INTERPRETED

CHUNK = 4096  # logits of a piece
ROOM = 128  # logits that a piece may leave in the bracket
PIVOTS = 16
ROUNDS = 2  # of narrowing: to 1 / 256 of the first bracket
WARPS = {"survey": 8, "narrow": 4, "gather": 8, "finish": 8}
EARLY = not INTERPRETED


class Limits(NamedTuple):
    """What is asked of the rows, each [R] or None: see `fused_sampling.sample`."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class Survey(NamedTuple):
    """Of each piece of each row, [R, C]: largest, sum of exponentials relative to it, least finite."""

    maxima: Tensor
    sums: Tensor
    minima: Tensor


def greedy(logits: Tensor) -> Tensor:
    """As its meaning."""
    return _ids(logits, None, Limits())


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """As its meaning; sums differ in their last bits, so a token at the edge of a limit or draw may too."""
    return _ids(logits, uniform, Limits(temperature, top_k, top_p, min_p))


def _ids(logits: Tensor, uniform: Tensor | None, limits: Limits) -> Tensor:
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    run(logits, uniform, limits, ids=ids)
    return ids


def run(
    logits: Tensor,
    uniform: Tensor | None,
    limits: Limits,
    *,
    ids: Tensor | None = None,
    least: Tensor | None = None,
) -> None:
    """Fills ids [R] int64 with each row's token, and least [R] float32 with the least logit that it keeps."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows, num_tokens = logits.shape
    pieces = -(-num_tokens // CHUNK)
    sizes = {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(pieces)}
    shape = (num_tokens, logits.stride(0), pieces)
    found, places = surveyed(logits, limits.temperature)
    filters = any(limit is not None for limit in limits[1:])
    bracket = _narrowed(logits, limits, found, sizes, shape) if filters else (None,) * 6
    finish[(num_rows,)](
        logits, uniform, *limits, *found, places, *bracket, ids, least, *shape,
        FILTER=filters, ROOM=ROOM, **sizes, **_launch("finish"),
    )  # fmt: skip


def surveyed(logits: Tensor, temperature: Tensor | None) -> tuple[Survey, Tensor]:
    """What `Survey` says of logits [R, V], and where the largest of each piece is, [R, C] int32."""
    num_rows, num_tokens = logits.shape
    pieces = -(-num_tokens // CHUNK)
    found = Survey(*torch.empty(3, num_rows, pieces, device=logits.device).unbind(0))
    places = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
    survey[(pieces, num_rows)](
        logits,
        temperature,
        *found,
        places,
        num_tokens,
        logits.stride(0),
        pieces,
        CHUNK=CHUNK,
        **_launch("survey"),
    )
    return found, places


def _narrowed(
    logits: Tensor, limits: Limits, found: Survey, sizes: dict[str, int], shape: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """(targets, kept, counts, above_counts, above_masses, brackets) as `finish` takes them."""
    num_rows, pieces, device = len(logits), shape[-1], logits.device
    grid = (pieces, num_rows)
    pivots = torch.empty(2, num_rows, PIVOTS + 1, device=device)
    weights = torch.empty(2, num_rows, pieces, PIVOTS, device=device)
    targets = torch.empty(num_rows, device=device)
    for i in range(ROUNDS):
        old, new = (i + 1) % 2, i % 2
        narrow[grid](
            logits, *limits, *found, pivots[old], weights[old], pivots[new], weights[new], targets,
            *shape, FIRST=i == 0, SECOND=i == 1, PIVOTS=PIVOTS, **sizes, **_launch("narrow"),
        )  # fmt: skip
    last = (ROUNDS - 1) % 2
    kept = torch.empty(num_rows, pieces, ROOM, device=device)
    counts = torch.empty(2, num_rows, pieces, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, pieces, device=device)
    brackets = torch.empty(num_rows, 2, device=device)
    gather[grid](
        logits, *limits, *found, pivots[last], weights[last], targets, kept, *counts, masses, brackets,
        *shape, PIVOTS=PIVOTS, SECOND=ROUNDS == 1, ROOM=ROOM, **sizes, **_launch("gather"),
    )  # fmt: skip
    return targets, kept, *counts.unbind(0), masses, brackets


def offline_variants() -> Iterator[Variant]:
    """Each launch of a chain with all limits, for a vocabulary of 128,256."""
    types = {"uniform": "*fp64", "top_k": "*i64", "ids": "*i64"}
    types |= dict.fromkeys(("places", "counts", "above_counts"), "*i32")
    types |= dict.fromkeys(("num_tokens", "stride", "num_chunks"), "i32")
    sizes = {"CHUNK": CHUNK, "CHUNKS": 32}
    for kernel, constants in (
        (survey, {"CHUNK": CHUNK}),
        (narrow, {**sizes, "PIVOTS": PIVOTS, "FIRST": False, "SECOND": True}),
        (gather, {**sizes, "PIVOTS": PIVOTS, "SECOND": False, "ROOM": ROOM}),
        (finish, {**sizes, "FILTER": True, "ROOM": ROOM}),
    ):
        options = _launch(kernel.__name__)
        constants |= {name: options.pop(name) for name in ("EARLY", "THREADS") if name in options}
        signature = {name: types.get(name, "*fp32") for name in kernel.arg_names if name not in constants}
        yield Variant(kernel.__name__, kernel, signature, constants, options, ("num_tokens", "stride"))


def _launch(kernel: str) -> dict[str, Any]:
    options = {"EARLY": EARLY, "num_warps": WARPS[kernel], "launch_pdl": EARLY}
    return (
        {**options, "THREADS": min(32 * WARPS[kernel], CHUNK)} if kernel in ("narrow", "gather") else options
    )
