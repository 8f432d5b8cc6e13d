"""What an `LLM` does beside answering: vectors of texts, and beam search; with vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qinfer.beam_search import MAX_LENGTH_PENALTY, Beam, BeamSearch
from qinfer.detokenizer import Detokenizer
from qinfer.engine.continuation import Continuation
from qinfer.engine.pooling import pooling_of
from qinfer.errors import UserError
from qinfer.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    SampleLogprobs,
    ScoringOutput,
    ScoringRequestOutput,
)
from qinfer.param_checks import check_real, check_whole
from qinfer.progress import Progress
from qinfer.sampling_params import MAX_COUNT, SamplingParams

if TYPE_CHECKING:
    from qinfer.llm import LLM

MAX_BEAMS = 64


@dataclass
class BeamSearchParams:
    """How wide and how far to search; raises UserError where a field is out of range."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # log-probabilities are the model's own at any
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    allowed_token_ids: None = None

    def __post_init__(self) -> None:
        check_whole("beam_width", self.beam_width, 1, MAX_BEAMS)
        check_whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_real("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        for name in ("structured_outputs", "allowed_token_ids"):
            if getattr(self, name) is not None:
                raise NotImplementedError(f"qinfer does not have BeamSearchParams({name}=...)")


@dataclass
class BeamSearchSequence:
    """One beam; `tokens` with the prompt, `text` without."""

    tokens: list[int]
    logprobs: SampleLogprobs
    cum_logprob: float
    text: str | None
    finish_reason: str
    stop_reason: None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def embed(llm: LLM, prompts: Sequence[Any], use_tqdm: Progress) -> list[EmbeddingRequestOutput]:
    """A vector for each prompt, pooled as the model's folder says."""
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    outputs = llm.run(prompts, params, use_tqdm, pooling=pooling_of(llm.path))
    found = []
    for output in outputs:
        assert output.embedding is not None, "it was pooled"
        vector = EmbeddingOutput(output.embedding)
        found.append(EmbeddingRequestOutput(output.request_id, vector, output.prompt_token_ids))
    return found


def score(
    llm: LLM, firsts: Sequence[Any], seconds: Sequence[Any], use_tqdm: Progress
) -> list[ScoringRequestOutput]:
    """Log-probabilities of the second texts, each after its first one or after the only one."""
    if len(firsts) == 1:
        firsts = list(firsts) * len(seconds)
    if len(firsts) != len(seconds):
        raise UserError(
            f"{len(firsts)} of data_1 and {len(seconds)} of data_2: give one of the first, or as many",
            "data_2",
        )
    pairs = [_pair(llm, first, second) for first, second in zip(firsts, seconds, strict=True)]
    continuations = [Continuation(said) for _, said in pairs]
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    prompts = [[*before, *said[:-1]] for before, said in pairs]
    outputs = llm.run(prompts, params, use_tqdm, continuations=continuations)
    return [
        ScoringRequestOutput(output.request_id, ScoringOutput(sum(one.logprobs)), [*before, *said])
        for output, one, (before, said) in zip(outputs, continuations, pairs, strict=True)
    ]


def _pair(llm: LLM, first: Any, second: Any) -> tuple[list[int], list[int]]:
    """Tokens of the first, and of the second after it; a token that spans both is the second's."""
    if isinstance(first, str) and isinstance(second, str):
        encode = llm.get_tokenizer().encode
        alone, whole = encode(first), encode(first + second)
        same = next((i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
        before, said = whole[:same], whole[same:]
    elif isinstance(first, str) or isinstance(second, str):
        raise UserError("data_1 and data_2 must both be texts, or both lists of token ids", "data_2")
    else:
        before, said = list(first), list(second)
    if first and not before:
        raise UserError(
            f"data_1 {first!r} is part of the first token of both together: give lists of token ids", "data_1"
        )
    for name, ids in (("data_1", before), ("data_2", said)):
        if not ids:
            raise UserError(f"{name} is empty: each needs at least one token", name)
    return before, said


def beam_search(
    llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams, use_tqdm: Progress
) -> list[BeamSearchOutput]:
    """Searches all prompts side by side, a token at a time."""
    ends = frozenset() if params.ignore_eos or llm.tokenizer is None else llm.tokenizer.eos_token_ids
    searches = []
    for ids in prompts:
        room = llm.engine.limits.max_model_len - len(ids)
        if room < 1:
            raise UserError(f"the prompt has {len(ids)} tokens, which leave no room for another", "prompt")
        length, penalty = min(params.max_tokens, room), params.length_penalty
        searches.append(BeamSearch(ids, params.beam_width, length, eos_ids=ends, length_penalty=penalty))
    while live := [(search, beam) for search in searches for beam in search.live]:
        asked = [beam.token_ids for _, beam in live]
        outputs = llm.run(asked, searches[0].step_params, use_tqdm)
        found = iter([(output.outputs[0].logprobs or [])[0] for output in outputs])
        for search in searches:
            if search.live:
                search.advance([next(found) for _ in search.live])
    return [
        BeamSearchOutput([_sequence(llm, search, beam, params) for beam in search.best()])
        for search in searches
    ]


def _sequence(llm: LLM, search: BeamSearch, beam: Beam, params: BeamSearchParams) -> BeamSearchSequence:
    text = None
    if llm.tokenizer is not None:
        hidden = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        said = beam.token_ids[len(search.prompt_ids) : len(beam.token_ids) - hidden]
        reader = Detokenizer(llm.tokenizer, search.prompt_ids, skip_special_tokens=params.skip_special_tokens)
        reader.push(said)
        reader.finish()
        text = reader.text
    return BeamSearchSequence(beam.token_ids, beam.logprobs, beam.cum_logprob, text, beam.finish_reason)
