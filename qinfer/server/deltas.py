"""What is new in a choice since the client last heard of it.

The engine's outputs are cumulative; a `Progress` per choice remembers what was sent and takes the rest. An
answer that is not streamed is one delta from nothing, so both kinds go through the same code and cannot
differ. Tokens whose text is still held back (half a character, a possible stop string) wait with their
logprobs for the chunk that shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qinfer.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput
from qinfer.server.wire import Usage


class Delta(NamedTuple):
    """One chunk's worth of a choice."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[LogprobsOnePosition] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class Progress:
    """How much of one choice was sent: characters and tokens; `interval` is the least tokens of a chunk."""

    interval: int = 1
    num_chars: int = 0
    num_tokens: int = 0
    finished: bool = False

    def take(self, output: CompletionOutput) -> Delta | None:
        """The part of `output` that was not sent, or None when there is nothing to show yet."""
        if self.finished:
            return None
        text = output.text[self.num_chars :]
        tokens = output.token_ids[self.num_tokens :]
        if output.finish_reason is None:
            too_few = self.num_tokens > 0 and len(tokens) < self.interval
            if not text or too_few:
                return None
        logprobs = None if output.logprobs is None else output.logprobs[self.num_tokens :]
        self.num_chars = len(output.text)
        self.num_tokens = len(output.token_ids)
        self.finished = output.finish_reason is not None
        return Delta(text, tokens, logprobs, output.finish_reason, output.stop_reason)


def usage_of(outputs: Sequence[RequestOutput], *, generated: bool = True) -> Usage:
    """Token counts over all prompts and choices; without `generated`, what was generated does not count."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    completion = (
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs) if generated else 0
    )
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": cached},
    )
