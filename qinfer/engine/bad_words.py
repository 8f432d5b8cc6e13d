"""Words that may not be said, as token ids: as they are spelled where a text begins, and after a space.

Spelling hundreds of long words takes seconds, which the engine's thread has for nobody: `AsyncLLM` has it
done on another, and the engine finds it done. A word of more tokens than the answer may have never comes up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:  # a server takes its port before it imports what a tokenizer needs
    from qinfer.tokenizer import Tokenizer

Words = tuple[tuple[int, ...], ...]
_KEPT = 16  # lists of words


class BadWords:
    """Spells and remembers; may be asked on any thread."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._spelled = lru_cache(maxsize=_KEPT)(self._spell)

    def of(self, params: SamplingParams) -> Words:
        """The ids of `params.bad_words`, those first whose word is first; none without a tokenizer."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        longest = min(params.max_tokens or self._max_model_len, self._max_model_len)
        return self._spelled(tuple(params.bad_words), longest)

    def _spell(self, words: tuple[str, ...], longest: int) -> Words:
        return tuple(
            ids for word in words for ids in self._spellings(word, longest) if 0 < len(ids) <= longest
        )

    def _spellings(self, word: str, longest: int) -> Iterator[tuple[int, ...]]:
        assert self._tokenizer is not None
        if self._tokenizer.least_tokens(word) > longest:
            return
        forms = [
            tuple(self._tokenizer.encode(form, add_special_tokens=False))
            for form in (word, " " + word.lstrip())
        ]
        yield from dict.fromkeys(forms)
