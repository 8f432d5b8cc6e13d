"""Every error has one shape and the right status; none shows a traceback or kills the server."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

from qinfer.server.errors import failure_of, invalid

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SURROGATE = "\ud83d"
PATIENCE = 120.0  # seconds


def check(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == status
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 3000
    return error


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b'{"prompt": "\xff"}', JSON),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", JSON),
        (b"\x1f\x8b\x08", {**JSON, "content-encoding": "gzip"}),
        (b'{"prompt":', JSON),
        (b"", JSON),
        (b"[1]", JSON),
        (b'"text"', JSON),
        (b"null", JSON),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}),
        (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}),
        (b"[" * 100_000, JSON),
    ],
)
def test_h06_bodies_that_are_no_json_object(served, content, headers):
    error = check(served.client.post(COMPLETIONS, content=content, headers=headers), 400)
    assert error["message"].startswith(("the body is not valid JSON: ", "the body must be a JSON object"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": SURROGATE}, "prompt"),
        ({"prompt": ["fine", SURROGATE]}, "prompt.1"),
        ({"prompt": "a", "stop": SURROGATE}, "stop"),
        ({"prompt": "a", "stop": ["x", SURROGATE]}, "stop.1"),
        ({"prompt": "a", "bad_words": [SURROGATE]}, "bad_words.0"),
        ({"prompt": "a", "cache_salt": SURROGATE}, "cache_salt"),
        ({"prompt": "a", "model": SURROGATE}, "model"),
        ({"prompt": "a\x00"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[97], []]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [[1, 2], [99999]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "n": 10**6}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "seed": -(2**70)}, "seed"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "stop": ["1", "2", "3", "4", "5"]}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": "much"}}, "logit_bias.1"),
        ({"prompt": "a", "min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"prompt": "a", "request_id": "a\r\nb"}, "request_id"),
        ({"prompt": list(range(97, 100)) * 100}, "input_tokens"),
    ],
)
def test_p01_p03_p10_p15_h06_bad_fields_are_400_and_named(served, body, param, stream):
    content = json.dumps({**body, "stream": stream})
    error = check(served.client.post(COMPLETIONS, content=content, headers=JSON), 400)
    assert error["param"] == param
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(("length", "status"), [(257, 400), (256, 400), (255, 200)])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 1}, {"max_tokens": 10**6}])
def test_h02_prompt_against_the_context(served, length, status, more):
    answer = served.post(COMPLETIONS, {"prompt": [97] * length, **more})
    if status == 200:
        assert answer.json()["usage"]["completion_tokens"] == 1
    else:
        error = check(answer, 400)
        assert "maximum context length is 256" in error["message"]
        assert str(length) in error["message"]


def test_a_message_stays_short_when_everything_is_wrong(served):
    body = {"prompt": "a", **dict.fromkeys(("n", "top_k", "min_p", "seed", "max_tokens"), "x" * 5000)}
    error = check(served.post(COMPLETIONS, {**body, "stop_token_ids": ["y" * 5000] * 500}), 400)
    assert "yyy" not in error["message"]


def test_unknown_model_route_and_method(served):
    error = check(served.post(COMPLETIONS, {"prompt": "a", "model": "other"}), 404)
    assert error["param"] == "model"
    assert error["type"] == "NotFoundError"
    assert "tiny" in error["message"]
    check(served.get("/v1/models/other/model"), 404)
    check(served.get("/v2/nothing"), 404)
    wrong = served.get(COMPLETIONS)
    assert check(wrong, 405)["message"] == f"{COMPLETIONS} takes POST, not GET"
    assert wrong.headers["allow"] == "POST"
    for path, methods in (("/ping", {"GET", "HEAD", "POST"}), ("/v1/responses/x", {"GET", "DELETE"})):
        wrong = served.client.put(path)
        check(wrong, 405)
        assert set(wrong.headers["allow"].split(", ")) == methods


def test_the_document_tells_every_error(served):
    document = served.get("/openapi.json").json()
    assert len(document["paths"]) > 12
    document["paths"].pop("/metrics")  # which cannot fail
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"400", "401", "404", "413", "500", "501", "503"} <= operation["responses"].keys(), (
                path,
                method,
            )
            assert "422" not in operation["responses"]
            if method == "head":  # whose answers have no body
                continue
            shown = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
            assert shown.endswith("/ErrorBody")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\n\r\n",  # to no host
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_the_same_shape(served, sent):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == 400


def test_a_crowd_of_headers_is_refused(served):
    crowd = {f"x-{i}": "1" for i in range(300)}
    error = check(served.get("/health", headers=crowd), 400)
    assert "at most 256" in error["message"]


def test_the_model_may_be_missing_or_null(served):
    for more in ({}, {"model": None}, {"model": "tiny"}):
        assert served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **more}).status_code == 200


def test_a_bug_is_a_500_that_says_nothing(served, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise RuntimeError("secret /etc/path")

    monkeypatch.setattr("qinfer.server.completions._work", broken)
    answer = served.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "mine"})
    error = check(answer, 500)
    assert error["message"] == "internal error"
    assert answer.headers["x-request-id"] == "mine"
    assert "request mine failed" in caplog.text


def test_no_prompt_text_in_the_log(served, caplog):
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", logger="qinfer")  # the command line, run by another test, may have raised it
    served.post(COMPLETIONS, {"prompt": "Xylophone", "max_tokens": 2, "odd_field": "Xylophone"})
    served.post(COMPLETIONS, {"prompt": "Xylophone", "top_p": 7})
    assert "odd_field" in caplog.text
    assert "Xylophone" not in caplog.text


def test_an_operator_may_have_both_in_the_log(serve_scripted, caplog):
    caplog.set_level("INFO", logger="qinfer")
    hi = [{"role": "user", "content": "Hi"}]
    with serve_scripted(log_answers=True, log_requests=True) as served:
        served.post(COMPLETIONS, {"prompt": "A\nb", "max_tokens": 2}, headers={"x-request-id": "mine"})
        served.post(CHAT, {"messages": [{"role": "user", "content": "y" * 5000}]})
        served.post(CHAT, {"messages": hi, "max_tokens": 1, "top_k": 3})
        served.get("/health")
        tokens = len(served.engine.tokenizer.encode("A\nb"))
    asked = [line for line in caplog.messages if line.startswith("request ")]
    assert asked[0] == f"request cmpl-mine: {tokens} tokens, 'A\\nb', {{'max_tokens': 2}}"
    assert asked[1].endswith("assistant\\n', {'top_k': 3, 'max_tokens': 1}")
    answered = [line.split() for line in caplog.messages if line.startswith("127.0.0.1 POST")]
    assert [words[2:4] for words in answered] == [[COMPLETIONS, "200"], [CHAT, "400"], [CHAT, "200"]]
    assert answered[0][-1] == "mine"
    assert "/health" not in caplog.text


def test_statuses_of_our_own_errors():
    assert failure_of(NotImplementedError("no tools")).status == 501
    assert failure_of(KeyError("x")).message == "internal error"


def test_paths_leave_out_what_pydantic_adds():
    faults = [
        {"type": "x", "loc": ("body", "stop", "list[constrained-str]", 1, "str"), "msg": "bad"},
        {"type": "missing", "loc": ("body", "messages", 0, "role"), "msg": "Field required"},
    ]
    failure = invalid(faults, {"stop": ["a", 5], "messages": [{}]})
    assert failure.param == "stop.1"
    assert failure.message == "stop.1: bad; messages.0.role: Field required"


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_chunked_body_is_read_up_to_the_bound(served, path):
    long = (b" " * (1 << 20) for _ in range(40))  # of an iterator nobody says the length
    answer = served.client.post(path, content=long, headers=JSON)
    assert answer.request.headers["transfer-encoding"] == "chunked"
    assert check(answer, 413)["message"] == f"the body is longer than the {32 << 20} bytes that are read"
    small = (
        part
        for part in (b'{"prompt": "a", "max_tokens": 1, ', b'"messages": [{"role": "user", "content": "a"}]}')
    )
    assert served.client.post(path, content=small, headers=JSON).status_code == 200


def test_a_huge_body_or_prompt_is_refused_before_it_is_read(served):
    huge = served.post(COMPLETIONS, {"prompt": "x" * (33 << 20)})
    assert huge.status_code == 413
    long = served.post(COMPLETIONS, {"prompt": "x" * (1 << 20)})
    assert long.status_code == 400
    assert "maximum context length" in long.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_h02_a_text_that_can_never_fit_is_refused_before_it_is_encoded(served, monkeypatch, path):
    def encode(*_args: Any, **_keywords: Any) -> list[int]:
        raise AssertionError("encoded a text that can never fit")

    monkeypatch.setattr(served.engine.tokenizer, "encode", encode)
    text = "word " * 3_000_000
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    error = check(served.post(path, body), 400)
    assert error["message"].startswith(
        "this model's maximum context length is 256 tokens and the prompt has at"
    )
    assert error["param"] == "input_tokens"


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_text_that_is_to_be_cut_may_be_of_any_length(served, path):
    text = "word " * 20_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    answer = served.post(path, {**body, "truncate_prompt_tokens": 9, "return_token_ids": True}).json()
    ids = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_token_ids"]
    tokenizer = served.engine.tokenizer
    whole = tokenizer.encode(text) if path == COMPLETIONS else tokenizer.apply_chat_template(body["messages"])
    assert ids == whole[-9:]


def test_health_answers_while_a_text_is_encoded(served, monkeypatch):
    tokenizer, started, go_on = served.engine.tokenizer, Event(), Event()
    encode = tokenizer.encode

    def held_up(*args: Any, **keywords: Any) -> list[int]:
        started.set()
        assert go_on.wait(PATIENCE)  # without an answer meanwhile there would be none here either
        return encode(*args, **keywords)

    monkeypatch.setattr(tokenizer, "encode", held_up)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=served.url, timeout=PATIENCE / 2) as other:
        long = pool.submit(served.post, COMPLETIONS, {"prompt": "word", "max_tokens": 1})
        assert started.wait(PATIENCE)
        try:
            assert other.get("/health").status_code == 200
            assert not long.done()
        finally:
            go_on.set()
        assert long.result().status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", "hot", ', not "hot"'),
        ("max_tokens", 1.5, ", not 1.5"),
        ("max_tokens", "9.5", ', not "9.5"'),
        ("max_tokens", "x" * 500, ""),
        ("stream", SURROGATE, r', not "\ud83d"'),
        ("seed", {"a": 1}, ""),
    ],
)
def test_a_value_of_another_type_is_repeated(served, field, value, said):
    body = json.dumps({"prompt": "a", field: value})
    error = check(served.client.post(COMPLETIONS, content=body, headers=JSON), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert error["message"].endswith(said) if said else ", not" not in error["message"]
