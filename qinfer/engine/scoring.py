"""Logits of positions that a text has already: for log-probabilities of prompts, and to score texts.

They are made a slice of rows at a time, since a long text's would fill gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qinfer.engine.admission import check_prompt
from qinfer.engine.options import StepLimits
from qinfer.engine.pages import PagePool
from qinfer.engine.plan import Chunk, StepPlan
from qinfer.engine.request import Request
from qinfer.engine.runner import StepRunner
from qinfer.engine.sampler import Spell, describe
from qinfer.errors import UserError

LOGIT_ROWS = 256  # rows of a full vocabulary that exist at a time on a CPU


class TextReader:
    """Reads whole texts, one at a time, in pages of its own: `held`, empty between two texts."""

    def __init__(self, runner: StepRunner, pages: PagePool, limits: StepLimits, vocab_size: int) -> None:
        self.held: list[int] = []
        self._runner, self._pages, self._limits, self._vocab_size = runner, pages, limits, vocab_size

    def hidden(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Hidden states [T, H] after the final norm, in order, in chunks of max_num_batched_tokens.

        Raises UserError for a text that does not fit.
        """
        ids, limits = check_prompt(token_ids, self._vocab_size), self._limits
        capacity = min(self._pages.num_pages * limits.block_size, limits.max_model_len)
        if len(ids) > capacity:
            raise UserError(f"{len(ids)} tokens are more than the {capacity} that fit", "token_ids")
        pages = self.held = self._pages.allocate(self._pages.pages_for(len(ids)))
        try:
            for start in range(0, len(ids), limits.max_num_batched_tokens):
                stop = min(len(ids), start + limits.max_num_batched_tokens)
                plan = StepPlan((Chunk(-1, start, stop, sample=False),), {0: pages})
                yield self._runner.run(plan, {-1: ids}, frozenset((-1,))).hidden[-1]
        finally:
            self._pages.release(pages)
            self.held = []


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
