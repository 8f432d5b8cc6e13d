"""An ungated model says so in the header of every answer, whatever the answer is."""

from __future__ import annotations

import pytest

from qinfer.evals.certificate import GateStatus

GATE = GateStatus("ungated", "served without a valid verdict of the gate: it is FAIL")
ORIGIN = {"origin": "http://page.example"}
KEY = {"authorization": "Bearer the-key"}


@pytest.fixture
def ungated(serve_scripted):
    options = {"api_keys": ["the-key"], "allowed_origins": [ORIGIN["origin"]], "max_body_bytes": 1000}
    with serve_scripted(gate=GATE, **options) as served:
        yield served


@pytest.mark.parametrize(
    ("method", "path", "status", "headers", "body"),
    [
        ("GET", "/health", 200, {}, None),
        ("GET", "/metrics", 200, {}, None),
        ("GET", "/v1/models", 200, KEY, None),
        ("GET", "/v1/models", 401, {}, None),
        ("GET", "/nothing", 404, KEY, None),
        ("PUT", "/v1/models", 405, KEY, None),
        ("POST", "/v1/completions", 200, KEY, {"prompt": "a", "max_tokens": 1}),
        ("POST", "/v1/completions", 200, KEY, {"prompt": "a", "max_tokens": 1, "stream": True}),
        ("POST", "/v1/completions", 400, KEY, {"prompt": "a", "max_tokens": -1}),
        ("POST", "/v1/completions", 413, KEY, {"prompt": "a" * 1000}),
        ("OPTIONS", "/v1/completions", 200, {**ORIGIN, "access-control-request-method": "POST"}, None),
    ],
)
def test_every_answer_says_it(ungated, method, path, status, headers, body):
    answer = ungated.client.request(method, path, headers=headers, json=body)
    assert answer.status_code == status
    assert answer.headers["x-qinfer-gate"] == "ungated"


def test_a_page_of_another_origin_may_read_it(ungated):
    answer = ungated.get("/health", headers=ORIGIN)
    assert "x-qinfer-gate" in answer.headers["access-control-expose-headers"]
    assert answer.json()["gate"] == {"state": "ungated", "line": GATE.line}
