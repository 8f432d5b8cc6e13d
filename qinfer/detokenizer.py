"""From token ids back to text, a little at a time: UTF-8 safe, and with stop strings held back.

The text of a growing sequence is not the concatenation of its tokens' texts: a character may span several
tokens, a SentencePiece decoder drops one space at the very beginning, special tokens may be hidden. But the
*bytes* do concatenate. So a `Detokenizer` feeds each token's bytes to an incremental UTF-8 decoder, which
keeps an unfinished character to itself: constant work per token, and nothing is ever decoded twice.

The prompt matters in two ways only. Where its last character is unfinished, the decoder starts with those
bytes, so that a generated token can complete it, and what the prompt alone shows is never given out. And
where it shows any text at all, the leading space of the first generated token is a real one.

Stop strings are matched on the text, not on tokens. Only text that may still grow into a stop string is held
back: the longest end of it that begins one. The match that is complete first wins, and of two that end
together the longer, so the result does not depend on how the text was cut into tokens or steps.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character that lacks its last


class TokenBytes(Protocol):
    """What a detokenizer needs to know of a tokenizer."""

    special_ids: frozenset[int]
    leading_spaces: int

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token contributes to the text."""
        ...

    def token_str(self, token_id: int) -> str:
        """The token's own text."""
        ...


class Detokenizer:
    """Text of one output sequence.

    `text` is all that may be shown so far; `stop_reason` the stop string that ended it, else None;
    `num_stop_tokens` the tokens taken, up to and including the one that completed the stop string.
    A stop string counts only when a token after the first `min_tokens` completes it. `stop` also matches a
    special token of that spelling while special tokens are hidden. No decoder that is supported puts spaces
    between special tokens, so `spaces_between_special_tokens` has nothing to change.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self.stop_reason: str | None = None
        self.num_stop_tokens = 0
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._utf8.decode(self._last_bytes(prompt_token_ids))
        self._prompt_is_unfinished = bool(self._utf8.getstate()[0])
        shows_text = any(self._bytes(token_id) for token_id in prompt_token_ids)
        self._spaces_to_drop = 0 if shows_text else tokenizer.leading_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text they make visible; "" after a stop string."""
        before = len(self.text)
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_stop_tokens += 1
            if token_id in self._hidden:
                self._stop_at_special(self._tokenizer.token_str(token_id))
            else:
                self._take(self._decode(self._tokenizer.token_bytes(token_id)))
        return self.text[before:]

    def finish(self) -> str:
        """Returns what was held back: no more tokens will come. An unfinished character becomes U+FFFD."""
        if self.stop_reason is not None:
            return ""
        rest = self._held + self._decode(b"", final=True)
        self._held = ""
        self.text += rest
        return rest

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _LONGEST_UNFINISHED:
                break
        return tail

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if text and self._prompt_is_unfinished:
            # either the character is complete now, or its ruin was already to be seen in the prompt
            self._prompt_is_unfinished = False
            text = text.removeprefix(_REPLACEMENT)
        while text and self._spaces_to_drop:
            self._spaces_to_drop = self._spaces_to_drop - 1 if text[0] == " " else 0
            text = text.removeprefix(" ")
        return text

    def _take(self, text: str) -> None:
        text = self._held + text
        found = self._find_stop(text) if self.num_stop_tokens > self._min_tokens else None
        if found is not None:
            start, stop = found
            self._end(text[:start], stop)
            return
        cut = len(text) - self._num_held(text)
        self.text += text[:cut]
        self._held = text[cut:]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the match that is complete first; of those the longest."""
        matches = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start, stop) for start, stop in matches if start >= 0]
        return min(found)[1:] if found else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _stop_at_special(self, spelling: str) -> None:
        if spelling in self._stop and self.num_stop_tokens > self._min_tokens:
            self._end(self._held + self._decode(b"", final=True), spelling)

    def _end(self, text: str, stop: str) -> None:
        self.text += text + stop if self._include_stop else text
        self._held = ""
        self.stop_reason = stop
