"""The engine: requests in, outputs out, one `step` at a time.

A step asks the scheduler for a plan, runs it, samples, books the tokens and turns them into text:

    plan = scheduler.schedule()          ids and counts
    out = runner.run(plan, ...)          tensors
    tokens = sample(out.logits, ...)     one per sequence that has caught up
    scheduler.commit(plan, tokens)       ids again; ends by id and by count
    detokenizer.push(token)              text; ends by stop strings

The engine is single-threaded and knows nothing of time but its stamps. `AsyncLLM` puts it on a thread, `LLM`
calls `step` until all is done.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from qinfer.engine import admission
from qinfer.engine.kv_pool import KVPool, KVScales, resolve_kv_cache_dtype
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, EngineStats, StepLimits, settle_limits
from qinfer.engine.pages import PagePool
from qinfer.engine.plan import Chunk, StepPlan
from qinfer.engine.request import Request
from qinfer.engine.request import Sequence as TokenSequence
from qinfer.engine.runner import Runner, StepRunner
from qinfer.engine.sampler import Sampled, Spell, describe, sample, slice_rows
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.sizing import size_pool
from qinfer.engine.warmup import warm_up
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

LOGIT_ROWS = 256  # rows of a full vocabulary that exist at a time when prompts are scored on a CPU


class Engine:
    """Runs many requests at once on one decoder; `limits` and `ledger` say what was settled."""

    limits: StepLimits
    ledger: Ledger

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        options: EngineOptions,
        *,
        kv_scales: KVScales | None = None,
        label: str | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """Allocates the KV pool; `runner` replaces the decoder's own (tests), `label` is the ledger's.

        Raises UserError where the options contradict each other, the model or the memory.
        """
        config = decoder.config
        on_gpu = decoder.device.type != "cpu"
        self.limits = settle_limits(options, config.context_len, on_gpu=on_gpu)
        dtype_name = str(decoder.dtype).removeprefix("torch.")
        kv_cache_dtype = resolve_kv_cache_dtype(options.kv_cache_dtype, dtype_name)
        self.kv_cache_dtype = kv_cache_dtype
        self.ledger = size_pool(decoder, options, self.limits, kv_cache_dtype, label or dtype_name)
        self.limits = self.limits._replace(max_model_len=self.ledger.max_model_len)
        decoder.set_context_len(self.limits.max_model_len)
        num_pages, page_size = self.ledger.pages, self.limits.block_size
        if runner is None:
            device = decoder.device
            pool = KVPool(config, num_pages, page_size, kv_cache_dtype, scales=kv_scales, device=device)
            runner = Runner(decoder, pool)
            warm_up(runner, self.limits)
        self.runner = runner
        self.pages = PagePool(num_pages, page_size, caching=options.enable_prefix_caching)
        self.scheduler = Scheduler(self.limits, self.pages)
        self._tokenizer = tokenizer
        self._spell: Spell | None = tokenizer.token_str if tokenizer else None
        self.vocab_size = config.vocab_size
        self._logit_rows = slice_rows(config.vocab_size) if on_gpu else LOGIT_ROWS
        self._max_logprobs = options.max_logprobs
        self._seeds = random.Random(options.seed)
        self._seq_ids = count()
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, TokenSequence] = {}
        self._detokenizers: dict[int, Detokenizer] = {}
        self._scored_pages: list[int] = []  # held by prompt_logits
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Takes a request in, to be started by a later `step`.

        `arrival_time` is wall-clock seconds, now if None; requests of different `cache_salt` share no pages.
        Raises UserError for what cannot be run: a known id, ids out of range, a prompt that never fits.
        """
        if priority:
            raise NotImplementedError("qinfer does not have priority: requests run in order of arrival")
        if request_id in self._requests:
            raise UserError(
                f"request id {request_id!r} is in use: wait for it or choose another", "request_id"
            )
        prompt_ids = admission.check_prompt(prompt_token_ids, self.vocab_size)
        admission.check_fits(len(prompt_ids), self.limits, self.pages.num_pages * self.limits.block_size)
        has_tokenizer = self._tokenizer is not None
        admission.check_params(params, self.vocab_size, self._max_logprobs, has_tokenizer=has_tokenizer)
        request = admission.make_request(
            request_id, prompt_ids, params, self.limits, self._tokenizer, self.vocab_size
        )
        request.prompt, request.salt = prompt, cache_salt or ""
        request.metrics.arrival_time = time.time() if arrival_time is None else arrival_time
        request.metrics.queued_ts = time.monotonic()
        self._requests[request_id] = request
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            seq = TokenSequence(next(self._seq_ids), request, index, seed + index, list(prompt_ids))
            request.sequences.append(seq)
            self._sequences[seq.seq_id] = seq
            self.scheduler.add(seq)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that it changed, with all that they have so far.

        Requests that want their output once (FINAL_ONLY) appear when they have finished.
        """
        plan = self.scheduler.schedule()
        changed = self.scheduler.take_outgrown()
        for seq in changed:
            self._end(seq)
        if plan.chunks:
            changed += self._run(plan)
        if not self.has_unfinished():
            self.pages.check([self._scored_pages])
        return self._outputs(changed)

    def abort(self, request_id: str) -> None:
        """Ends a request without an output; an unknown or finished one is no mistake."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
            self._forget(seq)

    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; running requests keep what they hold. Always succeeds."""
        self.pages.forget()
        return True

    @torch.inference_mode()
    def prompt_logits(self, token_ids: Sequence[int], *, rows: int | None = None) -> Iterator[Tensor]:
        """Logits of every position of a text, in order, as slices [<= rows, V] float32.

        They go through the same pages and ops as a request's prompt, in chunks of max_num_batched_tokens,
        without the prefix cache. Raises UserError where the text does not fit, or requests are running.
        """
        rows = min(rows or self._logit_rows, self._logit_rows)
        ids = admission.check_prompt(token_ids, self.vocab_size)
        capacity = min(self.pages.num_pages * self.limits.block_size, self.limits.max_model_len)
        if len(ids) > capacity:
            raise UserError(f"{len(ids)} tokens are more than the {capacity} that fit", "token_ids")
        if self.has_unfinished() or self._scored_pages:
            raise UserError("prompt_logits needs an idle engine: wait for the requests that are running")
        pages = self._scored_pages = self.pages.allocate(self.pages.pages_for(len(ids)))
        try:
            for start in range(0, len(ids), self.limits.max_num_batched_tokens):
                stop = min(len(ids), start + self.limits.max_num_batched_tokens)
                held = tuple(pages[: self.pages.pages_for(stop)])
                plan = StepPlan((Chunk(-1, start, stop, held, sample=False),))
                hidden = self.runner.run(plan, {-1: ids}, frozenset((-1,))).hidden[-1]
                for first in range(0, len(hidden), rows):
                    yield self.runner.logits(hidden[first : first + rows])
        finally:
            self.pages.release(pages)
            self._scored_pages = []

    def stats(self) -> EngineStats:
        """Counters and gauges, at the end of the last step."""
        pages, scheduler = self.pages, self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=1 - pages.num_free / pages.num_pages,
            kv_tokens=pages.num_pages * pages.page_size,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _run(self, plan: StepPlan) -> list[TokenSequence]:
        """Runs a plan that has chunks; returns the sequences that were to get a token."""
        now = time.monotonic()
        sequences = [self._sequences[chunk.seq_id] for chunk in plan.chunks]
        for seq in sequences:
            if not seq.request.metrics.scheduled_ts:
                seq.request.metrics.scheduled_ts = now
        scored = frozenset(seq.seq_id for seq in sequences if seq.scores_prompt)
        out = self.runner.run(plan, {seq.seq_id: seq.token_ids for seq in sequences}, scored)
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            if seq.seq_id in scored:
                self._score_prompt(seq.request, chunk, out.hidden[seq.seq_id])
        ready = [seq for seq, chunk in zip(sequences, plan.chunks, strict=True) if chunk.sample]
        sampled = sample(out.logits, ready, self._spell) if ready else []
        results = {seq.seq_id: result for seq, result in zip(ready, sampled, strict=True)}
        tokens = {seq_id: result.token_id for seq_id, result in results.items() if not result.broken}
        now = time.monotonic()
        for seq in self.scheduler.commit(plan, tokens):
            self._take(seq, results[seq.seq_id], now)
        for seq in ready:
            if results[seq.seq_id].broken:
                logger.error("request %s ends: its logits are not numbers", seq.request.request_id)
                self.scheduler.finish(seq, "error")
                self._end(seq)
        return ready

    def _score_prompt(self, request: Request, chunk: Chunk, hidden: Tensor) -> None:
        """Adds log-probabilities of the prompt tokens that follow the chunk's rows."""
        wanted = request.params.prompt_logprobs
        assert wanted is not None
        following = request.prompt_ids[chunk.start + 1 : chunk.stop + 1]
        for first in range(0, len(following), self._logit_rows):
            part = following[first : first + self._logit_rows]
            logits = self.runner.logits(hidden[first : first + len(part)])
            ids = torch.tensor(part, device=logits.device)
            request.prompt_logprobs += describe(logits, ids, wanted, self._spell)

    def _take(self, seq: TokenSequence, sampled: Sampled, now: float) -> None:
        """Books a token that the scheduler has appended: text, log-probabilities, counters, stamps."""
        request = seq.request
        self._count(seq, now)
        if sampled.logprobs is not None:
            seq.logprobs.append(sampled.logprobs)
            seq.cumulative_logprob += sampled.logprobs[sampled.token_id].logprob
        detokenizer = self._detokenizer(seq)
        hidden = seq.finish_reason == "stop" and not request.params.include_stop_str_in_output
        if detokenizer is not None and not hidden:
            detokenizer.push([sampled.token_id])
            seq.text = detokenizer.text
            if detokenizer.stop_reason is not None:
                self.scheduler.finish(seq, "stop", detokenizer.stop_reason)
        if seq.finish_reason is not None:
            self._end(seq)

    def _count(self, seq: TokenSequence, now: float) -> None:
        request, metrics = seq.request, seq.request.metrics
        self._generation_tokens += 1
        metrics.num_generation_tokens += 1
        metrics.last_token_ts = now
        if not metrics.first_token_ts:
            metrics.first_token_ts = now
            metrics.first_token_latency = time.time() - metrics.arrival_time
            self._prompt_tokens += len(request.prompt_ids)
            self._cached_tokens += request.num_cached or 0

    def _detokenizer(self, seq: TokenSequence) -> Detokenizer | None:
        params = seq.request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        found = self._detokenizers.get(seq.seq_id)
        if found is None:
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

    def _end(self, seq: TokenSequence) -> None:
        """Last things of a sequence that the scheduler has ended."""
        detokenizer = self._detokenizers.get(seq.seq_id)
        if detokenizer is not None:
            detokenizer.finish()
            seq.text = detokenizer.text
        self._forget(seq)
        if seq.request.finished:
            self._requests.pop(seq.request.request_id, None)

    def _forget(self, seq: TokenSequence) -> None:
        self._sequences.pop(seq.seq_id, None)
        self._detokenizers.pop(seq.seq_id, None)

    def _outputs(self, changed: list[TokenSequence]) -> list[RequestOutput]:
        requests = dict.fromkeys(seq.request for seq in changed)
        return [
            request.output()
            for request in requests
            if request.finished or request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        ]
