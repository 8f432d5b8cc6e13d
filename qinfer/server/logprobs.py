"""Logprobs in OpenAI's two shapes.

/v1/completions has four parallel lists. `text_offset[i]` is where token i begins in the choice's text, which
from there on begins with `tokens[i]` wherever a token is whole characters; tokens of half a character share
the offset where that character begins. Offsets run on over the chunks of a stream and, with `echo`, over the
prompt. A token's name is its text, or `token_id:123` where the client asked for ids (texts of half characters
collide as keys). /v1/chat/completions has one object per token with its exact bytes.

Minus infinity, a token that may not be chosen, is no JSON: it is written as -9999.0, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qinfer.detokenizer import Detokenizer
from qinfer.outputs import Logprob, LogprobsOnePosition, PromptLogprobs
from qinfer.server.wire import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from qinfer.tokenizer import Tokenizer

FLOOR = -9999.0


class CompletionLogprobWriter:
    """Writes the lists of one choice, chunk by chunk; `skip_special_tokens` is that of the text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool, as_ids: bool
    ) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._text = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])

    @property
    def text(self) -> str:
        """What the tokens written so far spell."""
        return self._text.text

    def add(self, token_ids: Sequence[int], logprobs: Sequence[LogprobsOnePosition | None]) -> None:
        """Appends tokens; None in `logprobs` is the first token of an echoed prompt: nothing precedes it."""
        for token, entries in zip(token_ids, logprobs, strict=True):
            self._result.text_offset.append(self._push(token))
            self._result.tokens.append(self._name(token))
            self._result.token_logprobs.append(None if entries is None else floored(entries[token]))
            self._result.top_logprobs.append(None if entries is None else self._top(entries))

    def take(self) -> CompletionLogprobs:
        """What was added since the last call."""
        result = self._result
        self._result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        return result

    def _push(self, token: int) -> int:
        """Where its text begins: behind half a character that it has ended without completing it."""
        before, own = len(self._text.text), self._tokenizer.token_str(token)
        after = before + len(self._text.push([token]))
        return max(before, after - len(own)) if self._text.text.endswith(own) else before

    def _top(self, entries: LogprobsOnePosition) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, entry in entries.items():  # the chosen one is first and keeps its place
            top.setdefault(self._name(token), floored(entry))
        return top

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_str(token)


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[LogprobsOnePosition],
    *,
    num_top: int,
    as_ids: bool,
) -> ChatLogprobs:
    """One entry per token with the `num_top` likeliest beside it, likeliest first."""

    def named(token: int, entry: Logprob) -> dict[str, Any]:
        name = f"token_id:{token}" if as_ids else tokenizer.token_str(token)
        return {"token": name, "logprob": floored(entry), "bytes": list(tokenizer.token_bytes(token))}

    content = []
    for token, entries in zip(token_ids, logprobs, strict=True):
        ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]
        top = [TopLogprob(**named(*item)) for item in ranked]
        content.append(TokenLogprob(**named(token, entries[token]), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_logprobs(logprobs: PromptLogprobs) -> list[dict[int, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per token the entries by id, null for the first."""
    return [None if entries is None else _by_id(entries) for entries in logprobs]


def _by_id(entries: Mapping[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {
        token: {"logprob": floored(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in entries.items()
    }


def floored(entry: Logprob) -> float:
    """The log-probability with minus infinity written as FLOOR."""
    return max(entry.logprob, FLOOR)
