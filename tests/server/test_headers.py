"""What headers say beside the body: ignored fields, priorities, a balancer's question."""

from __future__ import annotations

import json

import pytest

from qinfer.server.ignored import MAX_NAMED, header_value

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.mark.parametrize("path", BODIES)
def test_a_mistyped_field_is_ignored_and_said_so(served, path):
    answer = served.post(path, {**BODIES[path], "temprature": 0.0})
    assert answer.status_code == 200
    assert answer.headers["x-qinfer-ignored"] == "temprature"
    assert "x-qinfer-ignored" not in served.post(path, BODIES[path]).headers


def test_an_answer_that_is_an_error_says_so_too(served):
    answer = served.post("/v1/embeddings", {"input": "", "dimension": 4})
    assert answer.status_code == 400
    assert answer.headers["x-qinfer-ignored"] == "dimension"


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_says_so_before_its_first_event(served, path):
    body = {**BODIES[path], "stream": True, "metdata": {}}
    with served.client.stream("POST", path, json=body) as answer:
        assert answer.headers["x-qinfer-ignored"] == "metdata"


def test_a_field_within_a_field_has_a_dotted_name(served):
    options = {"include_usage": True, "include_usages": True}
    body = {**BODIES["/v1/completions"], "stream": True, "stream_options": options, "best_of": 1}
    answer = served.post("/v1/completions", body)
    assert answer.headers["x-qinfer-ignored"] == "best_of, stream_options.include_usages"


def test_what_the_chat_of_a_response_reads_is_not_ignored(served):
    answer = served.post("/v1/responses", {**BODIES["/v1/responses"], "seed": 3, "top_k": 1, "sede": 3})
    assert answer.headers["x-qinfer-ignored"] == "sede"
    assert served.scripted.seen[-1].seed == 3


def test_the_log_names_a_field_once_and_what_may_have_been_meant(serve_scripted, caplog):
    with serve_scripted() as served:
        for _ in range(3):
            served.post("/v1/completions", {**BODIES["/v1/completions"], "temprature": 0.0, "safety": 1})
    told = [record.getMessage() for record in caplog.records if record.name == "qinfer.server.ignored"]
    assert told == [
        "the field temprature means nothing here and is ignored: is temperature meant?",
        "the field safety means nothing here and is ignored",
    ]


def test_names_of_strangers_are_repeated_where_they_are_plain(served, caplog):
    answer = served.post("/v1/completions", {**BODIES["/v1/completions"], "a\r\nset-cookie: b": 1, "ü": 2})
    assert answer.headers["x-qinfer-ignored"] == "..."
    assert "set-cookie" not in answer.headers
    assert not [record for record in caplog.records if record.name == "qinfer.server.ignored"]
    many = [f"f{i}" for i in range(MAX_NAMED + 1)]
    assert header_value(many) == ", ".join([*many[:MAX_NAMED], "..."])
    assert header_value(many[:2]) == "f0, f1"


@pytest.mark.parametrize("path", GENERATING)
def test_the_header_of_priority_goes_before_the_bodys(served, path):
    served.post(path, {**BODIES[path], "priority": 3})
    served.post(path, {**BODIES[path], "priority": 3}, headers={"x-vllm-priority": "-7"})
    assert [rank for rank, _ in served.scripted.extras[-2:]] == [3, -7]


@pytest.mark.parametrize("value", ["soon", "1.5", "", str(2**63)])
def test_a_priority_that_is_no_whole_number_is_400(served, value):
    answer = served.post("/v1/completions", BODIES["/v1/completions"], headers={"x-vllm-priority": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-vllm-priority"


def test_a_balancer_gets_the_load_with_the_answer(serve_scripted):
    with serve_scripted() as served:
        wanted = {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}
        text = served.post(
            "/v1/completions", BODIES["/v1/completions"], headers={"endpoint-load-metrics-format": "text"}
        )
        said = ", ".join(f"named_metrics.{name}={value}" for name, value in wanted.items())
        assert text.headers["endpoint-load-metrics"] == f"TEXT {said}"
        found = served.get("/v1/models", headers={"endpoint-load-metrics-format": "JSON"})
        kind, _, document = found.headers["endpoint-load-metrics"].partition(" ")
        assert kind == "JSON"
        assert json.loads(document) == {"named_metrics": wanted}
        other = served.get("/v1/models", headers={"endpoint-load-metrics-format": "BINARY"})
        assert "endpoint-load-metrics" not in other.headers
        assert "endpoint-load-metrics" not in served.get("/v1/models").headers
