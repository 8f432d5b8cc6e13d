"""Logits of positions that a text has already: for log-probabilities of prompts, and to score texts.

They are made a slice of rows at a time, since a long text's would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qinfer.engine.options import StepLimits
from qinfer.engine.plan import Chunk, StepPlan
from qinfer.engine.request import Request
from qinfer.engine.runner import StepRunner
from qinfer.engine.sampler import Spell, describe

LOGIT_ROWS = 256  # rows of a full vocabulary that exist at a time on a CPU


def text_hidden(
    runner: StepRunner, limits: StepLimits, pages: list[int], ids: Sequence[int]
) -> Iterator[Tensor]:
    """Hidden states [T, H] after the final norm of a text in `pages`, in order, chunk by chunk."""
    for start in range(0, len(ids), limits.max_num_batched_tokens):
        stop = min(len(ids), start + limits.max_num_batched_tokens)
        held = tuple(pages[: -(-stop // limits.block_size)])
        plan = StepPlan((Chunk(-1, start, stop, held, sample=False),))
        yield runner.run(plan, {-1: ids}, frozenset((-1,))).hidden[-1]


def score_prompt(
    request: Request, chunk: Chunk, hidden: Tensor, runner: StepRunner, rows: int, spell: Spell | None
) -> None:
    """Pools a chunk's hidden rows, or adds log-probabilities of the prompt tokens that follow them."""
    if request.pool is not None:
        return request.pool.add(hidden)
    wanted = request.params.prompt_logprobs
    assert wanted is not None
    following = request.prompt_ids[chunk.start + 1 : chunk.stop + 1]
    for first in range(0, len(following), rows):
        part = following[first : first + rows]
        logits = runner.logits(hidden[first : first + len(part)])
        ids = torch.tensor(part, device=logits.device)
        request.prompt_logprobs += describe(logits, ids, wanted, spell)
