"""Outputs that went to another process in parts are the outputs that left the engine."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qinfer.live_request import Ask
from qinfer.output_parts import Cutter, Joiner
from qinfer.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from qinfer.sampling_params import SamplingParams

PROMPT = [5, 6]


def outputs_of(lengths: list[list[int]], *, scored: bool) -> list[RequestOutput]:
    """One output for each row of `lengths`, in tokens by choice; those of the last row have finished."""
    texts = [[chr(97 + (i * 7 + k) % 26) * (i % 3) for i in range(64)] for k in range(len(lengths[0]))]
    made = []
    for row in lengths:
        choices = []
        for k, length in enumerate(row):
            logprobs = [{t: Logprob(-0.5 * t, 1)} for t in range(length)] if scored else None
            ended = "length" if length == lengths[-1][k] else None
            text, total = "".join(texts[k][:length]), -1.0 * length if scored else None
            choices.append(CompletionOutput(k, text, list(range(length)), total, logprobs, ended, None))
        finished = row is lengths[-1]
        times = RequestStateStats(last_token_ts=float(sum(row)))
        embedding = [0.6, 0.8] if finished else None
        made.append(RequestOutput("r", "p", PROMPT, None, choices, finished, times, 1, embedding))
    return made


@given(
    steps=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=12),
    scored=st.booleans(),
)
def test_joined_outputs_are_those_that_were_cut(steps, scored):
    rows, row = [], [0, 0, 0]
    for step in [*steps, [1, 1, 1]]:
        row = [before + more for before, more in zip(row, step, strict=True)]
        rows.append(row)
    params = SamplingParams(n=3, temperature=1.0, logprobs=1 if scored else None)
    cutter, joiner = Cutter(), Joiner(Ask("r", PROMPT, params, "p"))
    kept = []
    for output in outputs_of(rows, scored=scored):
        assert joiner.add(pickle.loads(pickle.dumps(cutter.cut(output)))) is output.finished
        joined = joiner.output()
        if output.finished:
            assert joined == output
        assert replace(joined, metrics=None) == replace(output, metrics=None)
        kept.append((joined, copy.deepcopy(joined)))
    assert all(joined == then for joined, then in kept), "what was joined has not changed since"


def test_what_was_sent_is_not_sent_again():
    cutter = Cutter()
    output = RequestOutput("r", "p", PROMPT, None, [CompletionOutput(0, "ab", [1, 2])], False)
    cutter.cut(output)
    output.outputs = [CompletionOutput(0, "abc", [1, 2, 3])]
    assert cutter.cut(output) == ([(0, "c", [3], None, None, None, None)], None)
    assert cutter.cut(output) == ([], None)
