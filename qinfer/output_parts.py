"""Outputs in parts, for a reader on another thread or in another process: what is new of each, once.

Outputs are cumulative, and to send all of a text again with each of its tokens would cost its square. So the
engine's side cuts from an output what was sent before, and the reader's side joins the rest to what it has.
A part is a plain tuple: there is one for every token.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from qinfer.outputs import CompletionOutput, PromptLogprobs, RequestOutput, RequestStateStats

if TYPE_CHECKING:
    from qinfer.live_request import Ask

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
                copy(output.metrics),  # the engine goes on writing into its own
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


@dataclass
class _Choice:
    """One choice as it grows."""

    cumulative_logprob: float | None
    logprobs: list[Any] | None
    text: str = ""
    coming: list[str] = field(default_factory=list)  # what the text still lacks
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def output(self, index: int) -> CompletionOutput:
        """What it is now."""
        if self.coming:
            self.text += "".join(self.coming)
            self.coming.clear()
        return CompletionOutput(
            index,
            self.text,
            list(self.token_ids),
            self.cumulative_logprob,
            None if self.logprobs is None else list(self.logprobs),
            self.finish_reason,
            self.stop_reason,
        )


class Joiner:
    """What has come of one request's outputs.

    Taking a part costs what is new in it, making an output all that the output holds: so there may be fewer.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        scored = ask.params.logprobs is not None
        self._choices = [
            _Choice(0.0 if scored else None, [] if scored else None) for _ in range(ask.params.n)
        ]
        self._about = About(None, None, None, None, finished=False)

    def add(self, part: Part) -> bool:
        """Takes what has come; returns whether it was the last."""
        changed, about = part
        for index, text, token_ids, cumulative_logprob, logprobs, finish_reason, stop_reason in changed:
            choice = self._choices[index]
            choice.coming.append(text)
            choice.token_ids += token_ids
            choice.cumulative_logprob = cumulative_logprob
            if logprobs is not None:
                assert choice.logprobs is not None
                choice.logprobs += logprobs
            choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
        self._about = about or self._about
        return self._about.finished

    def abort(self) -> None:
        """Ends it with what has come."""
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or "abort"
        self._about = self._about._replace(finished=True)

    def output(self) -> RequestOutput:
        """All that has come; what it holds does not change any more."""
        about = self._about
        return RequestOutput(
            self._ask.request_id,
            self._ask.prompt,
            self._ask.token_ids,
            about.prompt_logprobs,
            [choice.output(index) for index, choice in enumerate(self._choices)],
            about.finished,
            about.metrics,
            about.num_cached_tokens,
            about.embedding,
        )
