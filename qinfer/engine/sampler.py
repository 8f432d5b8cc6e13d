"""Chooses each sequence's next token from its row of logits.

All work is on tensors over rows; only what a request asks for is done, and only for the rows that ask, so a
row's result does not depend on its neighbours. A step of plain greedy rows is one argmax. Randomness is one
number per token, a hash of (seed, position): the same request draws the same numbers alone, in any batch,
after a preemption and on any device.

Most requests ask for nothing that depends on the tokens before: for them `choose` is all, given the numbers
of `draw_of`, and nothing in it waits for a device. `sample` does the rest too, and waits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qinfer import ops
from qinfer.engine.activations import SLICE as SLICE_BYTES
from qinfer.engine.request import Sequence
from qinfer.engine.structured import constrain
from qinfer.outputs import Logprob

Spell = Callable[[int], str]  # a token's own text
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence
_LARGEST = 1e30  # a logit that is adjusted; the lowest temperature leaves it finite


class Draw(NamedTuple):
    """What decides a step's rows, float64 [5, R]: uniform number, temperature, top_k, top_p, min_p.

    Greedy rows have temperature 0. `limited`: some row has one of the limits.
    """

    rows: np.ndarray[Any, Any]
    limited: bool


class Sampled(NamedTuple):
    """A chosen token, with its position's log-probabilities where they were asked for.

    The token is -1 where the row held NaN (an overflow in half precision).
    """

    token_id: int
    logprobs: dict[int, Logprob] | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from a seed and the index of the output token."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def slice_rows(vocab_size: int) -> int:
    """Rows of logits of which copies may exist at a time: SLICE_BYTES of float32."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def draw_of(sequences: list[Sequence]) -> Draw | None:
    """The numbers that decide about these sequences, whose tokens are pending; None where all are greedy."""
    drawn = [i for i, seq in enumerate(sequences) if seq.request.draws_by is not None]
    if not drawn:
        return None
    chosen = [sequences[i] for i in drawn]
    rows = np.zeros((5, len(sequences)))
    rows[3] = 1.0
    rows[0, drawn] = [uniform(seq.seed, seq.num_output + seq.num_pending - 1) for seq in chosen]
    rows[1:, drawn] = np.array([seq.request.draws_by for seq in chosen]).T
    return Draw(rows, bool(rows[2].any() or (rows[3] < 1.0).any() or rows[4].any()))


def choose(logits: Tensor, rows: Tensor | None, *, limited: bool = False) -> Tensor:
    """One token per row of logits [R, V] -> [R] int64, -1 for NaN; `rows` are a Draw's, None: all greedy."""
    if rows is None:
        return ops.greedy(logits)
    number, temperature, top_k, top_p, min_p = rows
    if not limited:
        return ops.sample(logits, number, temperature.float(), None, None, None)
    return ops.sample(logits, number, temperature.float(), top_k.long(), top_p.float(), min_p.float())


def sample(logits: Tensor, sequences: list[Sequence], spell: Spell | None) -> list[Sampled]:
    """One token for each row of logits [S, V]; `spell` gives log-probabilities their text.

    Rows that are copied, to change or describe them, go by slices: a full batch needs no more memory.
    """
    count = slice_rows(logits.shape[1])
    if len(sequences) > count and any(seq.looks_back for seq in sequences):
        starts = range(0, len(sequences), count)
        return [r for i in starts for r in sample(logits[i : i + count], sequences[i : i + count], spell)]
    with torch.inference_mode():
        adjusted, draw = _adjust(logits, sequences), draw_of(sequences)
        if draw is None:
            ids = choose(adjusted, None)
        else:
            ids = choose(adjusted, torch.from_numpy(draw.rows).to(logits.device), limited=draw.limited)
        logprobs = _sample_logprobs(logits, ids.clamp(min=0), sequences, spell)
        return [Sampled(token, logprobs.get(i)) for i, token in enumerate(ids.tolist())]


def describe(logits: Tensor, ids: Tensor, num_top: int, spell: Spell | None) -> list[dict[int, Logprob]]:
    """Log-probabilities of ids [R] under logits [R, V] with the num_top likeliest (-1: all), chosen first."""
    num_top = logits.shape[1] if num_top < 0 else num_top
    chosen, ranks, values, tokens = (x.tolist() for x in ops.token_logprobs(logits, ids, num_top))
    entries: list[dict[int, Logprob]] = []
    for i, token in enumerate(ids.tolist()):
        entry = {token: Logprob(chosen[i], ranks[i], spell(token) if spell else None)}
        for rank, (value, other) in enumerate(zip(values[i], tokens[i], strict=True), start=1):
            if other != token:
                entry[other] = Logprob(value, rank, spell(other) if spell else None)
        entries.append(entry)
    return entries


def _sample_logprobs(
    logits: Tensor, ids: Tensor, sequences: list[Sequence], spell: Spell | None
) -> dict[int, dict[int, Logprob]]:
    found: dict[int, dict[int, Logprob]] = {}
    by_count: dict[int, list[int]] = {}
    for i, seq in enumerate(sequences):
        if seq.request.params.logprobs is not None:
            by_count.setdefault(seq.request.params.logprobs, []).append(i)
    for count, rows in by_count.items():
        where = torch.tensor(rows, device=logits.device)
        found |= zip(rows, describe(logits[where], ids[where], count, spell), strict=True)
    for i, seq in enumerate(sequences):
        if named := seq.request.params.logprob_token_ids:
            others = _of_tokens(logits[i], named, spell)
            found[i] |= {token: others[token] for token in named if token not in found[i]}
    return found


def _of_tokens(row: Tensor, ids: AnySequence[int], spell: Spell | None) -> dict[int, Logprob]:
    """Log-probabilities of these tokens under one row of logits [V]."""
    found: dict[int, Logprob] = {}
    count = slice_rows(len(row))
    for start in range(0, len(ids), count):
        some = torch.tensor(ids[start : start + count], device=row.device)
        for entry in describe(row.repeat(len(some), 1), some, 0, spell):
            found |= entry
    return found


def _adjust(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Masks, biases and penalties; the same tensor where nobody asks for any."""
    out = constrain(logits, sequences)
    for i, seq in enumerate(sequences):
        params = seq.request.params
        banned = _banned(seq)
        if not (banned or params.logit_bias or params.allowed_token_ids):
            continue
        out = logits.clone() if out is logits else out
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, device=out.device)
            kept = out[i, allowed].clone()
            out[i].fill_(float("-inf"))
            out[i, allowed] = kept
        if banned:
            out[i, torch.tensor(sorted(banned), device=out.device)] = float("-inf")
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=out.device)
            out[i, biased] += torch.tensor(list(params.logit_bias.values()), device=out.device)
    out = _penalize(out, sequences)
    # a bias or a penalty without measure: infinity would make NaN of the row's probabilities
    return out if out is logits else out.clamp(max=_LARGEST)


def _banned(seq: Sequence) -> set[int]:
    """Ids that may not come next: ends before min_tokens, and what would complete a bad word."""
    rules = seq.request.rules
    banned = set(rules.blocked_ids) if seq.num_output < rules.min_tokens else set()
    for word in seq.request.bad_words:
        begun = len(word) - 1
        if begun and (begun > seq.num_output or seq.token_ids[-1] != word[-2]):
            continue  # most, at the cost of one comparison
        if tuple(seq.token_ids[len(seq.token_ids) - begun :]) == word[:-1]:
            banned.add(word[-1])
    return banned


def _penalize(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    rows = [i for i, seq in enumerate(sequences) if _penalties(seq) != NO_PENALTIES]
    if not rows:
        return logits
    vocab_size = logits.shape[1]
    chosen = [sequences[i] for i in rows]
    outputs = [seq.token_ids[seq.num_prompt :] for seq in chosen]
    counts = ops.token_counts(_padded(outputs, vocab_size).to(logits.device), vocab_size)
    everything = _padded([seq.token_ids for seq in chosen], vocab_size).to(logits.device)
    seen = ops.token_counts(everything, vocab_size) > 0
    penalties = torch.tensor([_penalties(seq) for seq in chosen], device=logits.device).T.contiguous()
    where = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, where, ops.apply_penalties(logits[where], seen, counts, *penalties))


def _penalties(seq: Sequence) -> tuple[float, float, float]:
    params = seq.request.params
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _padded(lists: list[list[int]], fill: int) -> Tensor:
    width = max(map(len, lists))
    return torch.tensor([ids + [fill] * (width - len(ids)) for ids in lists], dtype=torch.int64)
