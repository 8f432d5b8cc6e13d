"""One token on a CPU goes through an int8 model by rows; what it says is what a prompt's tokens say.

The same text is read twice, token by token as it is sampled and then as a prompt, in bfloat16 both times, and
once more in float32 to judge by. Both differ from that by rounding alone, so by about as much.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qinfer import LLM, SamplingParams, jobs
from qinfer.testing import FAMILIES, tiny_model

PROMPT = list(range(3, 40))


def load(folder: Path, dtype: str) -> LLM:
    return LLM(str(folder), dtype=dtype, allow_ungated=True, num_kv_blocks=16)


def as_prompt(llm: LLM, answer: list[int]) -> Tensor:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT + answer}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    told = zip(output.prompt_logprobs[len(PROMPT) :], answer, strict=True)
    return torch.tensor([known[token].logprob for known, token in told if known is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_by_rows_say_what_a_prompt_says(family: str, tmp_path: Path) -> None:
    source = tiny_model(family, tmp_path / "source", dtype="bfloat16", seed=1)
    folder = tmp_path / "int8"
    jobs.quantize(str(source), folder, scheme="w8a8-int8", method="rtn", gate=False, progress=False)
    llm = load(folder, "bfloat16")
    params = SamplingParams(seed=3, max_tokens=32, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    (answer,) = output.outputs
    tokens = list(answer.token_ids)
    assert answer.logprobs is not None
    by_rows = torch.tensor(
        [known[token].logprob for known, token in zip(answer.logprobs, tokens, strict=True)]
    )
    exact = as_prompt(load(folder, "float32"), tokens)
    rounding = (as_prompt(llm, tokens) - exact).abs().mean()
    assert (by_rows - exact).abs().mean() < 1.5 * rounding + 0.003
