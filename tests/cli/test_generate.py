"""`qinfer generate` with tiny random models: what it prints, and what it refuses."""

import json

import pytest

from qinfer.testing import tiny_model
from qinfer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("qwen3", tmp_path_factory.mktemp("generate") / "model")


def test_generate_answers_in_json_and_text(qinfer, model):
    options = ("-p", "hello", "-p", "other", "--max-tokens", 5, "--temperature", 0, "--memory", "1GiB")
    code, out, err = qinfer("generate", model, *options, "--json")
    assert code == 0
    document = json.loads(out)
    assert [output["prompt"] for output in document["outputs"]] == ["hello", "other"]
    for output in document["outputs"]:
        (answer,) = output["answers"]
        assert 1 <= len(answer["token_ids"]) <= 5
        assert answer["finish_reason"] in ("length", "stop")
    assert document["gate"]["state"] == "dense"
    assert document["ledger"]["budget"] == 2**30
    assert document["ledger"]["tokens"] >= document["max_model_len"] == 256
    assert "dense weights: no verdict needed" in err
    text = qinfer("generate", model, *options).stdout
    for output in document["outputs"]:
        assert f"> {output['prompt']}\n{output['answers'][0]['text']}" in text


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8", "fp8"])
def test_m05_planned_and_loaded_pools_agree(qinfer, model, kv_cache_dtype):
    shared = ("--memory", "64MiB", "--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--json")
    shared += ("--kv-cache-dtype", kv_cache_dtype)
    plan = json.loads(qinfer("plan", model, *shared, "--scheme", "dense", "--device", "cpu").stdout)
    (planned,) = plan["rows"]
    loaded = json.loads(qinfer("generate", model, "-p", "x", "--max-tokens", 1, *shared).stdout)["ledger"]
    assert loaded["pages"] == pytest.approx(planned["pages"], rel=0.02)


def test_generate_is_the_same_as_the_python_face(qinfer, model):
    from qinfer import LLM, SamplingParams

    (expected,) = LLM(str(model)).generate(
        "hello", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False
    )
    code, out, _ = qinfer("generate", model, "-p", "hello", "--max-tokens", 8, "--temperature", 0)
    assert code == 0
    assert out == expected.outputs[0].text + "\n"


def test_chat_goes_through_the_template(qinfer, model):
    options = ("-p", "hi", "--max-tokens", 3, "--seed", 1, "-n", 2, "--temperature", 1, "--json")
    plain = json.loads(qinfer("generate", model, *options).stdout)["outputs"][0]
    chat = json.loads(qinfer("generate", model, *options, "--chat", "--system", "short").stdout)["outputs"][0]
    tokenizer = Tokenizer.load(model)
    conversation = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    assert plain["num_prompt_tokens"] == len(tokenizer.encode("hi"))
    assert chat["num_prompt_tokens"] == len(tokenizer.apply_chat_template(conversation))
    assert len(plain["answers"]) == len(chat["answers"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--system", "x"), "--system needs --chat"),
        (("--memory", "1KiB"), "memory budget is 1.0 KiB"),
        (("--kv-cache-dtype", "int4"), "kv_cache_dtype must be one of"),
        (("--max-model-len", 1000), "exceeds the model's context of 256 tokens"),
        (("--temperature", -1), "temperature"),
        (("--dtype", "int7"), "dtype must be"),
        (("--block-size", 12), "power of two"),
    ],
)
def test_mistakes_are_one_line(qinfer, model, options, said):
    code, out, err = qinfer("generate", model, "-p", "hello", *options)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-p", "x", "--temperature", -1), "temperature must be finite and lie in [0, 2], not -1.0"),
        (("-p", "x", "--top-p", 3), "top_p must be finite and lie in (0, 1], not 3.0"),
        (("-p", "x", "--top-k", -5), "top_k must lie in"),
        (("-p", "x", "--stop", ""), "stop holds an empty string"),
        (("-p", "x", "-n", 2, "--temperature", 0), "n is 2 with temperature 0"),
        (("-p", "x", "-p", ""), "--prompt is empty: give at least one character"),
        (("-p", "x\udcff"), "--prompt is not valid Unicode"),
    ],
)
def test_what_no_model_could_do_is_refused_before_one_is_loaded(qinfer, monkeypatch, model, options, said):
    def load(*_args, **_keywords):
        raise AssertionError("loaded a model")

    monkeypatch.setattr("qinfer.llm.LLM.__init__", load)
    code, out, err = qinfer("generate", model, *options)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_the_models_own_temperature_stays_unless_one_is_given(qinfer, monkeypatch, tmp_path):
    from qinfer import LLM

    folder = tiny_model("qwen3", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 9}))
    seen = []
    generate = LLM.generate

    def spy(self, prompts, params):
        seen.append(params)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", spy)
    assert qinfer("generate", folder, "-p", "x", "--max-tokens", 1, "--top-k", 3, "-n", 2).code == 0
    assert (seen[0].temperature, seen[0].top_k, seen[0].n, seen[0].max_tokens) == (0.7, 3, 2, 1)
