"""Beam search: the likeliest continuations of a prompt as a whole, found by widening the best ones a token
at a time.

Every step asks the engine for one token of each live beam with the log-probabilities of the 2·width
likeliest; the prefix cache keeps that cheap. A candidate that ends the sequence is set aside, of the others
the best `width` live on, so that the search goes the full length. Beams compare by log-probability over
length to the power of `length_penalty`, prompt counted and the end not, as in vLLM. Here is only the
bookkeeping: whoever searches asks the engine in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qinfer.outputs import LogprobsOnePosition
from qinfer.sampling_params import SamplingParams

MAX_LENGTH_PENALTY = 10.0  # a length to its power, or one over it, is a number for any context


@dataclass
class Beam:
    """One continuation; `token_ids` with the prompt, `logprobs` of what follows it."""

    token_ids: list[int]
    cum_logprob: float = 0.0
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    finish_reason: str = "length"

    def score(self, length_penalty: float) -> float:
        """The larger, the better."""
        length = len(self.token_ids) - (self.finish_reason == "stop")
        return self.cum_logprob / math.pow(length, length_penalty)


class BeamSearch:
    """The search for one prompt: `live` beams are to be asked about until there are none."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        width: int,
        max_tokens: int,
        *,
        eos_ids: frozenset[int],
        length_penalty: float = 1.0,
    ) -> None:
        """`eos_ids` empty: nothing ends a beam but its length."""
        self.prompt_ids = list(prompt_ids)
        self.width, self.max_tokens = width, max_tokens
        self._eos_ids, self._length_penalty = eos_ids, length_penalty
        self.live = [Beam(self.prompt_ids)]
        self._ended: list[Beam] = []

    @property
    def step_params(self) -> SamplingParams:
        """What to ask of every live beam."""
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * self.width, detokenize=False)

    def advance(self, found: Sequence[LogprobsOnePosition]) -> None:
        """Takes the log-probabilities of the next token of each live beam, in order."""
        grown = [
            Beam(
                [*beam.token_ids, token],
                beam.cum_logprob + entry.logprob,
                [*beam.logprobs, {token: entry, **entries}],
                "stop" if token in self._eos_ids else "length",
            )
            for beam, entries in zip(self.live, found, strict=True)
            for token, entry in entries.items()
        ]
        self._ended += [beam for beam in grown if beam.finish_reason == "stop"]
        self.live = self._best([beam for beam in grown if beam.finish_reason != "stop"])
        if self.live and len(self.live[0].token_ids) - len(self.prompt_ids) >= self.max_tokens:
            self._ended += self.live
            self.live = []

    def best(self) -> list[Beam]:
        """The best `width` beams once none is live, best first."""
        assert not self.live
        return self._best(self._ended)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score(self._length_penalty))[: self.width]
