"""How tokenizers spell bytes as text in their vocabulary, and back.

Byte-level BPE (GPT-2, Radford et al. 2019) writes each byte as one printable letter: the 188 bytes that are
printable in Latin-1 stand for themselves, and the others, in order, are the letters from U+0100 on, so that
a space is "Ġ" (U+0120). SentencePiece (Kudo and Richardson 2018) keeps characters, writes a space as "▁"
(U+2581), and falls back to a token like <0x0A> for each byte of a character that the vocabulary lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qinfer.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def byte_letters() -> tuple[str, ...]:
    """GPT-2's letter of each byte, by the byte's value."""
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in _PRINTABLE else next(spare)) for byte in range(256))


class Spelling(Protocol):
    """Reads a token of the vocabulary; `leading_spaces` are dropped at the very beginning of a text."""

    leading_spaces: int

    def to_bytes(self, token: str) -> bytes:
        """Bytes that the token stands for."""
        ...


class ByteLevelSpelling:
    """Each letter is a byte; a token with any other letter (an added token) is plain text."""

    leading_spaces = 0

    def __init__(self) -> None:
        self._byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    def to_bytes(self, token: str) -> bytes:
        """Bytes that the token stands for."""
        try:
            return bytes(self._byte_of[letter] for letter in token)
        except KeyError:
            return token.encode()


class SentencePieceSpelling:
    """Replaced letters, and byte tokens."""

    def __init__(
        self, replaced: Sequence[tuple[str, str]], *, byte_fallback: bool, leading_spaces: int
    ) -> None:
        self._replaced = tuple(replaced)
        self._byte_fallback = byte_fallback
        self.leading_spaces = leading_spaces

    @classmethod
    def from_decoder(cls, steps: Sequence[Mapping[str, Any]]) -> SentencePieceSpelling:
        """From the steps of a decoder in tokenizer.json; UnsupportedModelError for what it cannot mean."""
        kinds = [step["type"] for step in steps]
        for step in steps:
            if step["type"] == "Replace" and "String" not in step["pattern"]:
                raise UnsupportedModelError(f"a decoder that replaces by a pattern is not supported: {step}")
            if step["type"] == "Strip" and (step["content"] != " " or step["stop"] or "Fuse" not in kinds):
                raise UnsupportedModelError(f"this step of a tokenizer's decoder is not supported: {step}")
        return cls(
            [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"],
            byte_fallback="ByteFallback" in kinds,
            leading_spaces=sum(step["start"] for step in steps if step["type"] == "Strip"),
        )

    def to_bytes(self, token: str) -> bytes:
        """Bytes that the token stands for."""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def spelling_of(backend: Any) -> Spelling:
    """How a tokenizer's decoder, an object of `tokenizers`, reads a token.

    UnsupportedModelError for a decoder of another kind.
    """
    state = backend.decoder.__getstate__() if backend.decoder is not None else '{"type": null}'
    raw: dict[str, Any] = json.loads(state)
    steps: list[dict[str, Any]] = raw["decoders"] if raw["type"] == "Sequence" else [raw]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelSpelling()
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds[:1] == ["Replace"]:
        return SentencePieceSpelling.from_decoder(steps)
    raise UnsupportedModelError(
        f"the tokenizer's decoder {kinds} is not supported; byte-level BPE ('ByteLevel') and SentencePiece "
        "('Replace', 'ByteFallback', 'Fuse', 'Strip') are"
    )
