"""The engine: requests in, outputs out, one `step` at a time.

A step asks the scheduler for a plan, runs it, and books the tokens:

    plan = scheduler.schedule()            ids and counts
    launched = runner.launch(plan, ...)    tensors
    tokens = launched.tokens()             one per sequence that has caught up
    scheduler.commit(tokens)               ids again; ends by id and by count
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

import torch
from torch import Tensor

from qinfer import backend
from qinfer.dtypes import name_of
from qinfer.engine.admission import Admission
from qinfer.engine.bad_words import BadWords
from qinfer.engine.books import Books
from qinfer.engine.continuation import Continuation
from qinfer.engine.kv_pool import KVPool, KVScales, resolve_kv_cache_dtype
from qinfer.engine.memory import Ledger
from qinfer.engine.options import EngineOptions, EngineStats, StepCounts, StepLimits, settle_limits
from qinfer.engine.pages import PagePool
from qinfer.engine.pooling import Pool, Pooling
from qinfer.engine.request import Sequence as TokenSequence
from qinfer.engine.roster import Roster, outputs_of
from qinfer.engine.runner import Runner, StepRunner
from qinfer.engine.sampler import Sampled, Spell, slice_rows
from qinfer.engine.scheduler import Scheduler
from qinfer.engine.scoring import LOGIT_ROWS, TextReader
from qinfer.engine.sizing import size_pool
from qinfer.engine.steps import Step, UnderWay, launch, run
from qinfer.engine.structured import Grammars
from qinfer.engine.warmup import make_ready
from qinfer.errors import UserError
from qinfer.model.decoder import Decoder
from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
        dtype_name = name_of(decoder.dtype)
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
        self._reader = TextReader(runner, self.pages, self.limits, config.vocab_size)
        self._spell: Spell | None = tokenizer.token_str if tokenizer else None
        self.vocab_size = config.vocab_size
        self._logit_rows = slice_rows(config.vocab_size) if on_gpu else LOGIT_ROWS
        self.bad_words = BadWords(tokenizer, self.limits.max_model_len)
        self._admission = Admission(
            self.limits,
            num_pages * page_size,
            config.vocab_size,
            options.max_logprobs,
            options.scheduling_policy,
            tokenizer,
            self.bad_words,
        )
        self._seeds = random.Random(options.seed)
        self._roster = Roster()
        self._books = Books(tokenizer)
        self.grammars = Grammars(tokenizer, config.vocab_size)
        self._under_way: UnderWay | None = None

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
        if request_id in self._roster.requests:
            raise UserError(
                f"request id {request_id!r} is in use: wait for it or choose another", "request_id"
            )
        request = self._admission.request(request_id, prompt_token_ids, params, priority, continuation)
        structured = params.structured_outputs
        constraints = [self.grammars.start(structured) if structured else None for _ in range(params.n)]
        request.prompt, request.salt = prompt, cache_salt or ""
        request.pool = Pool(pooling) if pooling else None
        request.metrics.arrival_time = time.time() if arrival_time is None else arrival_time
        request.metrics.queued_ts = time.monotonic()
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        for seq in self._roster.enter(request, seed, constraints):
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
        step = Step.of(plan, self._roster)
        before, self._under_way = self._under_way, None
        at_once = not self.runner.overlaps or self._roster.looks_back(step.sequences)
        if step.sequences and not at_once:
            self._under_way = launch(step, self.runner)
        if before is not None:
            changed += self._book(before.step, before.sampled())
        if step.sequences and at_once:
            changed += self._book(step, run(step, self.runner, self._logit_rows, self._spell))
        if not self.has_unfinished():
            self._under_way = None  # it brings nothing that anybody waits for
            self.pages.check([self._reader.held])
        return outputs_of(changed)

    def abort(self, request_id: str) -> None:
        """Ends a request without an output; an unknown or finished one is no mistake."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "abort")
            self._books.forget(seq)
            self._roster.strike(seq)

    def has_unfinished(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self._roster.requests)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; running requests keep what they hold. Always succeeds."""
        self.pages.forget()
        return True

    @torch.inference_mode()
    def prompt_hidden(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Hidden states of every position of a text after the final norm, in order, as chunks [T, H].

        They go through the same pages and ops as a request's prompt, without the prefix cache. Raises
        UserError where the text does not fit, or requests are running.
        """
        if self.has_unfinished() or self._reader.held:
            raise UserError("scoring a text needs an idle engine: wait for the requests that are running")
        yield from self._reader.hidden(token_ids)

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
            # a copy: another engine's thread may add some
            fallbacks=tuple((*what, count) for what, count in dict(backend.fallbacks).items()),
        )

    def _book(self, step: Step, sampled: list[Sampled]) -> list[TokenSequence]:
        """Books a step and its tokens, but for sequences that have ended meanwhile; returns the others."""
        self._books.count(step)
        got = [pair for pair in zip(step.ready, sampled, strict=True) if pair[0].finish_reason is None]
        self.scheduler.commit({seq.seq_id: result.token_id for seq, result in got if result.token_id >= 0})
        now = time.monotonic()
        for seq, result in got:
            if result.token_id < 0:
                fault = seq.constraint.fault if seq.constraint is not None else None
                why = "its logits are not numbers" if fault is None else f"its grammar failed ({fault})"
                logger.error("request %s ends: %s", seq.request.request_id, why)
                self.scheduler.finish(seq, "error")
            elif (stop := self._books.take(seq, result, now)) is not None:
                self.scheduler.finish(seq, "stop", stop)
            if seq.finish_reason is not None:
                self._end(seq)
        return [seq for seq, _ in got]

    def _end(self, seq: TokenSequence) -> None:
        """Last things of a sequence that the scheduler has ended."""
        self._books.end(seq)
        self._roster.strike(seq)
