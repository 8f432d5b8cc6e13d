"""/tokenize, /detokenize and /tokenizer_info say what the server's own tokenizer does."""

from __future__ import annotations

import json

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
RENDERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_a_text_there_and_back(served):
    text = "there is <|im_end|> é"
    answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    tokenizer = served.engine.tokenizer
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == [tokenizer.token_str(i) for i in answer["tokens"]]
    assert served.post("/tokenize", {"prompt": text}).json()["token_strs"] is None
    back = served.post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    assert served.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert served.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_a_text_longer_than_the_context_is_counted(served):
    assert served.post("/tokenize", {"prompt": "0" * 1000}).json()["count"] == 1000


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, RENDERED),
        ({"add_generation_prompt": False}, "<|im_start|>user\nHello<|im_end|>\n"),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            "<|im_start|>user\nHello",
        ),
    ],
)
def test_messages_are_written_by_the_template(served, more, text):
    answer = served.post("/tokenize", {"messages": HELLO, **more}).json()
    assert answer["tokens"] == served.engine.tokenizer.encode(text)
    if not more:
        whole = served.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}).json()
        assert answer["count"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": HELLO, "tools": []}, 400, None),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [97, 384]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [97], "model": "other"}, 404, "model"),
    ],
)
def test_mistakes_are_named(served, path, body, status, param):
    headers = {"content-type": "application/json"}
    answer = served.client.post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_info_is_what_a_remote_tokenizer_asks_for(served):
    info = served.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert info["unk_token"] is None
    assert info["add_bos_token"] is False
    assert info["vocab_size"] == 384
    assert "<|im_start|>" in info["chat_template"]
    ids = served.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()
    assert ids["tokens"] == [258]
