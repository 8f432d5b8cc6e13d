"""Priorities: who starts first, who gives way, and that equal ones change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.engine.engine import Engine
from qinfer.engine.options import EngineOptions, StepLimits
from qinfer.engine.pages import PagePool
from qinfer.engine.request import Request, Sequence, StopRules
from qinfer.engine.scheduler import Scheduler
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams


def make_scheduler(num_pages: int, *, max_num_seqs: int = 64) -> Scheduler:
    return Scheduler(StepLimits(4096, max_num_seqs, 256, 16), PagePool(num_pages, 16, caching=False))


def make_sequence(seq_id: int, num_prompt: int, priority: int, max_tokens: int = 1000) -> Sequence:
    prompt = [(seq_id * 1009 + i) % 5000 for i in range(num_prompt)]
    rules = StopRules(frozenset(), frozenset(), 0, max_tokens)
    request = Request(str(seq_id), prompt, SamplingParams(), rules, priority=priority)
    seq = Sequence(seq_id, request, 0, 0, list(prompt))
    request.sequences.append(seq)
    return seq


def step(scheduler: Scheduler) -> list[int]:
    """One step in which every sampled token is 1; the sequences that start in it."""
    plan = scheduler.schedule()
    scheduler.commit({chunk.seq_id: 1 for chunk in plan.chunks if chunk.sample})
    scheduler.pages.check([seq.pages for seq in scheduler.running])
    return [chunk.seq_id for chunk in plan.chunks if chunk.start == 0]


def ranks(queue: Any) -> list[tuple[int, int]]:
    return [(seq.request.priority, seq.seq_id) for seq in queue]


def test_the_smaller_priority_starts_first_and_equals_in_order_of_arrival() -> None:
    scheduler = make_scheduler(40, max_num_seqs=1)
    for seq_id, priority in enumerate([0, 5, -1, 5, -1, 0]):
        scheduler.add(make_sequence(seq_id, 8, priority, max_tokens=2))
    started: list[int] = []
    while scheduler.waiting or scheduler.running:
        started += step(scheduler)
    assert started == [2, 4, 0, 5, 1, 3]


def test_a_better_one_that_waits_takes_no_place_from_one_that_runs() -> None:
    scheduler = make_scheduler(40, max_num_seqs=2)
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 8, 0, max_tokens=5))
    step(scheduler)
    scheduler.add(make_sequence(2, 8, -7, max_tokens=5))
    step(scheduler)
    assert [seq.seq_id for seq in scheduler.running] == [0, 1]
    assert scheduler.num_preemptions == 0


def test_the_worst_priority_gives_way_though_it_came_first() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(make_sequence(0, 15, 9))
    step(scheduler)
    scheduler.add(make_sequence(1, 15, 0))
    while not scheduler.num_preemptions:
        step(scheduler)
    assert [seq.seq_id for seq in scheduler.running] == [1]
    assert [seq.seq_id for seq in scheduler.waiting] == [0]


@settings(max_examples=60)
@given(
    num_pages=st.integers(4, 20),
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 40), st.integers(-2, 2)),
        min_size=1,
        max_size=14,
    ),
)
def test_every_load_is_served_with_both_queues_in_order(
    num_pages: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    scheduler = make_scheduler(num_pages, max_num_seqs=4)
    left = [a for a in arrivals if a[1] <= num_pages * 16]
    sequences: list[Sequence] = []
    pause = 0
    for _ in range(6000):
        pause -= 1
        while left and pause <= 0:
            pause, num_prompt, max_tokens, priority = left.pop(0)
            sequences.append(make_sequence(len(sequences), num_prompt, priority, max_tokens))
            scheduler.add(sequences[-1])
        if not (left or scheduler.running or scheduler.waiting):
            break
        step(scheduler)
        for queue in (scheduler.running, scheduler.waiting):
            assert ranks(queue) == sorted(ranks(queue))
    assert not left
    for seq in sequences:
        outgrown = len(seq.token_ids) == num_pages * 16 + 1
        assert outgrown or seq.num_output == seq.request.rules.max_tokens
    assert scheduler.pages.num_free == num_pages


def test_priorities_change_who_waits_and_not_what_is_said(make_engine: Callable[..., Engine]) -> None:
    def run(priorities: list[int]) -> tuple[list[str], dict[str, list[int]]]:
        engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
        for i, priority in enumerate(priorities):
            engine.add(str(i), [97 + i] * 9, SamplingParams(temperature=0, max_tokens=6), priority=priority)
        ended: dict[str, list[int]] = {}
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
        return list(ended), ended

    (first, expected), (second, found) = run([0, 0, 0]), run([2, 1, 0])
    assert (first, second) == (["0", "1", "2"], ["2", "1", "0"])
    assert found == expected


def test_a_priority_is_refused_where_nobody_obeys_it(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(UserError, match="order of arrival") as raised:
        make_engine().add("a", [97] * 5, SamplingParams(), priority=1)
    assert raised.value.parameter == "priority"
    with pytest.raises(UserError, match="whole number"):
        make_engine(scheduling_policy="priority").add("a", [97], SamplingParams(), priority=0.5)
    with pytest.raises(UserError, match="scheduling_policy must be fcfs or priority, not 'lottery'"):
        EngineOptions(scheduling_policy="lottery")


def test_prompts_of_an_llm_have_a_priority_each(byte_level_folder: Path) -> None:
    llm = LLM(str(byte_level_folder), num_kv_blocks=16, scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[3, 1, 2])
    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    started = [output.metrics.scheduled_ts for output in outputs if output.metrics]
    assert sorted(range(3), key=started.__getitem__) == [1, 2, 0]
    with pytest.raises(UserError, match="3 prompts but 1 priorities"):
        llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[1])
