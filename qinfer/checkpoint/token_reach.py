"""How few tokens a text can become, from its length alone: so that one far too long is refused at once.

No token of a byte-level or SentencePiece BPE stands for more characters than its name in the vocabulary has:
a letter of a name is one byte there, one character here. So `characters / longest name` bounds the number of
tokens from below, unless characters get lost on the way. Four things lose some and are reckoned with:
composition (NFC: at most 4 code points become one, as no canonical decomposition is longer; ASCII stays as it
is), a replacement by a shorter text, special tokens that swallow the white space beside them (Phi-3's), and
control characters without a token (SmolLM2's). Where anything else could, there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from qinfer.checkpoint.spelling import byte_letters

_COMPOSED = 4  # code points of the longest canonical decomposition
_COMPOSING = frozenset({"NFC", "NFKC"})
# normalizers that never make characters fewer
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_SPLITTING = frozenset(
    {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"}
)
_WHITE_SPACE = (  # Unicode's property, which is what a regex's \s means to the tokenizers library
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True)
class TokenReach:
    """The most characters of a text that a token stands for; 0 where that has no bound.

    `composed`: how many characters may become one in a text that is not all ASCII. `uncounted`: the
    characters of which any number may add no token.
    """

    chars: int
    composed: int = 1
    uncounted: str = ""

    def least_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this."""
        if not self.chars:
            return 0
        size = len(text) - sum(map(text.count, self.uncounted))
        return -(-size // (self.chars if text.isascii() else self.chars * self.composed))


def token_reach(backend: Any, vocab: Collection[str]) -> TokenReach:
    """The reach of a `tokenizers.Tokenizer` whose names of tokens, added ones too, are `vocab`."""
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    splitters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    shrinking, composed = 1, 1
    for step in normalizers:
        if step["type"] in _COMPOSING:
            composed *= _COMPOSED
        elif step["type"] == "Replace" and step["content"] and "String" in step["pattern"]:
            shrinking *= max(1, -(-len(step["pattern"]["String"]) // len(step["content"])))
        elif step["type"] not in _KEEPING:
            return TokenReach(0)
    if any(step["type"] not in _SPLITTING or step.get("behavior") == "Removed" for step in splitters):
        return TokenReach(0)
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    lost = _characters_without_token(backend.model, vocab, byte_level=byte_level)
    if lost is None:
        return TokenReach(0)
    added = backend.get_added_tokens_decoder().values()
    swallowed = _WHITE_SPACE if any(token.lstrip or token.rstrip for token in added) else ""
    uncounted = "".join(sorted({*swallowed, *lost}))
    return TokenReach(max(map(len, vocab)) * shrinking, composed, uncounted)


def _characters_without_token(model: Any, vocab: Collection[str], *, byte_level: bool) -> str | None:
    """ASCII characters that may go without a token; None where others could, or where one may stand for many.

    A character outside of ASCII has a byte in 0x80 ... 0xBF, so it leaves something while those have tokens.
    """
    if type(model).__name__ != "BPE" or not (byte_level or model.byte_fallback):
        return None
    names = byte_letters() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    missing = [byte for byte in range(256) if names[byte] not in vocab]
    if any(0x80 <= byte < 0xC0 for byte in missing) or (missing and not byte_level):
        return None  # without one of its bytes' tokens, byte fallback gives a character up altogether
    return "".join(chr(byte) for byte in missing if byte < 0x80)


def _steps(component: Any, parts: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences within sequences laid out flat."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[parts], *waiting]
        else:
            yield step
