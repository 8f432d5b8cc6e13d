"""Who runs in the next step, in ids and counts. No torch.

A step has one budget of tokens. Running sequences that need one more token (decode) come first, then chunks
of prompts that are under way, then new sequences from the head of the queue. Both queues are in order of
rank: the smaller priority, and among equals the earlier arrival, comes first; nobody overtakes a better rank.
A sequence that waits takes no place from one that runs, whatever its rank. It is admitted when pages for all
of its tokens are free, less what the prefix cache already has, and one spare page for every running sequence,
which may need it soon. At least one token is always computed, because a full hit would leave nothing to
sample from.

When a running sequence needs a page and none is free, the last in rank among the running is preempted: its
pages go (their contents stay in the prefix cache as long as nobody takes them), it returns to its place in
the queue and is computed again later. So the first in rank always makes progress, and where priorities are
equal every running sequence has arrived before every waiting one and nobody starves. A sequence that alone
needs more pages than exist ends with "length"; one whose prompt does is refused by `Engine.add`.

A plan may be made before the plan in front of it has been booked, so that a GPU always has work: then the
tokens to come are counted, though not known (`Sequence.num_pending`). A sequence that ends by such a token is
in one more plan, whose result for it is dropped. Its pages are free at once: the device runs steps in order,
so whoever gets them next writes after that last step has written. Only pages of known tokens get a name in
the prefix cache.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from qinfer.engine.options import StepLimits
from qinfer.engine.pages import PagePool, page_key
from qinfer.engine.plan import Chunk, StepPlan
from qinfer.engine.request import Sequence

# Chunk(...) without the Python call that a named tuple puts in between, for there are hundreds in a step
_chunk: Callable[[tuple[int, int, int, bool, int, bool]], Chunk] = partial(tuple.__new__, Chunk)


class Scheduler:
    """Queues of sequences over a pool of pages; `schedule`, run the plan, `commit`; all plans are run."""

    def __init__(self, limits: StepLimits, pages: PagePool) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting: deque[Sequence] = deque()  # in order of rank, as the next
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0
        self._outgrown: list[Sequence] = []
        self._new_pages: dict[int, list[int]] = {}  # of lanes, in the plan that is being made
        self._alive: dict[int, Sequence] = {}
        self._lanes = list(range(limits.max_num_seqs - 1, -1, -1))  # free ones, taken from the end

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence into the queue, behind all of its rank."""
        self._alive[seq.seq_id] = seq
        insort(self.waiting, seq, key=_rank)

    def schedule(self) -> StepPlan:
        """Chunks of the next step, at most max_num_batched_tokens; empty only where nothing can run.

        Sequences that have outgrown the pool are ended on the way: see `take_outgrown`.
        """
        chunks: list[Chunk] = []
        self._new_pages = {}
        budget = self._schedule_decodes(chunks, self.limits.max_num_batched_tokens)
        for seq in self.running:
            if budget and len(seq.token_ids) - seq.num_computed > 1:  # tokens under way are no prompt's
                budget -= self._schedule_chunk(seq, min(seq.num_remaining, budget), chunks)
        self._admit(chunks, budget)
        return StepPlan(tuple(chunks), self._new_pages)

    def commit(self, sampled: Mapping[int, int]) -> None:
        """Books a step that has run: tokens of its chunks with `sample`, by sequence, in the plan's order.

        Sequences that end by them leave. A token of one that has ended since the plan was made is dropped.
        """
        size = self.pages.page_size if self.pages.caching else 0
        ended: list[tuple[Sequence, str]] = []
        for seq_id, token in sampled.items():
            seq = self._alive.get(seq_id)
            if seq is None:
                continue
            seq.num_pending -= 1
            seq.append(token)
            if size and seq.num_computed >= (seq.num_published + 1) * size:
                self._publish(seq)
            if seq.finish_reason is not None:
                ended.append((seq, seq.finish_reason))
        for seq, reason in ended:
            self.finish(seq, reason, seq.stop_reason)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence and returns its pages; one that has left already just gets the reason."""
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if self._alive.pop(seq.seq_id, None) is None:
            return
        if seq.lane >= 0:
            self._leave(seq)
        else:
            self.waiting.remove(seq)

    def take_outgrown(self) -> list[Sequence]:
        """Sequences that the last `schedule` ended with "length" because no pool of this size holds them."""
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def _schedule_decodes(self, chunks: list[Chunk], budget: int) -> int:
        size = self.pages.page_size
        capacity = self.pages.num_pages * size
        for seq in tuple(self.running):
            start, known = seq.num_computed, len(seq.token_ids)
            stop = known + seq.num_pending
            if stop - start > 1:  # in the middle of its prompt, or preempted by one before it
                continue
            # what is under way is its last: by count, or because no pool holds another token
            if stop > known and (stop >= seq.max_length or stop > capacity):
                continue
            if stop > len(seq.pages) * size and not self._grow(seq):
                continue
            chunks.append(_chunk((seq.seq_id, start, stop, True, seq.lane, stop > known)))
            seq.num_computed = stop
            seq.num_pending += 1
        return budget - len(chunks)

    def _grow(self, seq: Sequence) -> bool:
        """Gets the page for the sequence's last token where it needs one; False: it runs no longer."""
        if self._has_outgrown(seq):
            return False
        pages = self.pages
        needed = pages.pages_for(seq.length)
        if needed > len(seq.pages):
            while not pages.num_free:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is seq:
                    return False
            seq.pages += pages.allocate(1)
            self._new_pages[seq.lane] = seq.pages
        return True

    def _has_outgrown(self, seq: Sequence) -> bool:
        """Whether no pool of this size could hold the sequence, which then ends here."""
        if self.pages.pages_for(seq.length) <= self.pages.num_pages:
            return False
        self.finish(seq, "length")
        self._outgrown.append(seq)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.rewind()
        insort(self.waiting, seq, key=_rank)
        self.num_preemptions += 1
        seq.request.metrics.num_preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        """Takes a running sequence's pages and lane."""
        self.running.remove(seq)
        self.pages.release(seq.pages)
        self._lanes.append(seq.lane)
        seq.pages, seq.lane = [], -1

    def _schedule_chunk(self, seq: Sequence, count: int, chunks: list[Chunk]) -> int:
        start, known = seq.num_computed, len(seq.token_ids)
        seq.num_computed = stop = start + count
        if self.pages.caching and stop >= (seq.num_published + 1) * self.pages.page_size:
            self._publish(seq)
        sample = stop == known + seq.num_pending
        chunks.append(Chunk(seq.seq_id, start, stop, sample, seq.lane, stop > known))
        seq.num_pending += sample
        return count

    def _publish(self, seq: Sequence) -> None:
        """Gives the prefix cache the pages whose tokens are known and computed, or are in the next plan."""
        count = min(seq.num_computed, len(seq.token_ids)) // self.pages.page_size
        if count > seq.num_published:
            keys = self._keys(seq, count)
            for i in range(seq.num_published, count):
                self.pages.publish(seq.pages[i], keys[i])
            seq.num_published = count

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_pending:  # preempted in this very step
                return
            if self._has_outgrown(seq):
                continue
            hit = self._find(seq)
            num_cached = len(hit) * self.pages.page_size
            count = min(budget, len(seq.token_ids) - num_cached)
            whole = count == len(seq.token_ids) - num_cached
            if not (whole or self.limits.chunked_prefill):
                return
            new = self.pages.pages_for(len(seq.token_ids)) - len(hit)
            if new + len(self.running) > self.pages.num_free - self.pages.num_idle(hit):
                return
            self.waiting.popleft()
            self._start(seq, hit, new)
            budget -= self._schedule_chunk(seq, count, chunks)

    def _start(self, seq: Sequence, hit: list[int], new: int) -> None:
        self.pages.hold(hit)
        seq.pages = hit + self.pages.allocate(new)
        seq.num_computed = len(hit) * self.pages.page_size
        seq.num_published = len(hit)
        seq.lane = self._lanes.pop()
        self._new_pages[seq.lane] = seq.pages
        insort(self.running, seq, key=_rank)
        request = seq.request
        if seq.num_output == 0 and not request.metrics.num_preemptions:
            whole = seq.scores_prompt and seq.first_scored == 0
            self.prefix_queries += 0 if whole or not self.pages.caching else seq.num_prompt
            self.prefix_hits += seq.num_computed
        if seq.index == 0 and request.num_cached is None:
            request.num_cached = seq.num_computed

    def _find(self, seq: Sequence) -> list[int]:
        """Cached pages of the sequence's beginning, without rows that have to be computed."""
        if not self.pages.caching:
            return []
        limit = seq.num_cacheable // self.pages.page_size
        return self.pages.find(self._keys(seq, limit)[:limit])

    def _keys(self, seq: Sequence, count: int) -> list[bytes]:
        """Names of at least the first `count` full pages."""
        keys, size = seq.page_keys, self.pages.page_size
        for i in range(len(keys), count):
            tokens = seq.token_ids[i * size : (i + 1) * size]
            keys.append(page_key(keys[-1] if keys else b"", tokens, seq.request.salt))
        return keys


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.request.priority, seq.seq_id
