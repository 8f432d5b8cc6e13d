"""Responses in the background through the openai client, valid by the SDK's own types at every moment."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from qinfer.testing import wait_until

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def test_it_is_polled_until_it_ends(client, strictly):
    asked: dict[str, Any] = {"input": "Hello", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(model="tiny", background=True, **asked)
    strictly(Response, first)
    assert first.status == "queued"

    def ended() -> Any:
        found = client.responses.retrieve(first.id)
        strictly(Response, found)
        return found if found.status not in ("queued", "in_progress") else None

    last = wait_until(ended)
    assert last.output_text == client.responses.create(model="tiny", **asked).output_text


def test_a_stream_is_followed_again_and_a_long_one_cancelled(client, strictly):
    asked: dict[str, Any] = {"input": "Hello", "temperature": 0, "max_output_tokens": 12}
    events = list(client.responses.create(model="tiny", background=True, stream=True, **asked))
    for event in events:
        EVENT.validate_python(event.model_dump(exclude_unset=True, by_alias=True), strict=True)
    again = client.responses.retrieve(events[0].response.id, stream=True, starting_after=3)
    assert [event.sequence_number for event in again] == list(range(4, len(events)))
    long = client.responses.create(
        model="tiny", input="Hello", background=True, extra_body={"ignore_eos": True, "priority": 0}
    )
    strictly(Response, client.responses.cancel(long.id))
