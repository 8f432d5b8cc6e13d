"""A request and its sequences, in ids and counts: what is known before any tensor exists. No torch.

A `Request` is what a user sent; each of its `n` continuations is a `Sequence`, which the scheduler treats on
its own. A sequence is its token ids, prompt and output in one list, and how many of them have been computed,
that is: have their K and V in its pages, or will have after the steps that are under way. Those steps may add
tokens that nobody has seen yet; they are only counted. Preempting a sequence means forgetting the pages and
the count of what is computed, nothing else; its tokens and text stay, and what is recomputed later is the
same list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from qinfer.outputs import CompletionOutput, Logprob, PromptLogprobs, RequestOutput, RequestStateStats
from qinfer.sampling_params import RepetitionDetectionParams, SamplingParams

if TYPE_CHECKING:
    from qinfer.engine.continuation import Continuation
    from qinfer.engine.pooling import Pool
    from qinfer.engine.structured import Constraint


class StopRules(NamedTuple):
    """When a sequence ends, by ids and counts; stop strings are the detokenizer's business."""

    eos_ids: frozenset[int]  # empty where they are to be ignored
    stop_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    repetition: RepetitionDetectionParams | None = None

    @property
    def blocked_ids(self) -> frozenset[int]:
        """Ids that may not be chosen before min_tokens."""
        return self.eos_ids | self.stop_ids


@dataclass(eq=False)
class Request:
    """One call: prompt, parameters and when things happened."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    rules: StopRules
    prompt: str | None = None
    salt: str = ""
    priority: int = 0  # the smaller, the sooner
    bad_words: tuple[tuple[int, ...], ...] = ()
    metrics: RequestStateStats = field(default_factory=RequestStateStats)
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None until admitted
    prompt_logprobs: PromptLogprobs = field(default_factory=lambda: [None])
    sequences: list[Sequence] = field(default_factory=list)
    pool: Pool | None = None  # where a vector is wanted, and no answer
    continuation: Continuation | None = None  # where the prompt's own end is to be scored, and no answer

    def __post_init__(self) -> None:
        p = self.params
        # temperature, top_k, top_p, min_p; None: greedy
        self.draws_by = None if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)

    @property
    def finished(self) -> bool:
        """Whether all its sequences have ended."""
        return all(seq.finish_reason is not None for seq in self.sequences)

    @property
    def looks_back(self) -> bool:
        """Whether what a sequence may say next, or shows of it, takes more than a draw from its logits.

        Then a step is booked before the next is planned.
        """
        p = self.params
        plain = p.repetition_penalty == 1.0 and p.frequency_penalty == p.presence_penalty == 0.0
        limited = self.bad_words or p.logit_bias or p.allowed_token_ids is not None
        limited = limited or p.structured_outputs is not None
        asks = p.logprobs is not None or p.prompt_logprobs is not None
        return not plain or bool(limited) or asks or self.pool is not None or self.continuation is not None

    @property
    def lacks_prompt_rows(self) -> bool:
        """Whether prompt positions remain that are to be pooled or scored."""
        if self.continuation is not None:
            return self.continuation.num_missing > 0
        if self.pool is not None:
            return self.pool.num_rows < len(self.prompt_ids)
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_ids)

    def output(self) -> RequestOutput:
        """All that the request has so far, as its user sees it."""
        outputs = [seq.completion() for seq in self.sequences]
        finished = None not in [choice.finish_reason for choice in outputs]
        return RequestOutput(  # by position: there is one for every token
            self.request_id,
            self.prompt,
            self.prompt_ids,
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            outputs,
            finished,
            self.metrics,
            self.num_cached,
            self.pool.vector() if finished and self.pool is not None else None,
        )


@dataclass(eq=False)
class Sequence:
    """One continuation of a request."""

    seq_id: int  # grows with arrival: the smaller, the earlier
    request: Request
    index: int  # which of the request's n
    seed: int
    token_ids: list[int]  # prompt and output
    num_computed: int = 0
    num_pending: int = 0  # tokens that steps under way will add
    lane: int = -1  # the runner's place for it, while it runs
    pages: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)  # of full pages, as far as they were needed
    num_published: int = 0  # leading pages that the prefix cache knows
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    constraint: Constraint | None = None  # its place in the grammar that binds it

    def __post_init__(self) -> None:
        rules = self.request.rules
        self.max_length = len(self.request.prompt_ids) + rules.max_tokens
        self.ends = rules.blocked_ids

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        """Tokens that were generated and are known."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose K and V have not been computed; at least one while the sequence lives."""
        return self.length - self.num_computed

    @property
    def length(self) -> int:
        """Tokens, those included that steps under way will add."""
        return len(self.token_ids) + self.num_pending

    @property
    def looks_back(self) -> bool:
        """As the request does, or because some tokens may not end it yet."""
        rules = self.request.rules
        early = self.num_output + self.num_pending <= rules.min_tokens and bool(rules.blocked_ids)
        return early or self.request.looks_back

    @property
    def scores_prompt(self) -> bool:
        """Whether rows of its prompt have to be computed, for prompt_logprobs, pooling or scoring."""
        return self.index == 0 and self.request.lacks_prompt_rows

    @property
    def first_scored(self) -> int:
        """The first row of the prompt that is to be scored or pooled, where there is one."""
        continuation = self.request.continuation
        return 0 if continuation is None else self.num_prompt - len(continuation.token_ids)

    @property
    def num_cacheable(self) -> int:
        """Leading tokens that need not be computed where the prefix cache has them; the last one must."""
        return self.first_scored if self.scores_prompt else len(self.token_ids) - 1

    def append(self, token_id: int) -> None:
        """Takes the next token and ends the sequence where the rules say so."""
        self.token_ids.append(token_id)
        longest = len(self.token_ids) >= self.max_length
        if longest or token_id in self.ends or self.request.rules.repetition is not None:
            self._end_by_rules(token_id)

    def _end_by_rules(self, token_id: int) -> None:
        rules, count = self.request.rules, self.num_output
        if count >= rules.min_tokens and token_id in rules.eos_ids:
            self.finish_reason = "stop"
        elif count >= rules.min_tokens and token_id in rules.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif count >= rules.max_tokens:
            self.finish_reason = "length"
        elif rules.repetition is not None and rules.repetition.found_in(self.token_ids[self.num_prompt :]):
            self.finish_reason = "repetition"

    def completion(self) -> CompletionOutput:
        """What was generated so far; later tokens do not change it."""
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            self.index,
            self.text,
            self.token_ids[len(self.request.prompt_ids) :],
            self.cumulative_logprob if wanted else None,
            list(self.logprobs) if wanted else None,
            self.finish_reason,
            self.stop_reason,
        )

    def rewind(self) -> None:
        """Forgets what was computed; the pages must have been released."""
        self.num_computed = self.num_published = 0
        self.pages = []
        if self.scores_prompt:
            self.request.prompt_logprobs = [None]
            for collector in (self.request.pool, self.request.continuation):
                if collector is not None:
                    collector.restart()
