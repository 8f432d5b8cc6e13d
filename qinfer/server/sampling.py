"""From a request's fields to `SamplingParams`: request, then the server's defaults, then OpenAI's.

The server's defaults are those in which the model's `get_default_sampling_params` (from
generation_config.json) differs from a plain `SamplingParams`. A `max_tokens` beyond the context is cut to
what is left of it, so that no client runs a request for hours by a large number; a prompt that leaves no
room for one token is refused with both lengths.
"""

from __future__ import annotations

from typing import Any

from qinfer.sampling_params import SamplingParams
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.errors import ApiError
from qinfer.server.forms import blamed_on
from qinfer.server.protocol import CompletionRequest, GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, and SamplingParams' own
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "stream_interval",
)


def completion_params(request: CompletionRequest, defaults: SamplingParams, *, room: int) -> SamplingParams:
    """What /v1/completions asks for; `room` is what the prompt leaves of the context, in tokens.

    `echo` with `max_tokens` 0 scores the prompt: one token is generated, for the route to drop. Raises
    UserError, or ApiError where nothing fits.
    """
    given = _given(request, defaults)
    wanted = request.max_tokens
    if wanted is None:
        wanted = given.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    elif wanted == 0 and request.echo:
        wanted = 1
    given["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    return _fitted({**given, "max_tokens": wanted}, room)


def chat_params(request: ChatRequest, defaults: SamplingParams, *, room: int) -> SamplingParams:
    """What /v1/chat/completions asks for; without a limit the answer may fill the context."""
    given = _given(request, defaults)
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if wanted is None:
        wanted = given.get("max_tokens")
    given["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return _fitted({**given, "max_tokens": wanted}, room)


def check_room(num_prompt_tokens: int, max_model_len: int, *, at_least: bool = False) -> int:
    """Tokens that the prompt leaves for the answer; raises ApiError where that is none.

    `at_least`: the prompt's tokens are not counted yet, and may be more.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        has = f"at least {num_prompt_tokens}" if at_least else f"{num_prompt_tokens}"
        raise ApiError(
            400,
            f"this model's maximum context length is {max_model_len} tokens and the prompt has {has}: "
            "at least one must be left for the answer; shorten the prompt",
            "input_tokens",
        )
    return room


def _given(request: GenerationRequest, defaults: SamplingParams) -> dict[str, Any]:
    given = defaults.chosen()
    for name in _SAME_NAME:
        if (value := getattr(request, name)) is not None:
            given[name] = value
    with blamed_on(request):
        given["structured_outputs"] = request.form()
    if request.use_beam_search:
        given["n"] = 1  # the width of the search, and not of one request
    return given


def _fitted(values: dict[str, Any], room: int) -> SamplingParams:
    params = SamplingParams.from_optional(**values)  # checks what was asked for, before it is cut
    if params.max_tokens is not None and params.max_tokens > room:
        params = SamplingParams.from_optional(**{**values, "max_tokens": room})
    return params
