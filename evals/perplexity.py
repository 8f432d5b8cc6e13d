"""Perplexity of a text: exp of the total negative log-likelihood over the total number of units.

The totals are divided, never window means averaged: 512 tokens at 2.0 nats and a last window of 64 at 3.0
give exp((1024 + 192) / 576) = 8.257, not 12.18. Every token of a window is scored but the first, which has
nothing before it (with a beginning-of-sequence token that one is not text, so all text is scored). Windows
do not overlap, so a window of 1024 gives a token 512 tokens of context on average.

Numbers per token depend on the tokenizer, so each carries its unit, and unlike units are never compared. Per
word and per byte divide the same likelihood by the words and UTF-8 bytes of the text that was scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qinfer.errors import UserError
from qinfer.evals.fidelity import Logits
from qinfer.evals.statistics import Interval, exponential, finite, mean_interval

Unit = Literal["token", "word", "byte"]


class Perplexity(NamedTuple):
    """exp(nll / units) of one model on one text; `interval` is over windows and per token only."""

    value: float
    unit: Unit
    nll: float  # nats, in all
    units: int  # scored
    interval: Interval | None = None

    @property
    def bits(self) -> float:
        """Bits per unit: for bytes the usual bits per byte."""
        return self.nll / (self.units * math.log(2)) if self.units else math.nan


def perplexity(nll: float, units: int, unit: Unit) -> Perplexity:
    """exp(nll / units); not a number where nothing was scored."""
    return Perplexity(exponential(nll / units) if units else math.nan, unit, nll, units)


def token_perplexity(nlls: Sequence[Tensor], *, seed: int = 0) -> Perplexity:
    """Perplexity per token of windows of likelihoods (nats), with its interval over windows."""
    total = math.fsum(float(nll.double().sum()) for nll in nlls)
    interval = mean_interval(nlls, seed=seed).map(exponential)
    return perplexity(total, sum(nll.numel() for nll in nlls), "token")._replace(interval=interval)


def ratio(candidate: Perplexity, reference: Perplexity) -> float:
    """How many times the reference's perplexity; raises UserError where the units or the counts differ."""
    if (candidate.unit, candidate.units) != (reference.unit, reference.units):
        raise UserError(
            f"perplexity per {candidate.unit} over {candidate.units} cannot be compared with "
            f"perplexity per {reference.unit} over {reference.units}: score the same text in the same unit"
        )
    return candidate.value / reference.value


def likelihoods(logits: Logits, windows: Iterable[Sequence[int]]) -> Iterator[Tensor]:
    """Negative log-likelihoods [T - 1] (nats, float32) of each window of T token ids, one at a time."""
    for token_ids in windows:
        targets = torch.tensor(token_ids[1:])
        scores, start = [], 0
        for rows in logits(token_ids):
            wanted = targets[start : start + len(rows)].to(rows.device)
            scored = rows[: len(wanted)].float()
            scores.append((scored.logsumexp(-1) - scored.gather(1, wanted[:, None])[:, 0]).cpu())
            start += len(rows)
        assert start == len(token_ids), f"logits of {start} positions for {len(token_ids)} tokens"
        yield torch.cat(scores)


class TextScore(NamedTuple):
    """One model on one text in three units, and what is needed to compare it with another."""

    per_token: Perplexity
    per_word: Perplexity
    per_byte: Perplexity
    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that is not finite becomes null."""
        value, low, high = self.per_token.interval or (math.nan,) * 3
        return {
            "perplexity_per_token": finite(value),
            "interval": [finite(low), finite(high)],
            "perplexity_per_word": finite(self.per_word.value),
            "bits_per_byte": finite(self.per_byte.bits),
            "nll_nats": finite(self.per_token.nll),
            "tokens_scored": self.per_token.units,
            "words_scored": self.per_word.units,
            "bytes_scored": self.per_byte.units,
            "settings": dict(self.settings),
        }

    def to_text(self) -> str:
        """For a terminal: one line a unit."""
        _, low, high = self.per_token.interval or (math.nan,) * 3
        return (
            f"perplexity {self.per_token.value:.4f} per token [{low:.4f}, {high:.4f}]\n"
            f"perplexity {self.per_word.value:.4f} per word\n"
            f"{self.per_byte.bits:.4f} bits per byte\n"
            f"{self.per_token.units} tokens scored in {self.settings['windows']} windows of "
            f"{self.settings['window']}, stride {self.settings['window']}"
        )


def score_text(nlls: Sequence[Tensor], text: str, settings: Mapping[str, Any], *, seed: int = 0) -> TextScore:
    """All three units from likelihoods per window and `text`, the text of the tokens that were scored."""
    per_token = token_perplexity(nlls, seed=seed)
    per_word = perplexity(per_token.nll, len(text.split()), "word")
    per_byte = perplexity(per_token.nll, len(text.encode()), "byte")
    return TextScore(per_token, per_word, per_byte, settings)
