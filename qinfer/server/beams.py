"""Beam search for the OpenAI routes: many small requests to the engine, one output with `n` choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from qinfer.beam_search import MAX_LENGTH_PENALTY, Beam, BeamSearch
from qinfer.detokenizer import Detokenizer
from qinfer.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput
from qinfer.param_checks import check_real
from qinfer.sampling_params import SamplingParams
from qinfer.server.errors import ApiError
from qinfer.server.protocol import GenerationRequest
from qinfer.server.state import ServerState
from qinfer.server.streaming import merge

# what a search would have to obey at every step, and does not
_MEANINGLESS = (
    *("stop", "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "logit_bias"),
    *("structured_outputs", "prompt_logprobs", "presence_penalty", "frequency_penalty"),
)


def _check(request: GenerationRequest, params: SamplingParams) -> None:
    """ApiError for a field that beam search does not obey, UserError for one out of range."""
    for name in _MEANINGLESS:
        if getattr(params, name):
            raise ApiError(400, f"{name} means nothing in beam search: leave it out", name)
    if request.length_penalty is not None:
        check_real("length_penalty", request.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if getattr(request, "echo", False):
        raise ApiError(400, "echo means nothing in beam search: leave it out", "echo")


async def search(
    state: ServerState,
    request: GenerationRequest,
    token_ids: list[int],
    params: SamplingParams,
    request_id: str,
) -> AsyncGenerator[RequestOutput, None]:
    """One output, whose choices are the best beams; raises as `AsyncLLM.generate`."""
    _check(request, params)
    engine, width = state.engine, request.n or 1
    room = engine.max_model_len - len(token_ids)
    ends = frozenset() if params.ignore_eos else engine.tokenizer.eos_token_ids
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    found = BeamSearch(token_ids, width, params.max_tokens or room, eos_ids=ends, length_penalty=penalty)
    while found.live:
        step = len(found.live[0].token_ids)
        sources = [
            engine.generate(
                beam.token_ids, found.step_params, f"{request_id}-{step}-{i}", cache_salt=request.cache_salt
            )
            for i, beam in enumerate(found.live)
        ]
        entries: dict[int, LogprobsOnePosition] = {}
        async with aclosing(merge(sources)) as merged:
            async for index, output in merged:
                if output.outputs[0].finish_reason == "error":
                    raise ApiError(500, "the model's logits are not numbers")
                entries[index] = (output.outputs[0].logprobs or [])[0]
        found.advance([entries[i] for i in range(len(sources))])
    choices = [_choice(state, found, i, beam, params) for i, beam in enumerate(found.best())]
    yield RequestOutput(request_id, None, token_ids, None, choices, True)


def _choice(
    state: ServerState, found: BeamSearch, index: int, beam: Beam, params: SamplingParams
) -> CompletionOutput:
    prompt, said = found.prompt_ids, beam.token_ids[len(found.prompt_ids) :]
    text = Detokenizer(state.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
    hidden = beam.finish_reason == "stop" and not params.include_stop_str_in_output
    text.push(said[:-1] if hidden else said)
    text.finish()
    logprobs = None
    if params.logprobs is not None:
        logprobs = [_likeliest(entries, params.logprobs) for entries in beam.logprobs]
    return CompletionOutput(
        index, text.text, said, beam.cum_logprob, logprobs, finish_reason=beam.finish_reason
    )


def _likeliest(entries: LogprobsOnePosition, count: int) -> LogprobsOnePosition:
    """The chosen one, which is first, and the `count` likeliest."""
    chosen = next(iter(entries))
    return {
        token: entry
        for token, entry in entries.items()
        if token == chosen or (entry.rank is not None and entry.rank <= count)
    }
