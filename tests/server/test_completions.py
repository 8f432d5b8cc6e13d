"""/v1/completions over HTTP: choices, echo, logprobs, streams that equal their whole twins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qinfer.sampling_params import SamplingParams

PATH = "/v1/completions"


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_whole_answer_has_every_field(served):
    answer = served.post(PATH, {"prompt": "Hello", "max_tokens": 5}, headers={"x-request-id": "r-1"}).json()
    ids = served.engine.tokenizer.encode("Hello")
    text = "".join(chr(token) for token in served.scripted.script(ids, 0)[:5])
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("qinfer-0.1.0-")
    assert answer == {
        "id": "cmpl-r-1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": len(ids),
            "completion_tokens": 5,
            "total_tokens": len(ids) + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("body", [{}, {"max_tokens": None}])
def test_h03_unset_max_tokens_is_16(served, body):
    assert served.post(PATH, {"prompt": "a", **body}).json()["usage"]["completion_tokens"] == 16


def test_choices_run_over_prompts_then_n(served):
    prompts = ["one", [97, 98], "three"]
    body = {"prompt": [served.engine.tokenizer.encode("one"), [97, 98]], "n": 2, "max_tokens": 4}
    answer = served.post(PATH, body).json()
    script = served.scripted.script
    expected = [
        "".join(map(chr, script(ids, k)[:4]))
        for ids in (served.engine.tokenizer.encode("one"), [97, 98])
        for k in (0, 1)
    ]
    assert [c["text"] for c in answer["choices"]] == expected
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens"] == len(served.engine.tokenizer.encode("one")) + 2
    mixed = served.post(PATH, {"prompt": prompts})
    assert mixed.status_code == 400


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 0, "n": 3}])
def test_stream_says_what_the_whole_answer_says(served, more):
    body = {"prompt": ["Hello", "\n1. Carol has 20"], "max_tokens": 12, "stop": ["zq"], **more}
    whole = served.post(PATH, body).json()
    chunks = served.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(chunks, index) == choice["text"]
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in parts if c["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] is not None
        if choice["logprobs"] is not None:
            for key, values in choice["logprobs"].items():
                assert [v for part in parts for v in part["logprobs"][key]] == values


@pytest.mark.parametrize("stream", [False, True])
def test_h15_echo_with_logprobs_is_aligned(served, stream):
    prompt = "\n1. Carol has 20"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 6}
    if stream:
        parts = [c for chunk in served.stream(PATH, body) for c in chunk["choices"]]
    else:
        parts = served.post(PATH, body).json()["choices"]
    text = "".join(part["text"] for part in parts)
    logprobs = {key: [v for p in parts for v in p["logprobs"][key]] for key in parts[0]["logprobs"]}
    ids = served.engine.tokenizer.encode(prompt)
    assert text.startswith(prompt)
    assert {len(values) for values in logprobs.values()} == {len(ids) + 6}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == -0.25
    assert logprobs["token_logprobs"][-1] == -0.5
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)


def test_h15_a_token_behind_half_a_character_begins_behind_it(serve_scripted):
    spoken = [0xC3, 97, 0xC3, 0xA9, 98, 258, 99]  # half of an e acute, a, the whole of one, b, the end, c
    with serve_scripted(lambda prompt, choice: spoken) as served:
        body = {"prompt": "x", "logprobs": 0, "max_tokens": len(spoken), "ignore_eos": True}
        (choice,) = served.post(PATH, body).json()["choices"]
        streamed = [c["logprobs"] for chunk in served.stream(PATH, body) for c in chunk["choices"]]
    assert choice["text"] == "\ufffda\u00e9bc"
    assert choice["logprobs"]["tokens"] == ["\ufffd", "a", "\ufffd", "\ufffd", "b", "<|im_end|>", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4, 4]
    assert [offset for one in streamed for offset in one["text_offset"]] == [0, 1, 2, 2, 3, 4, 4]


def test_echo_with_no_tokens_scores_the_prompt(served):
    ids = served.engine.tokenizer.encode("Score this")
    for body in ({"prompt": "Score this"}, {"prompt": ids}):
        answer = served.post(PATH, {**body, "echo": True, "max_tokens": 0, "logprobs": 1}).json()
        (choice,) = answer["choices"]
        assert choice["text"] == "Score this"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
        assert answer["usage"]["completion_tokens"] == 0
    assert served.post(PATH, {"prompt": "a", "max_tokens": 0}).json()["error"]["param"] == "max_tokens"


def test_p12_minus_infinity_is_valid_json(served):
    answer = served.post(PATH, {"prompt": "a", "max_tokens": 2, "logprobs": 5})
    body = json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) == -9999.0
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]


def test_tokens_as_ids(served):
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    body["return_token_ids"] = True
    (choice,) = served.post(PATH, body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert list(choice["logprobs"]["top_logprobs"][0]) == choice["logprobs"]["tokens"][:1]
    assert choice["prompt_token_ids"] == served.engine.tokenizer.encode("ab")


def test_prompt_logprobs(served):
    (choice,) = served.post(PATH, {"prompt": [97, 98, 99], "prompt_logprobs": 1}).json()["choices"]
    entry = {"logprob": -0.25, "rank": 1, "decoded_token": None}
    assert choice["prompt_logprobs"] == [None, {"98": entry}, {"99": entry}]
    assert served.post(PATH, {"prompt": "a", "prompt_logprobs": 1, "stream": True}).status_code == 400


def test_truncation_keeps_the_end(served):
    body = {
        "prompt": list(range(97, 120)),
        "truncate_prompt_tokens": 4,
        "return_token_ids": True,
        "echo": True,
    }
    (choice,) = served.post(PATH, body).json()["choices"]
    assert choice["prompt_token_ids"] == [116, 117, 118, 119]
    assert choice["text"].startswith("tuvw")


EVERY_FIELD: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.8,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 7,
    "top_k": 11,
    "min_p": 0.25,
    "repetition_penalty": 1.25,
    "stop_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [97, 98],
    "bad_words": ["bad"],
    "prompt_logprobs": 3,
    "stream_interval": 4,
    "max_tokens": 9,
    "logprobs": 3,
}


def test_p16_every_field_arrives(served):
    body = {
        **EVERY_FIELD,
        "stop": "zzz",
        "logit_bias": {"7": 200, "8": -1.5},
        "priority": 3,
        "cache_salt": "s",
    }
    assert served.post(PATH, {"prompt": "a", **body}).status_code == 200
    (params,) = served.scripted.seen
    assert {name: getattr(params, name) for name in EVERY_FIELD} == EVERY_FIELD
    assert params.stop_strings == ("zzz",)
    assert params.logit_bias == {7: 100.0, 8: -1.5}
    assert served.scripted.extras == [(3, "s")]


def test_p16_request_then_server_then_default(serve_scripted):
    with serve_scripted(defaults=SamplingParams(temperature=0.6, top_k=20)) as served:
        served.post(PATH, {"prompt": "a", "top_k": 5})
    (params,) = served.scripted.seen
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 5, 1.0)


def test_stream_interval_joins_tokens(serve_scripted):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.005
        body = {"prompt": "a", "max_tokens": 10, "stream_interval": 4, "return_token_ids": True}
        chunks = served.stream(PATH, body)
    sizes = [len(c["token_ids"]) for chunk in chunks for c in chunk["choices"]]
    assert sum(sizes) == 10
    assert all(size >= 4 for size in sizes[1:-1])
    assert len(sizes) <= 4


def test_continuous_usage(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.stream(PATH, {"prompt": [97, 98], "max_tokens": 3, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
