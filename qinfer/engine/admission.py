"""What `Engine.add` checks: everything about a request that depends on the model or the pool.

A request that is taken in can be run to its end; nothing about it is left to fail in the middle of a step,
where it would take its neighbours along.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qinfer.engine.bad_words import BadWords
from qinfer.engine.options import StepLimits
from qinfer.engine.request import Request, StopRules
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams

if TYPE_CHECKING:  # a server takes its port before it spends seconds on importing torch
    from qinfer.engine.continuation import Continuation
    from qinfer.tokenizer import Tokenizer


class Admission(NamedTuple):
    """What a model and its engine let in; `capacity` is the pool's, in tokens."""

    limits: StepLimits
    capacity: int
    vocab_size: int
    max_logprobs: int
    policy: str
    tokenizer: Tokenizer | None
    bad_words: BadWords

    def request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        continuation: Continuation | None,
    ) -> Request:
        """A request that can be run; UserError where it cannot be."""
        check_priority(priority, self.policy)
        ids = check_prompt(prompt_token_ids, self.vocab_size)
        check_fits(len(ids), self.limits, self.capacity, room=continuation is None)
        check_params(params, self.vocab_size, self.max_logprobs, has_tokenizer=self.tokenizer is not None)
        request = Request(request_id, ids, params, self._rules(params, len(ids)))
        request.bad_words = self.bad_words.of(params)
        _check_choice(request)
        request.priority, request.continuation = priority, continuation
        return request

    def _rules(self, params: SamplingParams, num_prompt: int) -> StopRules:
        ends = frozenset() if params.ignore_eos or self.tokenizer is None else self.tokenizer.eos_token_ids
        room = self.limits.max_model_len - num_prompt
        return StopRules(
            frozenset(end for end in ends if end < self.vocab_size),  # the tokenizer may know more
            frozenset(params.stop_token_ids or ()),
            params.min_tokens,
            room if params.max_tokens is None else min(params.max_tokens, room),
            params.repetition_detection,
        )


def check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The prompt as plain ints; UserError where it is empty or names tokens that do not exist."""
    if isinstance(prompt_token_ids, bytes | bytearray | memoryview):  # a sequence of ints, but meant as text
        raise UserError("the prompt is bytes: decode it, since a prompt is text or token ids", "prompt")
    try:
        ids = [operator.index(token) for token in prompt_token_ids]
    except TypeError:
        raise UserError("the prompt's token ids must be whole numbers", "prompt") from None
    if not ids:
        raise UserError("the prompt is empty: at least one token is needed", "prompt")
    _check_ids(ids, vocab_size, "prompt")
    return ids


def check_text(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """UserError for a text that is too long by its characters alone: not worth the seconds of encoding."""
    if (least := tokenizer.least_tokens(text)) >= max_model_len:
        raise UserError(
            f"the maximum context length is {max_model_len} tokens and the prompt has at least {least}: "
            "shorten it so that at least one token can follow",
            "prompt",
        )


def check_fits(num_prompt: int, limits: StepLimits, capacity: int, *, room: int = 1) -> None:
    """UserError for a prompt that leaves no room for `room` tokens, or that the pool never holds."""
    if num_prompt + room > limits.max_model_len:
        raise UserError(
            f"the maximum context length is {limits.max_model_len} tokens and the prompt has {num_prompt}: "
            "shorten it so that at least one token can follow",
            "prompt",
        )
    if num_prompt > capacity:
        raise UserError(
            f"the prompt has {num_prompt} tokens and the KV cache holds {capacity}: shorten it, or give the "
            "engine more memory",
            "prompt",
        )


def check_priority(priority: int, policy: str) -> None:
    """UserError for a priority that the engine does not obey."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise UserError(f"priority must be a whole number, not {priority!r:.100}", "priority")
    if priority and policy != "priority":
        raise UserError(
            f"priority is {priority}, and this engine runs requests in order of arrival: leave it out, or "
            "start with scheduling_policy='priority' (--scheduling-policy priority)",
            "priority",
        )


def check_params(params: SamplingParams, vocab_size: int, max_logprobs: int, *, has_tokenizer: bool) -> None:
    """UserError for parameters that this model or engine cannot obey."""
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and max_logprobs >= 0 and not 0 <= wanted <= max_logprobs:
            raise UserError(
                f"{name} is {'the whole vocabulary' if wanted < 0 else wanted}, more than max_logprobs "
                f"{max_logprobs}: ask for fewer or raise the engine's max_logprobs",
                name,
            )
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        _check_ids(getattr(params, name) or (), vocab_size, name)
    if not has_tokenizer:
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise UserError(f"{name} needs a tokenizer, and this engine has none", name)


def _check_choice(request: Request) -> None:
    """UserError where the request's own rules leave nothing to choose."""
    allowed, rules = request.params.allowed_token_ids, request.rules
    if allowed is None:
        return
    blocked = {word[-1] for word in request.bad_words} | (rules.blocked_ids if rules.min_tokens else set())
    if blocked.issuperset(allowed):
        raise UserError(
            "min_tokens and bad_words may forbid every token in allowed_token_ids: allow another",
            "allowed_token_ids",
        )


def _check_ids(ids: Iterable[int], vocab_size: int, parameter: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{parameter} has the token id {token}; the vocabulary's ids are 0 to {vocab_size - 1}",
                parameter,
            )
