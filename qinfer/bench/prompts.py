"""A dataset's token ids as the text that a server is sent, of exactly as many tokens.

Random ids do not spell text that is read back as the same ids, so that text is read and cut, or lengthened, a
few times until its count is right; where it never is, the count that it has is the one that is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qinfer.bench.dataset import BenchRequest
from qinfer.tokenizer import Tokenizer

_ROUNDS = 10


class Prompt(NamedTuple):
    """A text, its tokens counted as a server counts them, and the tokens that are to follow."""

    text: str
    num_tokens: int
    output_len: int


def texts_of(requests: Sequence[BenchRequest], tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """The requests as text, in order."""
    generator = np.random.default_rng([seed, 3])
    plain = np.array([i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids])
    return [_text_of(request, tokenizer, plain, generator) for request in requests]


def _text_of(
    request: BenchRequest, tokenizer: Tokenizer, plain: np.ndarray, generator: np.random.Generator
) -> Prompt:
    wanted, ids = len(request.prompt), request.prompt
    for _ in range(_ROUNDS):
        text = tokenizer.decode(ids).replace("\x00", "")  # which is no text to many a server
        read = tokenizer.encode(text)
        if len(read) == wanted:
            break
        more = plain[generator.integers(len(plain), size=max(0, wanted - len(read)))]
        ids = [*read[:wanted], *more.tolist()]
    return Prompt(text, len(read), request.output_len)
