"""/v1/chat/completions over HTTP: the template, roles first, limits, logprobs, odd message lists."""

from __future__ import annotations

import json

import pytest

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_whole_answer_has_every_field(served):
    answer = served.post(PATH, {"messages": HELLO, "max_tokens": 4}, headers={"x-request-id": "r"}).json()
    ids = served.engine.tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    text = "".join(map(chr, served.scripted.script(ids, 0)[:4]))
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("qinfer-")
    assert answer == {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(ids),
            "completion_tokens": 4,
            "total_tokens": len(ids) + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("n", [1, 3])
def test_stream_role_then_text_then_reason(served, n):
    body = {"messages": HELLO, "max_tokens": 8, "n": n}
    whole = served.post(PATH, body).json()
    chunks = served.stream(PATH, body)
    for index in range(n):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert [bool(chunk.get("system_fingerprint")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "n", "wanted"),
    [
        (None, 1, False),
        ({}, 1, False),
        ({"include_usage": False}, 1, False),
        ({"include_usage": True}, 1, True),
        ({"include_usage": True}, 3, True),
    ],
)
def test_h09_usage_only_when_asked_for(served, options, n, wanted):
    body = {"messages": HELLO, "max_tokens": 4, "n": n}
    chunks = served.stream(PATH, body if options is None else {**body, "stream_options": options})
    with_usage = [chunk for chunk in chunks if "usage" in chunk]
    assert len(with_usage) == wanted
    if wanted:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 4 * n
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert reasons == ["length"] * n


def test_h09_stream_options_without_stream(served):
    answer = served.post(PATH, {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert answer.status_code == 400
    assert "stream_options" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 10**6}, 256 - 20),
    ],
)
def test_h03_limits(served, more, tokens):
    served.post(PATH, {"messages": HELLO, "stop": "a", **more})
    assert served.engine.max_model_len == 256
    prompt = served.engine.tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    expected = 256 - len(prompt) if tokens == 236 else tokens
    assert served.scripted.seen[-1].max_tokens == expected


def test_logprobs_have_bytes_and_the_likeliest(served):
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    choice = served.post(PATH, body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == -0.5
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]
    without = served.post(PATH, {"messages": HELLO, "max_tokens": 2, "logprobs": True}).json()
    assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert served.post(PATH, {"messages": HELLO, "top_logprobs": 2}).status_code == 400
    assert served.post(PATH, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}).status_code == 400


def test_bytes_of_half_a_character(serve_scripted):
    with serve_scripted(script=lambda ids, k: [0xC3 + 0, 0xA9, 97]) as served:
        token = served.engine.tokenizer
        spelled = [token.token_bytes(i) for i in (0xC3, 0xA9)]
        body = {"messages": HELLO, "max_tokens": 3, "logprobs": True}
        choice = served.post(PATH, body).json()["choices"][0]
    assert b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"][:2]) == b"".join(spelled)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hello",
        [{"content": "no role"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 5}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "\ud83d", "content": "x"}],
        [{"role": "user", "content": "a\x00b"}],
        [["user", "Hello"]],
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_h05_h06_odd_messages_are_400(served, messages, stream):
    content = json.dumps(
        {"messages": messages, "stream": stream}
    )  # httpx itself cannot send half a surrogate
    answer = served.client.post(PATH, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == 400
    assert error["param"].startswith("messages")
    assert served.scripted.seen == []


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "assistant", "content": "x"}],
            "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "system", "content": "x"}] * 2,
            "<|im_start|>system\nx<|im_end|>\n<|im_start|>system\nx<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "foo", "content": "x"}, {"role": "assistant", "content": None}],
            "<|im_start|>foo\nx<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_h05_unusual_messages_that_mean_something(served, messages, prompt):
    answer = served.post(PATH, {"messages": messages, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == served.engine.tokenizer.encode(prompt)


def test_continuing_the_last_message(served):
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "echo": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    answer = served.post(PATH, body).json()
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am"
    assert answer["prompt_token_ids"] == served.engine.tokenizer.encode(prompt)
    content = answer["choices"][0]["message"]["content"]
    assert content.startswith("I am")
    assert len(content) == 5
    chunks = served.stream(PATH, body)
    assert "".join(c["delta"].get("content", "") for ch in chunks for c in ch["choices"]) == content
    assert served.post(PATH, {**body, "add_generation_prompt": True}).status_code == 400


def test_a_template_in_the_request_is_refused_unless_trusted(served, serve_scripted):
    body = {"messages": HELLO, "chat_template": "{{ messages[0]['content'] }}{{ mood }}", "max_tokens": 1}
    body |= {"chat_template_kwargs": {"mood": "!"}, "return_token_ids": True}
    refused = served.post(PATH, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    with serve_scripted(trust_request_chat_template=True) as trusting:
        answer = trusting.post(PATH, body).json()
    assert answer["prompt_token_ids"] == served.engine.tokenizer.encode("Hello!")


def test_structural_tags_in_both_spellings(serve_scripted, tokenizer):
    tags = {"triggers": ["<f="], "structures": [{"begin": "<f=get>", "schema": {}, "end": "</f>"}]}
    ids = [*tokenizer.encode("x"), max(tokenizer.eos_token_ids)]
    with serve_scripted(script=lambda prompt, choice: ids) as served:
        for more in (
            {"response_format": {"type": "structural_tag", **tags}},
            {"structured_outputs": {"structural_tag": tags}},
        ):
            assert served.post(PATH, {"messages": HELLO, **more}).status_code == 200
        asked = [params.structured_outputs.tags() for params in served.scripted.seen]
        refused = served.post(PATH, {"messages": HELLO, "response_format": {"type": "structural_tag"}})
    assert asked[0] == asked[1] == (("<f=", "<f=get>", {}, "</f>"),)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"tools": []}, 400),
        ({"tool_choice": "auto"}, 400),
        ({"response_format": {"type": "text"}}, 200),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}}, 501),
        ({"chat_template_kwargs": {"tools": 1}}, 400),
        ({"a_field_of_tomorrow": {"x": 1}}, 200),
    ],
)
def test_absent_features_say_so(served, more, status):
    answer = served.post(PATH, {"messages": HELLO, "max_tokens": 1, **more})
    assert answer.status_code == status
    if status == 501:
        assert next(iter(more)) in answer.json()["error"]["message"]
