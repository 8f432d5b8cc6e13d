"""The scheduler in ids and counts: cases S04, S07, S08, S11 and laws that hold for any load."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.engine.options import EngineOptions, StepLimits, settle_limits
from qinfer.engine.pages import PagePool
from qinfer.engine.plan import StepPlan
from qinfer.engine.request import Request, Sequence, StopRules
from qinfer.engine.scheduler import Scheduler
from qinfer.errors import UserError
from qinfer.sampling_params import SamplingParams


def make_scheduler(num_pages: int, *, caching: bool = False, **limits: int) -> Scheduler:
    settled = StepLimits(
        **{"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 256, **limits}, block_size=16
    )
    return Scheduler(settled, PagePool(num_pages, 16, caching=caching))


def make_sequence(seq_id: int, num_prompt: int, max_tokens: int = 1000) -> Sequence:
    prompt = [(seq_id * 1009 + i) % 5000 for i in range(num_prompt)]
    rules = StopRules(frozenset(), frozenset(), 0, max_tokens)
    request = Request(str(seq_id), prompt, SamplingParams(), rules)
    seq = Sequence(seq_id, request, 0, 0, list(prompt))
    request.sequences.append(seq)
    return seq


def step(scheduler: Scheduler) -> StepPlan:
    """One step in which every sampled token is 1."""
    plan = scheduler.schedule()
    scheduler.commit({chunk.seq_id: 1 for chunk in plan.chunks if chunk.sample})
    scheduler.pages.check([seq.pages for seq in scheduler.running])
    return plan


def lengths(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.seq_id, chunk.stop - chunk.start) for chunk in plan.chunks]


def test_s04_a_decode_step_takes_one_page_per_full_sequence() -> None:
    scheduler = make_scheduler(20)
    # after its prompt step, a sequence has computed as many tokens as its prompt and one token waits
    for seq_id, num_prompt in enumerate([15, 16, 17, 31, 32]):
        scheduler.add(make_sequence(seq_id, num_prompt))
    step(scheduler)
    before = scheduler.pages.num_free
    pages = {seq.seq_id: len(seq.pages) for seq in scheduler.running}
    step(scheduler)
    assert before - scheduler.pages.num_free == 2
    grown = {seq.seq_id for seq in scheduler.running if len(seq.pages) > pages[seq.seq_id]}
    assert grown == {1, 4}


def test_s04_no_more_sequences_are_preempted_than_needed() -> None:
    scheduler = make_scheduler(10)
    for seq_id, num_prompt in enumerate([16, 20, 24, 28]):  # no two need a page in the same step
        scheduler.add(make_sequence(seq_id, num_prompt))
    while not scheduler.num_preemptions:
        assert scheduler.pages.num_free >= 0
        step(scheduler)
    assert [seq.seq_id for seq in scheduler.running] == [0, 1, 2]
    assert [seq.seq_id for seq in scheduler.waiting] == [3]
    for _ in range(3):  # what was freed serves the next growth without another victim
        step(scheduler)
    assert scheduler.num_preemptions == 1


def test_s04_preemption_frees_just_enough_when_all_grow_at_once() -> None:
    scheduler = make_scheduler(8)
    for seq_id in range(4):
        scheduler.add(make_sequence(seq_id, 16))
    while not scheduler.num_preemptions:
        step(scheduler)
    assert [len(seq.pages) for seq in scheduler.running] == [3, 3]  # three of them would need nine pages


def test_s07_nothing_overtakes_a_large_request() -> None:
    scheduler = make_scheduler(8)
    started: list[int] = []
    scheduler.add(make_sequence(0, 16 * 3, max_tokens=4))
    scheduler.add(make_sequence(1, 16 * 6, max_tokens=4))  # A: 6 of 8 pages, waits for the first
    for seq_id in range(2, 52):
        scheduler.add(make_sequence(seq_id, 8, max_tokens=2))
        plan = step(scheduler)
        started += [chunk.seq_id for chunk in plan.chunks if chunk.start == 0]
    while scheduler.running or scheduler.waiting:
        started += [chunk.seq_id for chunk in step(scheduler).chunks if chunk.start == 0]
    assert started == sorted(started)
    assert len(started) == 52


def test_s07_a_preempted_sequence_resumes_before_one_never_started() -> None:
    scheduler = make_scheduler(6)
    for seq_id in range(5):
        scheduler.add(make_sequence(seq_id, 16, max_tokens=40))
    order: list[int] = []
    while scheduler.running or scheduler.waiting:
        order += [chunk.seq_id for chunk in step(scheduler).chunks if chunk.start == 0]
    assert scheduler.num_preemptions > 0
    first_start = [order.index(seq_id) for seq_id in range(5)]
    assert first_start == sorted(first_start)
    for position, seq_id in enumerate(order):
        assert all(other in order[:position] for other in range(seq_id)), "overtaken by a later arrival"


def test_s08_chunking_off_needs_a_budget_for_the_longest_prompt() -> None:
    options = EngineOptions(max_num_batched_tokens=64, enable_chunked_prefill=False, max_num_seqs=8)
    with pytest.raises(UserError, match=r"64.*256") as raised:
        settle_limits(options, 256, on_gpu=False)
    assert raised.value.parameter == "max_num_batched_tokens"
    unset = EngineOptions(enable_chunked_prefill=False)
    assert settle_limits(unset, 5000, on_gpu=False).max_num_batched_tokens >= 5000


def test_s08_a_prompt_over_the_budget_is_cut() -> None:
    for num_prompt, expected in ((64, [64]), (65, [64, 1])):
        scheduler = make_scheduler(20, max_num_batched_tokens=64)
        scheduler.add(make_sequence(0, num_prompt, max_tokens=1))
        cut = []
        while scheduler.running or scheduler.waiting:
            cut += [length for _, length in lengths(step(scheduler))]
        assert cut == expected


def test_without_chunking_a_prompt_waits_for_a_step_of_its_own() -> None:
    limits = StepLimits(256, 8, 256, 16, chunked_prefill=False)
    scheduler = Scheduler(limits, PagePool(64, 16, caching=False))
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 150))
    assert lengths(step(scheduler)) == [(0, 150)]
    assert lengths(step(scheduler)) == [(0, 1), (1, 150)]


@pytest.mark.parametrize("num_prompt", [15, 16, 17, 31, 32, 33, 48])
def test_s11_no_chunk_is_empty_at_multiples_of_page_and_budget(num_prompt: int) -> None:
    scheduler = make_scheduler(20, caching=True, max_num_batched_tokens=16, max_num_seqs=4)
    for seq_id in range(2):  # the second time with a warm cache
        seq = make_sequence(7, num_prompt, max_tokens=3)
        seq.seq_id = seq_id
        scheduler.add(seq)
        while scheduler.running or scheduler.waiting:
            plan = step(scheduler)
            assert all(length >= 1 for _, length in lengths(plan))
        assert seq.num_output == 3
        assert seq.request.num_cached == (0 if seq_id == 0 else (num_prompt - 1) // 16 * 16)


def test_k04_a_full_hit_leaves_a_token_to_compute() -> None:
    scheduler = make_scheduler(20, caching=True)
    prompt = make_sequence(0, 33).token_ids
    hits = []
    for seq_id, length in enumerate([32, 32, 33]):
        seq = make_sequence(0, 33, max_tokens=1)
        seq.seq_id = seq_id
        seq.request.prompt_ids = prompt[:length]
        seq.token_ids = prompt[:length]
        scheduler.add(seq)
        step(scheduler)
        hits.append(seq.request.num_cached)
    assert hits == [0, 16, 32]
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (97, 48)


def test_siblings_share_prompt_pages_in_their_first_step() -> None:
    scheduler = make_scheduler(20, caching=True)
    first = make_sequence(0, 40)
    second = Sequence(1, first.request, 1, 0, list(first.token_ids))
    first.request.sequences.append(second)
    scheduler.add(first)
    scheduler.add(second)
    assert lengths(step(scheduler)) == [(0, 40), (1, 8)]
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]


def test_decode_comes_before_prompts_and_fits_the_budget() -> None:
    scheduler = make_scheduler(64, max_num_batched_tokens=16, max_num_seqs=4)
    scheduler.add(make_sequence(0, 8))
    step(scheduler)
    scheduler.add(make_sequence(1, 40))
    scheduler.add(make_sequence(2, 5))
    assert lengths(step(scheduler)) == [(0, 1), (1, 15)]
    assert lengths(step(scheduler)) == [(0, 1), (1, 15)]
    assert lengths(step(scheduler)) == [(0, 1), (1, 10), (2, 5)]


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    scheduler = make_scheduler(4)
    seq = make_sequence(0, 40)
    scheduler.add(seq)
    scheduler.add(make_sequence(1, 5, max_tokens=2))
    while seq.finish_reason is None:
        plan = step(scheduler)
    assert seq.finish_reason == "length"
    assert scheduler.take_outgrown() == [seq]
    assert len(seq.token_ids) == 4 * 16 + 1  # the last token needs no page
    assert lengths(plan) == [(1, 5)]  # its pages serve the next one in the same step


@settings(max_examples=60)
@given(
    num_pages=st.integers(4, 20),
    budget=st.integers(4, 64),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 40), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    caching=st.booleans(),
)
def test_every_load_is_served_in_order_within_the_limits(
    num_pages: int, budget: int, arrivals: list[tuple[int, int, int, bool]], caching: bool
) -> None:
    scheduler = make_scheduler(num_pages, caching=caching, max_num_batched_tokens=budget, max_num_seqs=4)
    sequences: list[Sequence] = []
    left = [a for a in arrivals if a[1] <= num_pages * 16]
    room: dict[int, int] = {}  # tokens, of each lane's pages
    pause = 0
    for _ in range(6000):
        pause -= 1
        while left and pause <= 0:
            pause, num_prompt, max_tokens, shared = left.pop(0)
            seq = make_sequence(0 if shared else len(sequences), num_prompt, max_tokens)
            seq.seq_id = len(sequences)
            sequences.append(seq)
            scheduler.add(seq)
        if not (left or scheduler.running or scheduler.waiting):
            break
        plan = step(scheduler)
        assert sum(length for _, length in lengths(plan)) <= budget
        assert len(scheduler.running) <= 4
        room |= {lane: len(pages) * 16 for lane, pages in plan.pages.items()}
        assert all(chunk.stop <= room[chunk.lane] for chunk in plan.chunks)
        order = [seq.seq_id for seq in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "someone overtook"
    assert not left
    for seq in sequences:
        outgrown = len(seq.token_ids) == num_pages * 16 + 1
        assert seq.finish_reason == "length"
        assert outgrown or seq.num_output == seq.request.rules.max_tokens
    assert scheduler.pages.num_free == num_pages


def test_scheduling_64_sequences_takes_less_than_a_millisecond() -> None:
    scheduler = make_scheduler(64 * 64, caching=True, max_num_batched_tokens=65536)
    for seq_id in range(64):
        scheduler.add(make_sequence(seq_id, 500))
    step(scheduler)
    times = []
    for _ in range(40):
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduler.commit({chunk.seq_id: 1 for chunk in plan.chunks})
        times.append(time.thread_time() - start)
    assert len(plan.chunks) == 64
    assert sorted(times)[len(times) // 2] < 1e-3
