"""The ledger on a GPU: planned as measured, obeyed under the worst load, refused where it cannot be."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from qinfer.bench.plan import Setting, side_by_side
from qinfer.checkpoint.dummy import open_dummy
from qinfer.config import ModelConfig
from qinfer.engine.activations import RUNTIME
from qinfer.engine.budget import Space
from qinfer.engine.footprint import GIB
from qinfer.engine.options import EngineOptions, settle_limits
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.model.decoder import load_decoder
from qinfer.model.storage import tensor_bytes
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_config

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "dtype": "bfloat16",
}
OPTIONS = {"memory": 4 * GIB, "max_num_seqs": 32}
SCHEMES = [("dense", "auto"), ("w8a8-fp8", "fp8"), ("w8a8-int8", "int8"), ("w4a16", "fp8")]
MIB = 1 << 20
Make = Callable[..., LLM]


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    """cuBLAS keeps a workspace of 32 MiB from its first product on, which only the first engine would count.

    No engine of another test lives on, or its graphs would lose it.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing but a config.json."""
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(tiny_config("llama", **SHAPE)))
    return path


@pytest.fixture
def make(folder: Path) -> Make:
    def made(scheme: str = "dense", kv: str = "auto", **options: Any) -> LLM:
        return LLM(
            str(folder),
            load_format="dummy",
            scheme=scheme,
            kv_cache_dtype=kv,
            skip_tokenizer_init=True,
            allow_ungated=True,
            **{**OPTIONS, **options},
        )

    return made


def planned(folder: Path, scheme: str, kv: str) -> Any:
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    options = EngineOptions(**OPTIONS)
    limits = settle_limits(options, config.context_len, on_gpu=True)
    (row, *_) = side_by_side(config, Setting(options, limits, Space(True, 4 * GIB, 4 * GIB)), scheme, kv)
    return row


@pytest.mark.parametrize(("scheme", "kv"), SCHEMES)
def test_the_plan_is_what_is_measured_and_no_load_takes_more(
    scheme: str, kv: str, folder: Path, make: Make
) -> None:
    """Within 2 % of the tokens; then long prompts at the fullest batch, with all that copies logits."""
    before = torch.cuda.memory_reserved()
    llm = make(scheme, kv)
    ledger, row = llm.engine.ledger, planned(folder, scheme, kv)
    assert ledger.tokens == pytest.approx(row.ledger.tokens, rel=0.02), (ledger, row.ledger)
    assert ledger.weights == pytest.approx(row.weights, rel=0.002)
    assert ledger.unquantized.tokens == pytest.approx(row.ledger.unquantized.tokens, rel=0.02)
    assert llm.engine.limits.max_num_batched_tokens == row.limits.max_num_batched_tokens

    torch.cuda.reset_peak_memory_stats()
    share = ledger.tokens // OPTIONS["max_num_seqs"]
    lengths = [llm.engine.limits.max_model_len - 20, *[share - 20] * 31, *[3, 500, 1500] * 8]
    asks = {"repetition_penalty": 1.1, "logprobs": 20, "logit_bias": {5: 1.0}, "top_p": 0.9}
    params = [
        SamplingParams(
            max_tokens=8,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=5 if i % 7 == 3 else None,
            **(asks if i % 2 else {"temperature": 0.0}),
        )
        for i in range(len(lengths))
    ]
    prompts = [{"prompt_token_ids": [(7 * i + j) % 31000 for j in range(n)]} for i, n in enumerate(lengths)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * len(lengths)
    # beside torch's there is CUDA's own memory, RUNTIME; page 0 is in the reserve too
    assert torch.cuda.max_memory_allocated() - before <= ledger.budget - RUNTIME
    assert torch.cuda.max_memory_reserved() - before <= 1.02 * (ledger.budget - RUNTIME)


@pytest.mark.parametrize("scheme", ["dense", "w8a8-fp8", "w4a16"])
def test_loading_leaves_no_holes(scheme: str, folder: Path) -> None:
    """Beside the tensors there is the end of a segment of 20 MiB for those of less than 10."""
    before = torch.cuda.memory_reserved()
    decoder = load_decoder(open_dummy(folder, scheme), device=torch.device("cuda"))
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= tensor_bytes(decoder) + 48 * MIB


def test_m04_graphs_are_accounted_and_leave_the_pool(make: Make) -> None:
    llm = make()
    graphs = llm.engine.runner.graphs
    assert 0 < graphs.num_bytes <= llm.engine.ledger.graphs * 1.25 + 16 * MIB
    tokens = llm.engine.ledger.tokens
    del llm, graphs
    gc.collect()
    eager = make(enforce_eager=True).engine.ledger
    assert eager.graphs == 0
    assert 0.9 * eager.tokens <= tokens <= 1.01 * eager.tokens


def test_m01_more_than_is_free_is_refused_before_anything_is_loaded(make: Make) -> None:
    before = torch.cuda.memory_allocated()
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")  # as of another engine on the device
    with pytest.raises(UserError, match=r"memory budget of .* \(0\.9999 of .* GiB\) is more than the"):
        make(memory=None, gpu_memory_utilization=0.9999)
    with pytest.raises(UserError, match=r"weights alone need .* nothing was loaded"):
        make(memory=GIB // 2)
    assert torch.cuda.memory_allocated() - before == held.nbytes


HOLD = """
import sys, torch
held = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.large_gpu_memory
def test_m01_what_another_process_holds_is_no_part_of_a_share(make: Make) -> None:
    share = {"memory": None, "gpu_memory_utilization": 4 * GIB / torch.cuda.mem_get_info()[1]}
    make(**share)  # what a process takes once, as cuBLAS's workspace
    alone = make(**share).engine.ledger
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            engines = [make(**share) for _ in range(2)]
        finally:
            other.stdin.close()
    for llm in engines:
        assert llm.engine.ledger.tokens == pytest.approx(alone.tokens, rel=0.02)


def test_m07_engines_one_after_the_other_give_all_back(make: Make) -> None:
    left = []
    for _ in range(3):
        llm = make(num_kv_blocks=64, memory=None)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        del llm
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert max(left) - left[0] < 50 * MIB


def test_a_length_is_fitted_to_the_pool_and_a_chosen_one_is_not(make: Make, caplog: Any) -> None:
    ledger = make(memory=2000 * MIB).engine.ledger
    assert ledger.sequences == 1
    assert ledger.max_model_len == ledger.tokens < 16384
    assert "max_model_len is" in caplog.text
    with pytest.raises(UserError, match="max_model_len 16384 is more than"):
        make(memory=2000 * MIB, max_model_len=16384)
