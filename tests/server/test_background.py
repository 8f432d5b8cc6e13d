"""Responses in the background: asked for later, followed from any event, cancelled, failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from qinfer.testing import wait_until

PATH = "/v1/responses"


def said(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    return item["content"][0]["text"]


def finished(served: Any, response_id: str) -> dict[str, Any]:
    """The response, once it has ended."""

    def ended() -> dict[str, Any] | None:
        found = served.get(f"{PATH}/{response_id}").json()
        return found if found["status"] not in ("queued", "in_progress") else None

    return wait_until(ended)


def events_in(lines: Iterator[str] | Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_it_is_answered_at_once_and_asked_for_later(serve_scripted):
    with serve_scripted() as served:
        served.scripted.hold = True
        first = served.post(PATH, {"input": "x", "background": True, "max_output_tokens": 5}).json()
        assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
        assert first["usage"] is None
        assert served.get(f"{PATH}/{first['id']}").json() == first
        early = served.post(PATH, {"input": "y", "previous_response_id": first["id"]})
        assert early.status_code == 400
        assert "not finished" in early.json()["error"]["message"]
        served.scripted.hold = False
        last = finished(served, first["id"])
        twin = served.post(PATH, {"input": "x", "max_output_tokens": 5}).json()
        assert said(last) == said(twin)
        assert (last["status"], last["usage"]) == ("incomplete", twin["usage"])
        assert served.get(f"{PATH}/{first['id']}").json() == last
        body = {"input": "y", "previous_response_id": first["id"], "max_output_tokens": 1}
        later = served.post(PATH, body)
        assert later.status_code == 200
        assert served.client.delete(f"{PATH}/{first['id']}").json()["deleted"] is True
        assert served.get(f"{PATH}/{first['id']}").status_code == 404


def test_a_client_that_leaves_does_not_end_it(serve_scripted):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.005
        body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 60}
        with served.client.stream("POST", PATH, json=body) as answer:
            events = events_in(answer.iter_lines())
            first = next(events)
            assert (first["type"], first["response"]["status"]) == ("response.created", "queued")
            assert [next(events)["type"] for _ in range(2)] == ["response.queued", "response.in_progress"]
            seen = next(events)["sequence_number"]
        response_id = first["response"]["id"]
        rest = served.get(f"{PATH}/{response_id}", params={"stream": True, "starting_after": seen}).text
        events = list(events_in(rest.splitlines()))
        assert [event["sequence_number"] for event in events] == list(range(seen + 1, seen + 1 + len(events)))
        assert events[-1]["type"] == "response.incomplete"
        last = finished(served, response_id)
        assert events[-1]["response"] == last
        assert len(said(last)) == 60
        whole = served.get(f"{PATH}/{response_id}", params={"stream": True}).text  # again, of what is kept
        deltas = [e["delta"] for e in events_in(whole.splitlines()) if e["type"].endswith("text.delta")]
        assert "".join(deltas) == said(last)


def test_it_is_cancelled_by_its_id(serve_scripted):
    with serve_scripted() as served:
        served.scripted.seconds_per_step = 0.01
        body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 200}
        with served.client.stream("POST", PATH, json=body) as answer:
            events = events_in(answer.iter_lines())
            response_id = next(events)["response"]["id"]
            wait_until(lambda: next(events)["type"] == "response.output_text.delta")
            served.scripted.hold = True
            with httpx.Client(base_url=served.url, timeout=None) as other:
                cancelled = other.post(f"{PATH}/{response_id}/cancel")
            last = list(events)[-1]
        assert (last["type"], last["code"]) == ("error", "cancelled")
        assert cancelled.status_code == 200
        assert cancelled.json()["status"] == "cancelled"
        assert cancelled.json()["output"][0]["status"] == "incomplete"
        wait_until(lambda: not served.scripted.jobs)
        assert len(served.scripted.aborted) == 1
        assert served.post(f"{PATH}/{response_id}/cancel", None).json() == cancelled.json()
        assert served.get(f"{PATH}/{response_id}").json() == cancelled.json()


def test_deleting_ends_it_first(serve_scripted):
    with serve_scripted() as served:
        served.scripted.hold = True
        response_id = served.post(PATH, {"input": "x", "background": True}).json()["id"]
        assert served.client.delete(f"{PATH}/{response_id}").status_code == 200
        wait_until(lambda: not served.scripted.jobs)
        assert served.get(f"{PATH}/{response_id}").status_code == 404


def test_h14_an_engine_that_dies_fails_it(serve_scripted):
    with serve_scripted() as served:
        served.scripted.fail_at_step = 3
        body = {"input": "x", "background": True, "stream": True}
        events = list(events_in(served.post(PATH, body).text.splitlines()))
        assert events[-1]["type"] == "response.failed"
        failed = served.get(f"{PATH}/{events[0]['response']['id']}").json()
    assert failed == events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(failed)


@pytest.mark.parametrize(
    ("query", "param"), [({"starting_after": 1}, "starting_after"), ({"stream": True}, "stream")]
)
def test_only_a_streamed_one_can_be_streamed_again(served, query, param):
    made = served.post(PATH, {"input": "x", "max_output_tokens": 2}).json()
    refused = served.get(f"{PATH}/{made['id']}", params=query)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_contradictions_are_400_and_name_the_field(served):
    refused = served.post(PATH, {"input": "x", "background": True, "store": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    made = served.post(PATH, {"input": "x", "max_output_tokens": 2}).json()
    refused = served.post(f"{PATH}/{made['id']}/cancel", None)
    assert refused.status_code == 400
    assert "background" in refused.json()["error"]["message"]
    for query in ("stream=often", "stream=true&starting_after=-1"):
        refused = served.get(f"{PATH}/{made['id']}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in ("stream", "starting_after")
    assert served.post(f"{PATH}/nothing/cancel", None).status_code == 404
