"""Outputs in parts, for a reader in another process: what is new of each, once.

Outputs are cumulative, and to send all of a text again with each of its tokens would cost its square. So the
engine's side cuts from an output what was sent before, and the reader's side joins the rest to what it has.
A part is a plain tuple: there is one for every token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from qinfer.live_request import Ask
from qinfer.outputs import CompletionOutput, PromptLogprobs, RequestOutput, RequestStateStats

# index, text, token ids, cumulative logprob, logprobs, finish reason, stop reason
ChoicePart = tuple[int, str, list[int], float | None, list[Any] | None, str | None, int | str | None]


class About(NamedTuple):
    """What is said with a request's first output and its last."""

    prompt_logprobs: PromptLogprobs | None
    num_cached_tokens: int | None
    metrics: RequestStateStats | None
    embedding: list[float] | None
    finished: bool


Part = tuple[list[ChoicePart], About | None]


class Cutter:
    """What of one request's outputs was sent."""

    def __init__(self) -> None:
        self._sent: list[list[int]] = []  # by choice: tokens, characters, and 1 once it has finished

    def cut(self, output: RequestOutput) -> Part:
        """What `output` adds to those before."""
        about = None
        if not self._sent or output.finished:
            about = About(
                output.prompt_logprobs,
                output.num_cached_tokens,
                output.metrics,
                output.embedding,
                output.finished,
            )
        if not self._sent:
            self._sent = [[0, 0, 0] for _ in output.outputs]
        return [
            self._cut(choice, sent)
            for choice, sent in zip(output.outputs, self._sent, strict=True)
            if not sent[2] and (len(choice.token_ids) > sent[0] or choice.finish_reason is not None)
        ], about

    def _cut(self, choice: CompletionOutput, sent: list[int]) -> ChoicePart:
        tokens, chars, _ = sent
        sent[:] = len(choice.token_ids), len(choice.text), choice.finish_reason is not None
        return (
            choice.index,
            choice.text[chars:],
            list(choice.token_ids[tokens:]),
            choice.cumulative_logprob,
            None if choice.logprobs is None else choice.logprobs[tokens:],
            choice.finish_reason,
            choice.stop_reason,
        )


class Joiner:
    """What has come of one request's outputs."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        scored = ask.params.logprobs is not None
        self._choices = [
            CompletionOutput(i, "", [], 0.0 if scored else None, [] if scored else None)
            for i in range(ask.params.n)
        ]
        self._about = About(None, None, None, None, finished=False)

    def join(self, part: Part) -> RequestOutput:
        """The output that `part` was cut from; what it holds does not change any more."""
        changed, about = part
        for index, text, token_ids, cumulative_logprob, logprobs, finish_reason, stop_reason in changed:
            before = self._choices[index]
            self._choices[index] = CompletionOutput(
                index,
                before.text + text,
                [*before.token_ids, *token_ids],
                cumulative_logprob,
                None if logprobs is None else [*(before.logprobs or ()), *logprobs],
                finish_reason,
                stop_reason,
            )
        self._about = about or self._about
        known = self._about
        return RequestOutput(
            self._ask.request_id,
            self._ask.prompt,
            self._ask.token_ids,
            known.prompt_logprobs,
            list(self._choices),
            known.finished,
            known.metrics,
            known.num_cached_tokens,
            known.embedding,
        )
