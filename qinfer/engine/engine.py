"""The engine: requests in, outputs out, one `step` at a time.

A step asks the scheduler for a plan, runs it, and books the tokens:

    plan = scheduler.schedule()            ids and counts
    launched = runner.launch(plan, ...)    tensors
    tokens = launched.tokens()             one per sequence that has caught up
    scheduler.commit(plan, tokens)         ids again; ends by id and by count
    books.take(...)                        counters, text; ends by stop strings

On a GPU, which must not wait for all that, `step` launches its plan first and then books the one before,
which has ended or is about to: everything but launching happens while the device works. Tokens are seen one
step later, nothing else differs. Where a request's next token depends on its last ones by more than the model
(`looks_back`: penalties, forbidden words, log-probabilities to tell), the step is booked at once.

The engine is single-threaded and knows nothing of time but its stamps. `AsyncLLM` puts it on a thread, `LLM`
calls `step` until all is done.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from qinfer.engine import admission
from qinfer.engine.books import Books
from qinfer.engine.continuation import Continuation, score_continuations
from qinfer.engine.kv_pool import KVPool, KVScales, resolve_kv_cache_dtype
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, EngineStats, StepCounts, StepLimits, settle_limits
from qinfer.engine.pages import PagePool
from qinfer.engine.plan import StepPlan
from qinfer.engine.pooling import Pool, Pooling
from qinfer.engine.request import Request
from qinfer.engine.request import Sequence as TokenSequence
from qinfer.engine.runner import Launched, Runner, StepRunner
from qinfer.engine.sampler import Sampled, Spell, draw_of, sample, slice_rows
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.scoring import LOGIT_ROWS, score_prompt, text_hidden
from qinfer.engine.sizing import size_pool
from qinfer.engine.structured import Grammars
from qinfer.engine.warmup import make_ready
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import RequestOutputKind, SamplingParams
from qinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    """A step that was launched and is not yet booked; `sequences` are those of its chunks."""

    plan: StepPlan
    sequences: list[TokenSequence]
    launched: Launched


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
        self.limits, self.ledger = size_pool(
            decoder, options, self.limits, kv_cache_dtype, label or dtype_name
        )
        decoder.set_context_len(self.limits.max_model_len)
        num_pages, page_size = self.ledger.pages, self.limits.block_size
        if runner is None:
            device = decoder.device
            pool = KVPool(config, num_pages, page_size, kv_cache_dtype, scales=kv_scales, device=device)
            runner = Runner(decoder, pool, self.limits)
            make_ready(runner, eager=options.enforce_eager)
        self.runner = runner
        self.pages = PagePool(num_pages, page_size, caching=options.enable_prefix_caching)
        self.scheduler = Scheduler(self.limits, self.pages)
        self._tokenizer = tokenizer
        self._spell: Spell | None = tokenizer.token_str if tokenizer else None
        self.vocab_size = config.vocab_size
        self._logit_rows = slice_rows(config.vocab_size) if on_gpu else LOGIT_ROWS
        self._max_logprobs = options.max_logprobs
        self._policy = options.scheduling_policy
        self._seeds = random.Random(options.seed)
        self._seq_ids = count()
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, TokenSequence] = {}
        self._books = Books(tokenizer)
        self.grammars = Grammars(tokenizer, config.vocab_size)
        self._under_way: _UnderWay | None = None
        self._may_look_back: set[str] = set()  # requests of which a sequence may
        self._scored_pages: list[int] = []  # held by prompt_logits

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
        pooling: Pooling | None = None,
        continuation: Continuation | None = None,
    ) -> None:
        """Takes a request in, to be started by a later `step`.

        `arrival_time` is wall-clock seconds, now if None; requests of different `cache_salt` share no pages;
        the smaller `priority`, the sooner, where the scheduling policy is "priority".
        With `pooling` the output has an `embedding`; its one token means nothing. Nor does it with a
        `continuation`, whose tokens but for the last are the end of the prompt, and which is scored.
        Raises UserError for what cannot be run: a known id, ids out of range, a prompt that never fits.
        """
        admission.check_priority(priority, self._policy)
        if request_id in self._requests:
            raise UserError(
                f"request id {request_id!r} is in use: wait for it or choose another", "request_id"
            )
        prompt_ids = admission.check_prompt(prompt_token_ids, self.vocab_size)
        capacity = self.pages.num_pages * self.limits.block_size
        admission.check_fits(len(prompt_ids), self.limits, capacity, room=continuation is None)
        has_tokenizer = self._tokenizer is not None
        admission.check_params(params, self.vocab_size, self._max_logprobs, has_tokenizer=has_tokenizer)
        request = admission.make_request(
            request_id, prompt_ids, params, self.limits, self._tokenizer, self.vocab_size
        )
        structured = params.structured_outputs
        constraints = [self.grammars.start(structured) if structured else None for _ in range(params.n)]
        request.prompt, request.salt, request.priority = prompt, cache_salt or "", priority
        request.pool = Pool(pooling) if pooling else None
        request.continuation = continuation
        request.metrics.arrival_time = time.time() if arrival_time is None else arrival_time
        request.metrics.queued_ts = time.monotonic()
        self._requests[request_id] = request
        if request.looks_back or request.rules.min_tokens:
            self._may_look_back.add(request_id)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            seq = TokenSequence(next(self._seq_ids), request, index, seed + index, list(prompt_ids))
            seq.constraint = constraints[index]
            request.sequences.append(seq)
            self._sequences[seq.seq_id] = seq
            self.scheduler.add(seq)

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that changed, with all that they have so far.

        On a GPU those are what the step before changed. Requests that want their output once (FINAL_ONLY)
        appear when they have finished.
        """
        self._books.last_step = StepCounts()
        plan = self.scheduler.schedule()
        changed = self.scheduler.take_outgrown()
        for seq in changed:
            self._end(seq)
        sequences = self._sequences_of(plan)
        before, self._under_way = self._under_way, None
        at_once = not self.runner.overlaps or self._looks_back(sequences)
        if sequences and not at_once:
            self._under_way = self._launch(plan, sequences)
        if before is not None:
            changed += self._book(before)
        if sequences and at_once:
            changed += self._run(plan, sequences)
        if not self.has_unfinished():
            self._under_way = None  # it brings nothing that anybody waits for
            self.pages.check([self._scored_pages])
        return self._outputs(changed)

    def abort(self, request_id: str) -> None:
        """Ends a request without an output; an unknown or finished one is no mistake."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
            self._books.forget(seq)
            self._sequences.pop(seq.seq_id, None)
        self._forget(request)

    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; running requests keep what they hold. Always succeeds."""
        self.pages.forget()
        return True

    @torch.inference_mode()
    def prompt_hidden(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Hidden states of every position of a text after the final norm, in order, as chunks [T, H].

        They go through the same pages and ops as a request's prompt, in chunks of max_num_batched_tokens,
        without the prefix cache. Raises UserError where the text does not fit, or requests are running.
        """
        ids = admission.check_prompt(token_ids, self.vocab_size)
        capacity = min(self.pages.num_pages * self.limits.block_size, self.limits.max_model_len)
        if len(ids) > capacity:
            raise UserError(f"{len(ids)} tokens are more than the {capacity} that fit", "token_ids")
        if self.has_unfinished() or self._scored_pages:
            raise UserError("scoring a text needs an idle engine: wait for the requests that are running")
        pages = self._scored_pages = self.pages.allocate(self.pages.pages_for(len(ids)))
        try:
            yield from text_hidden(self.runner, self.limits, pages, ids)
        finally:
            self.pages.release(pages)
            self._scored_pages = []

    @torch.inference_mode()
    def prompt_logits(
        self, token_ids: Sequence[int], *, rows: int | None = None, narrow: bool = False
    ) -> Iterator[Tensor]:
        """Logits of every position of a text, as slices [<= rows, V] float32, made of `prompt_hidden`.

        `narrow` leaves them in the model's dtype where that is what its head makes: the same numbers.
        """
        rows = min(rows or self._logit_rows, self._logit_rows)
        for hidden in self.prompt_hidden(token_ids):
            for part in torch.split(hidden, rows):
                yield self.runner.logits(part, to_compare=narrow)

    def stats(self) -> EngineStats:
        """Counters and gauges, at the end of the last step."""
        pages, scheduler = self.pages, self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=1 - pages.num_free / pages.num_pages,
            kv_tokens=pages.num_pages * pages.page_size,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._books.prompt_tokens,
            cached_tokens=self._books.cached_tokens,
            generation_tokens=self._books.generation_tokens,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            last_step=self._books.last_step,
        )

    def _sequences_of(self, plan: StepPlan) -> list[TokenSequence]:
        """Of the chunks, stamped where it is their first step."""
        now = time.monotonic()
        sequences = [self._sequences[chunk.seq_id] for chunk in plan.chunks]
        for seq in sequences:
            if not seq.request.metrics.scheduled_ts:
                seq.request.metrics.scheduled_ts = now
        return sequences

    def _looks_back(self, sequences: list[TokenSequence]) -> bool:
        return bool(self._may_look_back) and any(seq.looks_back for seq in sequences)

    def _launch(self, plan: StepPlan, sequences: list[TokenSequence]) -> _UnderWay:
        """Starts a plan, tokens included."""
        draw = draw_of(_sampled_of(plan, sequences))
        token_ids = {seq.seq_id: seq.token_ids for seq in sequences}
        return _UnderWay(plan, sequences, self.runner.launch(plan, token_ids, draw))

    def _book(self, step: _UnderWay) -> list[TokenSequence]:
        """Waits for a step and books it; returns the sequences that it changed."""
        sampled = [Sampled(max(token, 0), broken=token < 0) for token in step.launched.tokens()]
        self._books.count(step.plan, step.sequences)
        return self._commit(step.plan, _sampled_of(step.plan, step.sequences), sampled)

    def _run(self, plan: StepPlan, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Runs and books a plan; returns the sequences that it changed."""
        scored = frozenset(seq.seq_id for seq in sequences if seq.scores_prompt)
        out = self.runner.run(plan, {seq.seq_id: seq.token_ids for seq in sequences}, scored)
        score_continuations(plan, sequences, out, self.runner, self._logit_rows)
        for seq, chunk in zip(sequences, plan.chunks, strict=True):
            if seq.seq_id in scored and seq.request.continuation is None:
                hidden = out.hidden[seq.seq_id]
                score_prompt(seq.request, chunk, hidden, self.runner, self._logit_rows, self._spell)
        self._books.count(plan, sequences)
        ready = _sampled_of(plan, sequences)
        return self._commit(plan, ready, sample(out.logits, ready, self._spell) if ready else [])

    def _commit(
        self, plan: StepPlan, ready: list[TokenSequence], sampled: list[Sampled]
    ) -> list[TokenSequence]:
        """Books a step's tokens, but for sequences that have ended meanwhile; returns the others."""
        results = {
            seq.seq_id: result
            for seq, result in zip(ready, sampled, strict=True)
            if seq.finish_reason is None
        }
        tokens = {seq_id: result.token_id for seq_id, result in results.items() if not result.broken}
        now = time.monotonic()
        for seq in self.scheduler.commit(plan, tokens):
            stop = self._books.take(seq, results[seq.seq_id], now)
            if stop is not None:
                self.scheduler.finish(seq, "stop", stop)
            if seq.finish_reason is not None:
                self._end(seq)
        changed = [seq for seq in ready if seq.seq_id in results]
        for seq in changed:
            if results[seq.seq_id].broken:
                logger.error("request %s ends: its logits are not numbers", seq.request.request_id)
                self.scheduler.finish(seq, "error")
                self._end(seq)
        return changed

    def _end(self, seq: TokenSequence) -> None:
        """Last things of a sequence that the scheduler has ended."""
        self._books.end(seq)
        self._sequences.pop(seq.seq_id, None)
        if seq.request.finished:
            self._forget(seq.request)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._may_look_back.discard(request.request_id)

    def _outputs(self, changed: list[TokenSequence]) -> list[RequestOutput]:
        final = RequestOutputKind.FINAL_ONLY
        requests = dict.fromkeys(
            seq.request
            for seq in changed
            if seq.finish_reason is not None or seq.request.params.output_kind is not final
        )
        return [
            request.output()
            for request in requests
            if request.params.output_kind is not final or request.finished
        ]


def _sampled_of(plan: StepPlan, sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Those of a plan's sequences that get a token, in its order."""
    return [seq for seq, chunk in zip(sequences, plan.chunks, strict=True) if chunk.sample]
