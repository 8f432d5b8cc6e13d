"""/qinfer/stats: the document that the live view draws."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from qinfer.engine.pages import PageMap
from qinfer.server import live
from qinfer.server.live import latencies, percentiles
from qinfer.server.metrics import Recent

COMPLETIONS = "/v1/completions"


def test_it_says_what_has_happened_and_nothing_that_was_said(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        empty = served.get("/qinfer/stats").json()
        served.post(
            COMPLETIONS, {"prompt": [97] * 5, "max_tokens": 4, "ignore_eos": True, "request_id": "one"}
        )
        served.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 1, "ignore_eos": True})
        answer = served.get("/qinfer/stats")
        found = answer.json()
        metrics = served.get("/metrics").text
    assert (empty["recent"], empty["latency"]) == ([], {"first_token": {}, "per_token": {}, "request": {}})
    assert found["state"] == "ready"
    assert found["model"]["names"] == ["tiny"]
    assert found["model"]["gate"] == {"state": "passed", "line": "gate passed: PASS"}
    assert found["requests"]["finished"] == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert found["tokens"]["generation"] == 5
    assert f'qinfer_prompt_tokens_total{{model_name="tiny"}} {float(found["tokens"]["prompt"])}' in metrics
    assert found["ledger"]["kv_pool"] == 640
    newest, oldest = found["recent"]
    assert "one" in oldest["request_id"]
    assert (oldest["prompt_tokens"], oldest["generation_tokens"], oldest["reason"]) == (5, 4, "length")
    assert 0 < oldest["first_token"] <= oldest["latency"]
    assert oldest["per_token"] > 0
    assert newest["per_token"] is None  # one token has no gap
    assert found["latency_requests"] == 2
    assert set(found["latency"]["request"]) == {"p50", "p90", "p99"}
    assert "secret" not in answer.text


def test_aborted_requests_are_recent_too(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.02
        body = {"prompt": [97, 98], "stream": True, "max_tokens": 200}
        with served.client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()  # dropped, it would close the stream
            next(lines)
        end = time.monotonic() + 60
        while not (recent := served.get("/qinfer/stats").json()["recent"]):
            assert time.monotonic() < end
    assert (recent[0]["reason"], recent[0]["prompt_tokens"]) == ("abort", 2)
    assert recent[0]["generation_tokens"] > 0


def test_it_wants_the_key(serve_scripted: Any) -> None:
    with serve_scripted(api_keys=["sesame"]) as served:
        assert served.get("/qinfer/stats").status_code == 401
        headers = {"authorization": "Bearer sesame"}
        assert served.get("/qinfer/stats", headers=headers).status_code == 200


def test_a_dead_or_stopped_engine_has_no_pages(serve_scripted: Any) -> None:
    with serve_scripted() as served:
        served.scripted.fail_at_step = 0
        served.post(COMPLETIONS, {"prompt": "a"})
        dead = served.get("/qinfer/stats").json()
        assert dead["state"] == "dead"
        assert served.engine.shutdown(60)
        stopped = served.get("/qinfer/stats").json()
        assert (stopped["kv"]["pages"], stopped["kv"]["tokens"]) == (None, 4096)


def test_an_engine_that_does_not_tell_its_pages_in_time_holds_up_nothing_else(
    serve_scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose process was stopped, or that is in a long step; no late answer is missed or mistaken."""
    told = threading.Event()

    def survey(engine: Any) -> PageMap:
        assert told.wait(60)
        return engine.pages.survey(4)

    with serve_scripted() as served:
        monkeypatch.setattr(live, "_survey", survey)
        monkeypatch.setattr(live, "PAGES_SECONDS", 0.01)
        for _ in range(2):
            found = served.get("/qinfer/stats").json()
            assert (found["state"], found["kv"]["pages"], found["kv"]["tokens"]) == ("ready", None, 4096)
        told.set()
        monkeypatch.setattr(live, "PAGES_SECONDS", 60)
        assert served.get("/qinfer/stats").json()["kv"]["pages"]["num_pages"] == 40


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {}),
        ([3.0], {"p50": 3.0, "p90": 3.0, "p99": 3.0}),
        (list(range(1, 101)), {"p50": 50, "p90": 90, "p99": 99}),
        ([2, 1], {"p50": 1, "p90": 2, "p99": 2}),
    ],
)
def test_percentiles(values: list[float], expected: dict[str, float]) -> None:
    assert percentiles(values) == expected


def test_latencies_leave_out_what_was_not_measured() -> None:
    whole = Recent("a", 0.0, 1, 5, 0.1, 0.02, 0.2, "stop")
    short = Recent("b", 0.0, 1, 1, 0.3, None, 0.3, "stop")
    gone = Recent("c", 0.0, 1, 0, None, None, 9.0, "abort")
    found = latencies([whole, short, gone])
    assert [found[name]["p99"] for name in ("first_token", "per_token", "request")] == [0.3, 0.02, 0.3]
