"""How likely a given continuation of a context is: what choice tasks ask, many at a time.

A request that is scored runs like any other up to its prompt's end, and shares steps and pages with its
neighbours. Its prompt is the context and all of the continuation but the last token, which nothing follows.
The context may come from the prefix cache; the rows that predict the continuation are computed, and their
logits made for all requests of a step together. The one token that is sampled at the end means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

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

    def next_ids(self, count: int) -> list[int]:
        """The first `count` tokens without a score."""
        done = len(self.logprobs)
        return self.token_ids[done : done + count]

    def restart(self) -> None:
        """Forgets the scores: they will come again."""
        self.logprobs, self.likeliest = [], []


def score_continuations(
    plan: StepPlan, sequences: Sequence[TokenSequence], out: StepOutput, runner: StepRunner, rows: int
) -> None:
    """Adds what a step says of continuations; at most `rows` rows of logits exist beside the step's own."""
    parts: list[tuple[Continuation, Tensor]] = []  # hidden rows that predict the next tokens of each
    last: list[tuple[Continuation, int]] = []  # with the row of the step's own logits for its last token
    num_sampled = 0
    for seq, chunk in zip(sequences, plan.chunks, strict=True):
        num_sampled += chunk.sample
        continuation = seq.request.continuation
        if continuation is None or chunk.seq_id not in out.hidden:
            continue
        start = max(seq.first_scored - chunk.start, 0)
        wanted = out.hidden[chunk.seq_id][start : chunk.stop - chunk.start - chunk.sample]
        # a whole part of `rows` fills a group alone, so that no continuation is twice in one
        parts += [(continuation, part) for part in torch.split(wanted, rows) if len(part)]
        if chunk.sample:
            last.append((continuation, num_sampled - 1))
    for group in _groups([len(part) for _, part in parts], rows):
        counts = [(parts[i][0], len(parts[i][1])) for i in group]
        _score(counts, runner.logits(torch.cat([parts[i][1] for i in group])))
    for first in range(0, len(last), rows):  # after the rows before them
        some = last[first : first + rows]
        _score([(continuation, 1) for continuation, _ in some], out.logits[[row for _, row in some]])


def _score(counts: Sequence[tuple[Continuation, int]], logits: Tensor) -> None:
    """Scores the next `count` tokens of each continuation, by the rows of logits that predict them."""
    ids = [token for continuation, count in counts for token in continuation.next_ids(count)]
    wanted = torch.tensor(ids, device=logits.device)
    chosen = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(1)
    logprobs, likeliest = iter(chosen.tolist()), iter((logits.argmax(1) == wanted).tolist())
    for continuation, count in counts:
        continuation.logprobs += islice(logprobs, count)
        continuation.likeliest += islice(likeliest, count)


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
