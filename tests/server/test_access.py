"""Keys, request ids, the gate's header, and the small routes."""

from __future__ import annotations

import pytest

from qinfer import __version__
from qinfer.errors import UserError
from qinfer.evals.certificate import GateStatus
from qinfer.server import run
from qinfer.server.app import build_app
from qinfer.server.middleware import OPEN_PATHS

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


def test_an_empty_key_is_refused_before_anything_is_loaded(served):
    def load():
        raise AssertionError("nothing is loaded")

    for keys in ([""], ["good", " "]):
        with pytest.raises(UserError, match="an API key is empty"):
            run.serve(load, port=0, api_keys=keys)
        with pytest.raises(UserError, match="an API key is empty"):
            build_app(served.engine, api_keys=keys)


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


@pytest.mark.parametrize("state", ["dense", "passed", "ungated"])
def test_the_gate_is_told_everywhere(serve_scripted, state):
    with serve_scripted(gate=GateStatus(state, f"it is {state}")) as served:
        health = served.get("/health")
        assert health.json()["gate"] == {"state": state, "line": f"it is {state}"}
        for answer in (health, served.post("/v1/completions", {"prompt": "a"}), served.get("/nothing")):
            assert answer.headers["x-qinfer-gate"] == state
        metrics = served.get("/metrics").text
        values = {
            s: f'qinfer_gate_state{{state="{s}"}} {float(s == state)}' for s in ("dense", "passed", "ungated")
        }
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
