"""`qinfer bench` on tiny models: vLLM's keys, sums that add up, dummy weights, what is refused."""

import json

import pytest

from qinfer.testing import tiny_config, tiny_model

VLLM_KEYS = {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama3", tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(tiny_config("llama3", dtype="bfloat16")))
    return folder


def test_throughput_has_vllms_keys_and_more(qinfer, model, tmp_path):
    target = tmp_path / "result.json"
    options = (
        "--num-prompts",
        9,
        "--input-len",
        12,
        "--output-len",
        4,
        "--max-num-seqs",
        4,
        "--num-warmups",
        2,
    )
    code, out, err = qinfer("bench", "throughput", model, *options, "--json", "--output-json", target)
    assert code == 0, err
    document = json.loads(out)
    assert json.loads(target.read_text()) == document
    assert document.keys() >= VLLM_KEYS
    assert (document["num_requests"], document["total_num_tokens"]) == (9, 9 * 16)
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (108, 36)
    seconds = document["elapsed_time"]
    assert document["tokens_per_second"] == pytest.approx(144 / seconds)
    assert document["requests_per_second"] == pytest.approx(9 / seconds)
    bound = document["roofline"]
    assert bound["seconds"] == pytest.approx(bound["prefill_seconds"] + bound["decode_seconds"])
    assert bound["output_tokens_per_second"] == pytest.approx(36 / bound["seconds"])
    assert document["roofline_fraction"] == pytest.approx(bound["seconds"] / seconds)
    assert document["batch_occupancy"]["max_running"] <= 4
    assert 0 < document["batch_occupancy"]["share"] <= 1
    assert document["prefix_cache"]["hit_rate"] == 0.0  # warm-ups asked for other prompts
    assert document["warmup"]["requests"] == 2
    assert document["gate"]["state"] == "dense"
    assert document["ledger"]["label"] == document["quantization"] == "float32"
    assert "Throughput:" not in out + err


def test_throughput_as_text_tells_the_roofline_first(qinfer, model):
    options = ("--num-prompts", 3, "--input-len", 5, "--output-len", 3, "--num-warmups", 0)
    code, out, _ = qinfer("bench", "throughput", model, *options)
    assert code == 0
    lines = out.splitlines()
    assert "GB/s copied" in lines[0]
    assert lines[1].startswith("roofline: ")
    assert "dense weights: no verdict needed" in lines[2]
    assert lines[-1].startswith("Throughput: ")
    assert "output tokens/s" in lines[-1]


def test_a_shared_prefix_shows_in_the_hit_rate(qinfer, model):
    options = ("--num-prompts", 8, "--input-len", 4, "--random-prefix-len", 64, "--output-len", 2)
    shared = ("bench", "throughput", model, *options, "--max-num-seqs", 1, "--num-warmups", 0, "--json")
    document = json.loads(qinfer(*shared).stdout)
    assert 0.7 < document["prefix_cache"]["hit_rate"] < 0.9  # all but the first find its 64 of 68
    document = json.loads(qinfer(*shared, "--no-enable-prefix-caching").stdout)
    assert document["prefix_cache"]["hit_rate"] == 0.0


def test_static_sorted_and_spread(qinfer, model):
    options = ("--num-prompts", 12, "--input-len", 6, "--output-len", 10, "--random-range-ratio", 0.9)
    options += ("--random-spread", "log", "--max-num-seqs", 4, "--num-warmups", 0, "--json")
    plain = json.loads(qinfer("bench", "throughput", model, *options, "--scheduling", "static").stdout)
    by_length = json.loads(
        qinfer("bench", "throughput", model, *options, "--scheduling", "static", "--sort-by-length").stdout
    )
    assert plain["total_output_tokens"] == by_length["total_output_tokens"]
    assert by_length["batch_occupancy"]["steps"] < plain["batch_occupancy"]["steps"]


@pytest.mark.parametrize(
    ("scheme", "label", "bits"),
    [
        (("--scheme", "w4a16", "--group-size", 32, "--sym"), "w4a16 g32 sym", 4),
        (("--scheme", "w8a8-fp8", "--kv-cache-dtype", "fp8"), "w8a8-fp8 + fp8 KV", 8),
        ((), "bfloat16", 16),
    ],
)
def test_dummy_weights_need_a_config_alone(qinfer, config_alone, scheme, label, bits):
    options = ("--load-format", "dummy", *scheme, "--num-prompts", 3, "--input-len", 5, "--output-len", 3)
    code, out, err = qinfer("bench", "throughput", config_alone, *options, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["quantization"], document["weight_bits"]) == (label, bits)
    assert document["gate"]["state"] == "ungated"
    assert document["total_output_tokens"] == 9


def test_a_tokenizer_may_come_from_elsewhere(qinfer, config_alone, model, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\nanother one\n")
    options = ("--load-format", "dummy", "--dataset-name", "custom", "--output-len", 3)
    options += ("--dataset-path", tmp_path / "prompts.txt", "--json")
    assert qinfer("bench", "throughput", config_alone, *options).code == 2
    code, out, err = qinfer("bench", "throughput", config_alone, *options, "--tokenizer", model)
    assert code == 0, err
    assert json.loads(out)["total_output_tokens"] == 6


def test_latency_has_vllms_keys_and_more(qinfer, model):
    options = ("--input-len", 8, "--output-len", 4, "--batch-size", 3, "--num-iters", 4)
    code, out, err = qinfer("bench", "latency", model, *options, "--num-iters-warmup", 1, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert len(document["latencies"]) == 4
    assert document["avg_latency"] == pytest.approx(sum(document["latencies"]) / 4)
    assert list(document["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(document["latencies"]) <= document["percentiles"]["10"] <= document["percentiles"]["99"]
    assert 0 < document["avg_first_token_seconds"] < document["avg_latency"]
    assert document["output_tokens_per_second"] == pytest.approx(12 / document["avg_latency"])
    assert document["prefix_cache"]["hit_rate"] == 0.0  # the cache is off: every iteration computes all
    text = qinfer("bench", "latency", model, *options, "--num-iters-warmup", 0).stdout
    assert "Avg latency: " in text
    assert "99% percentile latency: " in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scheme", "w4a16"), "is for load_format='dummy'"),
        (("--load-format", "gguf"), "auto, safetensors, dummy"),
        (("--load-format", "dummy", "--scheme", "int9"), "w8a8-fp8"),
        (("--scheduling", "dynamic"), "continuous, static"),
        (("--output-json", "/no/such/folder/x.json"), "no such folder"),
        (("--num-prompts", "0"), "qinfer bench throughput --help"),
    ],
)
def test_mistakes_are_one_line(qinfer, model, options, said):
    code, out, err = qinfer("bench", "throughput", model, *options)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_help_lists_both(qinfer):
    code, out, _ = qinfer("bench", "--help")
    assert code == 0
    assert "throughput" in out
    assert "latency" in out
