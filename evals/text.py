"""Held-out text as windows of token ids, the same for every model that is compared.

The default text is the evaluation side of `qinfer.corpus`, which calibration never sees. For a model with a
chat template every second document is put through it (the title as the user's turn, the prose as the
answer), because that is what will be served; the rest is raw. A text of the user's own is taken raw.

Windows follow one another without overlap and without padding; the last may be shorter. When the tokenizer
adds a beginning-of-sequence token each raw window starts with exactly one, which counts towards its length;
otherwise there is none. A conversation gets what its template writes and nothing else; where it is longer
than a window its later pieces follow the rule of raw windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from qinfer.corpus import reference_text

if TYPE_CHECKING:
    from qinfer.tokenizer import Tokenizer


class Window(NamedTuple):
    """Token ids that are fed to every model as one sequence of their own."""

    token_ids: tuple[int, ...]
    kind: Literal["raw", "chat"]


def text_windows(tokenizer: Tokenizer, text: str, length: int) -> Iterator[Window]:
    """Consecutive raw windows of at most `length` tokens, a beginning-of-sequence token included."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return _cut(tokenizer, token_ids, length, "raw")


def reference_windows(tokenizer: Tokenizer, length: int) -> Iterator[Window]:
    """Windows of the built-in held-out text: raw and, where there is a template, chat in turn."""
    documents = reference_text("evaluation")
    if not tokenizer.has_chat_template:
        yield from text_windows(tokenizer, "\n\n".join(documents), length)
        return
    raw = text_windows(tokenizer, "\n\n".join(documents[::2]), length)
    chat = _chat_windows(tokenizer, documents[1::2], length)
    yield from (window for window in chain.from_iterable(zip_longest(raw, chat)) if window is not None)


def first_tokens(windows: Iterable[Window], num_tokens: int) -> list[Window]:
    """The first windows with `num_tokens` in all, the last one shortened; fewer where the text ends."""
    taken: list[Window] = []
    left = num_tokens
    for window in windows:
        if left < 2:  # one token has no next token to score
            break
        taken.append(window._replace(token_ids=window.token_ids[:left]))
        left -= len(taken[-1].token_ids)
    return taken


def data_hash(windows: Sequence[Window]) -> str:
    """SHA-256 (hex) of the windows' lengths and token ids: equal for equal input to the models."""
    digest = sha256()
    for window in windows:
        digest.update(np.array([len(window.token_ids), *window.token_ids], dtype="<i8").tobytes())
    return digest.hexdigest()


def _chat_windows(tokenizer: Tokenizer, documents: Sequence[str], length: int) -> Iterator[Window]:
    """Conversations of one or more questions and answers, each long enough to fill a window, cut to size."""
    messages: list[dict[str, str]] = []
    for i, document in enumerate(documents):
        title, _, body = document.partition("\n\n")
        messages += [{"role": "user", "content": title}, {"role": "assistant", "content": body}]
        token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        if len(token_ids) >= length or i == len(documents) - 1:
            yield Window(tuple(token_ids[:length]), "chat")
            yield from _cut(tokenizer, token_ids[length:], length, "chat")
            messages = []


def _cut(
    tokenizer: Tokenizer, token_ids: Sequence[int], length: int, kind: Literal["raw", "chat"]
) -> Iterator[Window]:
    start = () if not tokenizer.adds_bos or tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    size = length - len(start)
    for begin in range(0, len(token_ids), size):
        window = (*start, *token_ids[begin : begin + size])
        if len(window) >= 2:
            yield Window(window, kind)
