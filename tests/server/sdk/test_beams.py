"""Beam search through the OpenAI routes, against a search written out over all logits."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion

BEAMS = {"use_beam_search": True, "ignore_eos": True}


def searched(llm: Any, prompt: list[int], width: int, length: int, penalty: float) -> list[list[int]]:
    """The best continuations, each step over the whole vocabulary; nothing ends early."""
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    for _ in range(length):
        grown = []
        for ids, score in beams:
            logprobs = list(llm.engine.prompt_logits(ids))[-1][-1].log_softmax(-1)
            top = torch.topk(logprobs, 2 * width)
            grown += [
                ([*ids, token], score + value)
                for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        beams = sorted(grown, key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]
    return [ids[len(prompt) :] for ids, _ in beams]


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (3, 0.0)])
def test_completions_are_the_best_beams(client, strictly, reference, width, penalty):
    prompts = [[65, 66, 67], [80, 81]]
    body = {**BEAMS, "length_penalty": penalty, "return_token_ids": True}
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=width, max_tokens=5, logprobs=2, extra_body=body
    )
    strictly(Completion, answer)
    assert [choice.index for choice in answer.choices] == list(range(2 * width))
    found = [choice.token_ids for choice in answer.choices]
    expected = [ids for prompt in prompts for ids in searched(reference, prompt, width, 5, penalty)]
    assert found == expected
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    sums = [sum(choice.logprobs.token_logprobs) for choice in answer.choices[:width]]
    assert sums == sorted(sums, reverse=True)
    assert answer.usage.completion_tokens == 2 * width * 5


def test_chat(client, strictly):
    hello: Any = [{"role": "user", "content": "x"}]
    answer = client.chat.completions.create(model="tiny", messages=hello, n=3, max_tokens=4, extra_body=BEAMS)
    strictly(ChatCompletion, answer)
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"n": 100},
        {"n": 11},  # more log-probabilities than the engine gives
        {"stop": "x"},
        {"echo": True},
        {"logit_bias": {"5": 1}},
        {"extra_body": {**BEAMS, "structured_outputs": {"regex": "a"}}},
        {"extra_body": {**BEAMS, "length_penalty": 10.1}},
        {"extra_body": {**BEAMS, "length_penalty": -1e308}},
    ],
)
def test_what_goes_with_no_beams_is_400(client, more):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{"model": "tiny", "prompt": "x", "extra_body": BEAMS, **more})
