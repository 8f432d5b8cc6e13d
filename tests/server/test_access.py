"""Keys, request ids, the gate's header, and the small routes."""

from __future__ import annotations

import httpx
import pytest

from qinfer import __version__
from qinfer.errors import UserError
from qinfer.evals.certificate import GateStatus
from qinfer.server.exposition import GATE_STATES
from qinfer.server.middleware import OPEN_PATHS
from qinfer.server.options import ServerOptions
from qinfer.testing import wait_until

KEYS = ("first-key", "second-key")


def test_h12_every_route_but_the_open_ones_wants_a_key(serve_scripted):
    refused = [
        {},
        {"authorization": "Bearer x"},
        {"authorization": "bearer x"},
        {"authorization": "first-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "Bearer first-key-and-more"},
        {"authorization": "Bearer first-ke"},
    ]
    with serve_scripted(api_keys=KEYS) as served:
        document = served.get("/openapi.json").json()
        routes = [(method, path) for path, methods in document["paths"].items() for method in methods]
        assert ("post", "/v1/chat/completions") in routes
        for method, path in [*routes, ("get", "/nothing"), ("post", "/v1/models")]:
            for headers in refused:
                answer = served.client.request(method, path.replace("{model_id}", "tiny"), headers=headers)
                if path in OPEN_PATHS:
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.json()["error"]["code"] == 401
        for key in KEYS:
            for scheme in ("Bearer", "bearer"):
                headers = {"authorization": f"{scheme} {key}"}
                assert served.get("/v1/models", headers=headers).status_code == 200
        assert served.client.options("/v1/models").status_code == 405


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_keys": [""]}, "an API key is empty"),
        ({"api_keys": ["good", " "]}, "an API key is empty"),
        ({"max_body_bytes": 0}, "max_body_bytes must be at least 1"),
        ({"keep_alive_seconds": 0.0}, "keep_alive_seconds must be more than 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        ServerOptions(**options)


def test_request_ids_are_echoed_or_made(served):
    assert served.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {served.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert served.get("/health", headers={"x-request-id": "x" * 129}).headers["x-request-id"] != "x" * 129
    answer = served.post(
        "/v1/completions", {"prompt": "a", "request_id": "mine"}, headers={"x-request-id": "its"}
    )
    assert answer.json()["id"] == "cmpl-mine"
    assert answer.headers["x-request-id"] == "its"


@pytest.mark.parametrize("state", GATE_STATES)
def test_the_gate_is_told_everywhere(serve_scripted, state):
    with serve_scripted(gate=GateStatus(state, f"it is {state}")) as served:
        health = served.get("/health")
        assert health.json()["gate"] == {"state": state, "line": f"it is {state}"}
        for answer in (health, served.post("/v1/completions", {"prompt": "a"}), served.get("/nothing")):
            assert answer.headers["x-qinfer-gate"] == state
        metrics = served.get("/metrics").text
        values = {s: f'qinfer_gate_state{{state="{s}"}} {float(s == state)}' for s in GATE_STATES}
        assert all(line in metrics for line in values.values())


def test_the_gate_is_the_models_own_unless_told_otherwise(served):
    assert served.get("/health").headers["x-qinfer-gate"] == "passed"


def test_version_and_models(serve_scripted):
    with serve_scripted(served_model_names=["org/name", "alias"]) as served:
        assert served.get("/version").json() == {"version": __version__}
        listed = served.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["org/name", "alias"]
        assert served.get("/v1/models/org/name").json() == listed["data"][0]
        assert listed["data"][1]["root"] == "org/name"
        assert listed["data"][0]["max_model_len"] == 256
        answer = served.post("/v1/completions", {"prompt": "a", "model": "alias", "max_tokens": 1})
        assert answer.json()["model"] == "org/name"
        assert served.get("/v1/models/tiny").status_code == 404


def test_a_model_card_has_the_permission_that_old_clients_read(served):
    ((permission,),) = (card["permission"] for card in served.get("/v1/models").json()["data"])
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(serve_scripted, method):
    with serve_scripted() as served:
        assert served.client.request(method, "/ping").json() == served.get("/health").json()
        assert served.engine.shutdown()
        assert served.client.request(method, "/ping").status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_balancer_that_asks_by_head_gets_the_head_of_the_answer(serve_scripted, path):
    def asked(method: str) -> tuple[int, dict[str, str], bytes]:
        answer = served.client.request(method, path)
        known = {name: answer.headers.get(name) for name in ("content-type", "content-length", "retry-after")}
        return answer.status_code, known, answer.content

    with serve_scripted(api_keys=KEYS) as served:
        status, headers, body = asked("GET")
        assert (status, len(body)) == (200, int(headers["content-length"]))
        assert asked("HEAD") == (200, headers, b"")
        served.engine.shutdown()
        status, headers, body = asked("GET")
        assert (status, headers["retry-after"]) == (503, "1")
        assert asked("HEAD") == (503, headers, b"")
        document = served.get("/openapi.json").json()["paths"][path]
    assert set(document["head"]["responses"]) == set(document["get"]["responses"]) >= {"200", "503"}
    assert not any("content" in response for response in document["head"]["responses"].values())
    assert "content" in document["get"]["responses"]["503"]


def test_load_counts_requests_under_way(serve_scripted):
    with serve_scripted() as served:
        assert served.get("/load").json() == {"server_load": 0}
        served.scripted.seconds_per_step = 0.005
        body = {"prompt": "a", "stream": True, "max_tokens": 200}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # dropped, it would close the stream
            next(lines)
            served.scripted.hold = True
            with httpx.Client(base_url=served.url, timeout=None) as other:
                assert other.get("/load").json() == {"server_load": 1}
        wait_until(lambda: served.get("/load").json() == {"server_load": 0})


def test_cors_is_closed_unless_opened(served, serve_scripted):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in served.get("/v1/models", headers=preflight).headers
    assert served.client.options("/v1/chat/completions", headers=preflight).status_code == 405
    with serve_scripted(allowed_origins=["https://a.example"], api_keys=KEYS) as opened:
        answer = opened.client.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert opened.get("/v1/models", headers=preflight).status_code == 401
        strange = opened.client.options("/v1/models", headers={**preflight, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in strange.headers


def test_the_bound_of_bodies_is_the_operators(serve_scripted):
    with serve_scripted(max_body_bytes=100) as served:
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        refused = served.post("/v1/completions", {"prompt": "a" * 100})
    assert refused.status_code == 413
    assert "at most 100 are read" in refused.json()["error"]["message"]


def test_routes_for_measuring_are_there_on_request_only(served, serve_scripted, monkeypatch):
    assert served.post("/reset_prefix_cache", None).status_code == 404
    monkeypatch.setenv("QINFER_SERVER_DEV_MODE", "1")
    with serve_scripted(api_keys=KEYS) as measured:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        assert measured.client.post("/reset_prefix_cache").status_code == 401
        assert measured.client.post("/reset_prefix_cache", headers=headers).json() == {"reset": True}
        assert measured.scripted.num_resets == 1
        info = measured.get("/server_info", headers=headers).json()
        recording = measured.client.post("/start_profile", headers=headers)
    assert recording.status_code == 400
    assert "QINFER_TORCH_PROFILER_DIR" in recording.json()["error"]["message"]
    assert (info["model"], info["max_model_len"], info["stats"]["num_running"]) == ("tiny", 256, 0)
