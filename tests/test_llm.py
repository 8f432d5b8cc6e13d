"""The Python face on a tiny model: inputs, order, defaults, progress, refusals."""

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.checkpoint.checkpoint import Checkpoint
from qinfer.checkpoint.compressed_tensors import quantization_config
from qinfer.errors import UserError
from qinfer.llm import LLM
from qinfer.outputs import RequestOutput
from qinfer.quant import scheme_by_name
from qinfer.sampling_params import SamplingParams
from qinfer.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("llm") / "tiny-llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_kv_blocks=64)


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def generate(llm: LLM, *args: Any, **keywords: Any) -> list[RequestOutput]:
    return llm.generate(*args, use_tqdm=False, **keywords)


def test_every_form_of_a_prompt_gives_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the cat")
    forms: list[Any] = ["the cat", {"prompt": "the cat"}, ids, {"prompt_token_ids": ids}, ["the cat"]]
    outputs = [generate(llm, form, GREEDY) for form in forms]
    assert all(len(one) == 1 for one in outputs)
    assert len({tuple(one[0].outputs[0].token_ids) for one in outputs}) == 1
    assert outputs[0][0].prompt == "the cat"
    assert outputs[2][0].prompt is None
    assert outputs[0][0].prompt_token_ids == ids


def test_outputs_come_in_input_order(llm: LLM) -> None:
    prompts = ["a" * (1 + i % 5) for i in range(12)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=1 + (7 * i) % 11, ignore_eos=True) for i in range(12)
    ]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + (7 * i) % 11 for i in range(12)]
    assert generate(llm, [], GREEDY) == []


def test_a_mismatch_of_params_or_a_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 prompts but 1"):
        generate(llm, ["a", "b"], [GREEDY])
    with pytest.raises(UserError) as raised:
        generate(llm, ["a", [99999]], GREEDY)
    assert raised.value.parameter == "prompt"
    with pytest.raises(UserError, match="a prompt is"):
        generate(llm, [{"text": "a"}], GREEDY)
    assert not llm.engine.has_unfinished()


def test_the_users_params_are_not_changed(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    before = params.clone()
    generate(llm, "a", params)
    assert params == before


def test_chat_is_the_template_then_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = llm.get_tokenizer().apply_chat_template(messages)
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert one[0].prompt_token_ids == ids
    assert one[0].outputs[0].text == two[0].outputs[0].text == generate(llm, ids, GREEDY)[0].outputs[0].text
    with pytest.raises(UserError, match="continue_final_message"):
        llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True)


def test_defaults_come_from_generation_config(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    chosen = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 3, "eos_token_id": [258, 256]}
    (tmp_path / "generation_config.json").write_text(json.dumps(chosen))
    llm = LLM(str(tmp_path), num_kv_blocks=16)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 0.9, 3)
    assert len(generate(llm, "abc")[0].outputs[0].token_ids) <= 3
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(UserError, match=r"generation_config\.json: top_p"):
        llm.get_default_sampling_params()


def test_enqueued_prompts_wait_for_completion(llm: LLM) -> None:
    ids = llm.enqueue(["a", "bb"], GREEDY)
    between = generate(llm, "ccc", GREEDY)
    assert between[0].prompt == "ccc"
    done = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in done] == ids
    assert [output.prompt for output in done] == ["a", "bb"]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_progress_follows_the_tqdm_contract(llm: LLM) -> None:
    class Bar:
        def __init__(self, **keywords: Any) -> None:
            self.keywords = keywords
            self.steps: list[int] = []
            self.postfix = keywords["postfix"]
            bars.append(self)

        def update(self, count: int) -> None:
            self.steps.append(count)

        def close(self) -> None:
            self.steps.append(-1)

    bars: list[Bar] = []
    params = SamplingParams(n=2, max_tokens=2, seed=0)
    llm.generate(["a", "b"], params, use_tqdm=Bar)
    (bar,) = bars
    assert bar.keywords["total"] == 4
    assert bar.keywords["desc"] == "Processed prompts"
    assert bar.steps == [2, 2, -1]
    assert bar.postfix.startswith("est. speed input: ")
    assert "toks/s, output: " in bar.postfix


def test_an_interrupt_leaves_an_idle_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = llm.engine.step
    calls = []

    def interrupted() -> list[RequestOutput]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"], GREEDY)
    assert not llm.engine.has_unfinished()
    llm.engine.pages.check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("speculative_config", {}),
        ("cpu_offload_gb", 4),
    ],
)
def test_absent_features_are_named(name: str, value: Any, folder: Path) -> None:
    with pytest.raises(NotImplementedError, match=name):
        LLM(str(folder), **{name: value})


@pytest.mark.parametrize("method", ["encode", "classify", "sleep", "reward"])
def test_absent_methods_are_named(method: str, llm: LLM) -> None:
    with pytest.raises(NotImplementedError, match=method):
        getattr(llm, method)(["a"])


def test_absent_arguments_are_named_and_harmless_ones_accepted(folder: Path, llm: LLM) -> None:
    with pytest.raises(NotImplementedError, match="lora_request"):
        llm.generate("a", GREEDY, lora_request=object())
    LLM(str(folder), num_kv_blocks=4, enforce_eager=True, tensor_parallel_size=1, max_model_len="auto")


def test_a_typing_error_is_a_type_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        LLM(str(folder), max_model_length=5)


def test_dtype_and_quantization_are_checked(folder: Path) -> None:
    with pytest.raises(UserError) as raised:
        LLM(str(folder), dtype="int4")
    assert raised.value.parameter == "dtype"
    with pytest.raises(UserError, match="not quantized"):
        LLM(str(folder), quantization="awq")
    assert LLM(str(folder), dtype="bfloat16", num_kv_blocks=4).engine.kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"model": ""}, "model must be a name, not ''"),
        ({"model": None}, "model must be a name, not None"),
        ({"model": 123}, "model must be a name, not 123"),
        ({"tokenizer": ""}, "model must be a name, not ''"),
        ({"allow_ungated": "yes"}, "allow_ungated must be True or False, not 'yes'"),
        ({"skip_tokenizer_init": 1}, "skip_tokenizer_init must be True or False, not 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, not 'no'"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill must be True or False, not None"),
        ({"memory": "1KiB"}, "the weights alone need .* memory budget is 1.0 KiB"),
        ({"memory": "600KiB"}, "needs .* MiB .* memory budget is 600.0 KiB"),
        ({"memory": "much"}, "'much' is not a size"),
        (
            {"num_kv_blocks": 10**9},
            "KV pool of .* is more than the .* free: ask for fewer than 1,000,000,000",
        ),
        ({"memory": 0}, "memory must be a whole number of at least 1, not 0"),
        ({"memory": 2.5e9}, "memory must be a whole number"),
        ({"seed": "x"}, "seed must be a number, not 'x'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"served_model_name": ""}, "served_model_name must be a name or several, not ''"),
        ({"served_model_name": []}, "served_model_name must be a name or several"),
    ],
)
def test_values_of_the_wrong_kind_are_one_line(folder: Path, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        LLM(**{"model": str(folder), **keywords})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_model_len": 2**20}, r"max_model_len 1048576 exceeds the model's context of \d+ tokens"),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            "max_num_batched_tokens 4 is below max_num_seqs 8",
        ),
        ({"max_num_batched_tokens": 9, "enable_chunked_prefill": False}, "9 is below max_model_len"),
    ],
)
def test_limits_that_contradict_the_model_are_told_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], said: str
) -> None:
    def read(self: Checkpoint, name: str, *_: Any) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    with pytest.raises(AssertionError, match="was read"):
        LLM(str(folder))
    with pytest.raises(UserError, match=said):
        LLM(str(folder), **keywords)


def test_a_path_and_a_size_in_words_will_do(folder: Path) -> None:
    llm = LLM(folder, memory="64MiB")
    assert llm.engine.ledger.budget == 64 << 20
    assert llm.served_model_names == (str(folder),)


def test_iterators_are_refused_since_their_length_is_unknown(llm: LLM) -> None:
    with pytest.raises(UserError, match="prompts is a list_iterator; it must be text"):
        generate(llm, iter(["a"]), GREEDY)
    with pytest.raises(UserError, match="sampling_params must be a SamplingParams or a list"):
        generate(llm, ["a"], iter([GREEDY]))
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match="messages is a list_iterator; it must be a list of messages"):
        llm.chat(iter(messages), GREEDY, use_tqdm=False)
    with pytest.raises(UserError, match=r"messages\[0\] has no content"):
        llm.chat([{"role": "user", "content": None}], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    "prompts", [b"abc", bytearray(b"abc"), [b"abc"], {"prompt_token_ids": b"abc"}, memoryview(b"abc")]
)
def test_bytes_are_neither_text_nor_token_ids(prompts: Any, llm: LLM) -> None:
    with pytest.raises(UserError, match=r"bytes: decode|prompts is a memoryview"):
        generate(llm, prompts, GREEDY)
    assert not llm.engine.has_unfinished()


def test_h02_a_text_too_long_by_its_characters_is_refused_before_it_is_encoded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_args: Any, **_keywords: Any) -> list[int]:
        raise AssertionError("encoded a text that can never fit")

    monkeypatch.setattr(llm.get_tokenizer(), "encode", encode)
    limit = llm.engine.limits.max_model_len
    for text in ("word " * 3_000_000, {"prompt": "word " * 3_000_000}):
        with pytest.raises(UserError, match=f"maximum context length is {limit} .* at least [0-9]+"):
            generate(llm, text, GREEDY)
    with pytest.raises(UserError, match=f"maximum context length is {limit} "):
        llm.chat([{"role": "user", "content": "word " * 100_000}], GREEDY, use_tqdm=False)


def test_without_a_tokenizer_there_are_ids_only(folder: Path) -> None:
    llm = LLM(str(folder), num_kv_blocks=16, skip_tokenizer_init=True)
    output = generate(llm, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 4)
    with pytest.raises(UserError, match="skip_tokenizer_init"):
        generate(llm, "text", GREEDY)
    with pytest.raises(UserError) as raised:
        generate(llm, [1], SamplingParams(stop="a"))
    assert raised.value.parameter == "stop"


def with_kv_scales(folder: Path, target: Path, scale: float) -> Path:
    """The folder as a checkpoint that was made for an fp8 cache."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    for i in range(2):
        for name in "kv":
            tensors[f"model.layers.{i}.self_attn.{name}_scale"] = torch.tensor([scale if i else 0.05])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    weights = quantization_config(scheme_by_name("w8a16-int8"), ignore=["re:.*"])  # none are quantized
    config["quantization_config"] = {**weights, "kv_cache_scheme": fp8}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_checkpoint_with_kv_scales_gets_an_fp8_cache(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(with_kv_scales(folder, tmp_path / "m", 0.25)), num_kv_blocks=16, allow_ungated=True)
    assert llm.engine.kv_cache_dtype == "fp8"
    assert [layer.k_scale for layer in llm.engine.runner.pool.layers] == pytest.approx([0.05, 0.25])
    assert "saturate" not in caplog.text


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_k13_invalid_scales_in_a_checkpoint(bad: float, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"k_scale of layer 1 is {bad}"):
        LLM(str(with_kv_scales(folder, tmp_path / "m", bad)), num_kv_blocks=16, allow_ungated=True)


def test_m07_a_deleted_llm_gives_its_weights_back(folder: Path) -> None:
    llm = LLM(str(folder), num_kv_blocks=8)
    generate(llm, "a", GREEDY)
    decoder = llm.engine.runner.decoder
    alive = [weakref.ref(decoder.embedding), weakref.ref(llm.engine.runner.pool.layers[0].k)]
    del llm, decoder
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
