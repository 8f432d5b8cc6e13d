"""How likely a given continuation of a context is: what choice tasks ask, many at a time.

A request that is scored runs like any other up to its prompt's end, and shares steps and pages with its
neighbours. Its prompt is the context and all of the continuation but the last token, which nothing follows.
The context may come from the prefix cache; the rows that predict the continuation are computed, and their
logits made for all requests of a step together. The one token that is sampled at the end means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qinfer.engine.plan import StepPlan
from qinfer.engine.request import Sequence as TokenSequence
from qinfer.engine.runner import StepOutput, StepRunner


@dataclass(eq=False)
class Continuation:
    """Tokens to be scored, at least one; the lists grow with what is computed.

    `logprobs` in nats; `likeliest`: whether the token was the model's first choice.
    """

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[bool] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Tokens without a score yet."""
        return len(self.token_ids) - len(self.logprobs)

    def take(self, logits: Tensor) -> None:
        """Scores the next tokens by the logits [rows, V] float32 that predict them."""
        done = len(self.logprobs)
        ids = torch.tensor(self.token_ids[done : done + len(logits)], device=logits.device)
        chosen = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)
        self.logprobs += chosen.tolist()
        self.likeliest += (logits.argmax(1) == ids).tolist()

    def restart(self) -> None:
        """Forgets the scores: they will come again."""
        self.logprobs, self.likeliest = [], []


def score_continuations(
    plan: StepPlan, sequences: Sequence[TokenSequence], out: StepOutput, runner: StepRunner, rows: int
) -> None:
    """Adds what a step says of continuations; at most `rows` rows of logits exist beside the step's own."""
    pending: list[tuple[Continuation, Tensor]] = []
    last: list[tuple[Continuation, Tensor]] = []
    num_sampled = 0
    for seq, chunk in zip(sequences, plan.chunks, strict=True):
        num_sampled += chunk.sample
        continuation = seq.request.continuation
        if continuation is None or chunk.seq_id not in out.hidden:
            continue
        start = max(seq.first_scored - chunk.start, 0)
        wanted = out.hidden[chunk.seq_id][start : chunk.stop - chunk.start - chunk.sample]
        pending += [(continuation, part) for part in torch.split(wanted, rows) if len(part)]
        if chunk.sample:
            last.append((continuation, out.logits[num_sampled - 1 : num_sampled]))
    for group in _groups([len(part) for _, part in pending], rows):
        made = runner.logits(torch.cat([pending[i][1] for i in group]))
        for i, logits in zip(group, torch.split(made, [len(pending[i][1]) for i in group]), strict=True):
            pending[i][0].take(logits)
    for continuation, logits in last:  # after the rows before it
        continuation.take(logits)


def _groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices in order, in groups whose sizes sum to at most `limit`."""
    groups: list[list[int]] = []
    total = limit
    for i, size in enumerate(sizes):
        if total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups
