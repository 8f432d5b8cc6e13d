"""Sampling parameters at the ends of what they may be: an answer, never an engine that died."""

from __future__ import annotations

from pathlib import Path

import pytest

from qinfer import LLM, SamplingParams


@pytest.mark.parametrize("penalty", [1e-308, 1e-38, 1e-5, 1e5, 1e38, 1e308])
@pytest.mark.parametrize("temperature", [0.0, 1.01e-5, 1.0])
def test_a_repetition_penalty_of_any_size(
    byte_level_folder: Path, penalty: float, temperature: float
) -> None:
    llm = LLM(str(byte_level_folder), num_kv_blocks=16)
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, max_tokens=4, logprobs=2, ignore_eos=True, seed=1
    )
    (answer,) = llm.generate(["hi"], params, use_tqdm=False)[0].outputs
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.01e-5, 1.0])
@pytest.mark.parametrize("bias", [1e39, 1e308])
def test_a_bias_of_any_size_decides(byte_level_folder: Path, bias: float, temperature: float) -> None:
    llm = LLM(str(byte_level_folder), num_kv_blocks=16)
    params = SamplingParams(
        temperature=temperature, logit_bias={77: bias}, max_tokens=3, ignore_eos=True, seed=1
    )
    (answer,) = llm.generate(["hi"], params, use_tqdm=False)[0].outputs
    assert answer.token_ids == [77] * 3
