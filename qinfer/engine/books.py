"""What is noted of a token once it is known: counters, stamps, log-probabilities, text.

None of it is needed to plan or run the next step, so on a GPU it is done while that one runs.
"""

from __future__ import annotations

import time

from qinfer.detokenizer import Detokenizer
from qinfer.engine.options import StepCounts
from qinfer.engine.request import Request, Sequence
from qinfer.engine.sampler import Sampled
from qinfer.engine.steps import Step
from qinfer.tokenizer import Tokenizer


class Books:
    """Counters of all requests, and the growing texts of those that run."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer there is no text."""
        self.prompt_tokens = 0  # of requests whose prompt has been computed
        self.cached_tokens = 0  # of those, taken from the prefix cache
        self.generation_tokens = 0
        self.last_step = StepCounts()
        self._tokenizer = tokenizer
        self._detokenizers: dict[int, Detokenizer] = {}

    def count(self, step: Step) -> None:
        """Notes what a step has computed; a chunk of one token past the prompt is decode."""
        prompts = [
            chunk.stop - chunk.start
            for chunk, seq in zip(step.plan.chunks, step.sequences, strict=True)
            if not chunk.pending and (chunk.stop - chunk.start > 1 or chunk.start < seq.num_prompt)
        ]
        num_decodes = len(step.sequences) - len(prompts)
        self.last_step = StepCounts(sum(prompts), len(step.ready), len(prompts), num_decodes)

    def take(self, seq: Sequence, sampled: Sampled, now: float) -> str | None:
        """Books a token that the sequence has got at `now`; returns the stop string that it completes."""
        metrics = seq.request.metrics
        self.generation_tokens += 1
        metrics.num_generation_tokens += 1
        metrics.last_token_ts = now
        if not metrics.first_token_ts:
            self._count_prompt(seq.request, now)
        if sampled.logprobs is not None:
            seq.logprobs.append(sampled.logprobs)
            seq.cumulative_logprob += sampled.logprobs[sampled.token_id].logprob
        detokenizer = self._detokenizers.get(seq.seq_id) or self._new_detokenizer(seq)
        if detokenizer is None:
            return None
        if seq.finish_reason == "stop" and not seq.request.params.include_stop_str_in_output:
            return None  # the token that ends it is not shown
        detokenizer.push((sampled.token_id,))
        seq.text = detokenizer.text
        return detokenizer.stop_reason

    def end(self, seq: Sequence) -> None:
        """Completes the text of a sequence that has ended."""
        detokenizer = self._detokenizers.pop(seq.seq_id, None)
        if detokenizer is not None:
            detokenizer.finish()
            seq.text = detokenizer.text

    def forget(self, seq: Sequence) -> None:
        """Drops what belongs to a sequence that nobody waits for."""
        self._detokenizers.pop(seq.seq_id, None)

    def _count_prompt(self, request: Request, now: float) -> None:
        request.metrics.first_token_ts = now
        request.metrics.first_token_latency = time.time() - request.metrics.arrival_time
        self.prompt_tokens += len(request.prompt_ids)
        self.cached_tokens += request.num_cached or 0

    def _new_detokenizer(self, seq: Sequence) -> Detokenizer | None:
        params = seq.request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        found = self._detokenizers[seq.seq_id] = Detokenizer(
            self._tokenizer,
            seq.request.prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        return found
