"""What comes back from a request: vLLM's names and shapes.

Content is cumulative: every `RequestOutput` of a request holds all text and ids so far, and lists in it are
never changed afterwards, so that another thread may keep reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """Natural log-probability of one token under the model's own logits; rank counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]  # the chosen token comes first
SampleLogprobs = list[LogprobsOnePosition]
PromptLogprobs = list[LogprobsOnePosition | None]  # the first entry is None: nothing precedes it


@dataclass
class RequestStateStats:
    """When things happened to a request: `arrival_time` in wall-clock, `*_ts` in monotonic seconds."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class CompletionOutput:
    """One of a request's `n` continuations."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error", "repetition"; None while it runs
    stop_reason: int | str | None = None  # the stop id or string; None for the end-of-sequence token
    lora_request: None = None

    def finished(self) -> bool:
        """Whether nothing more will be added."""
        return self.finish_reason is not None


@dataclass(init=False)
class RequestOutput:
    """A request with its prompt and all that was generated so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    embedding: list[float] | None = None
    kv_transfer_params: None = field(default=None)

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        num_cached_tokens: int | None = None,
        embedding: list[float] | None = None,
        **unknown: Any,  # accepted and ignored, as users of vLLM expect
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.num_cached_tokens = num_cached_tokens
        self.embedding = embedding


@dataclass
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """A text's tokens and vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class ScoringOutput:
    """How likely a text is after another: the sum of its tokens' log-probabilities, in nats."""

    score: float


@dataclass
class ScoringRequestOutput:
    """A pair's score, with the tokens of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
