"""Filling in the middle: what comes between a prompt and a suffix, for models that were trained to say it.

Such a model has three tokens that stand before the prefix, before the suffix and before the answer. Which
they are differs by family; a model without any of them cannot do it, and the suffix is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a server takes its port before it imports what a tokenizer needs
    from qinfer.tokenizer import Tokenizer

_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),  # DeepSeek-Coder
)


class Marks(NamedTuple):
    """The tokens before the prefix, the suffix and the middle."""

    prefix: int
    suffix: int
    middle: int

    def around(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt whose continuation is the middle."""
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """The model's three tokens; None where it has no such."""
    for spelling in _SPELLINGS:
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in spelling]
        if all(len(one) == 1 for one in ids):
            return Marks(*(one[0] for one in ids))
    return None
