"""/v1/responses through the openai client: every response and event is valid by the SDK's own types."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from qinfer.sampling_params import SamplingParams

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO = [{"role": "user", "content": "Say something."}]
UNITS = ["C", "F"]
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": UNITS}},
    "required": ["unit"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "name": "x"}  # and none
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[list[Any], Any]:
    """The events of a stream, each valid, numbered from 0; and the last one's response."""
    events = list(client.responses.create(model="tiny", stream=True, **asked))
    for number, event in enumerate(events):
        EVENT.validate_python(event.model_dump(exclude_unset=True, by_alias=True), strict=True)
        assert event.sequence_number == number
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
    return events, events[-1].response


def without_ids(output: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in output]


def test_a_response_is_what_chat_says(client, reference, strictly):
    answer = client.responses.create(
        model="tiny", instructions="Be brief.", input="Hello", temperature=0, max_output_tokens=12
    )
    strictly(Response, answer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (expected,) = reference.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert answer.output_text == expected.outputs[0].text
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    assert answer.usage.output_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_stream_tells_every_step_in_order(client):
    asked: dict[str, Any] = {"input": "Hello", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(model="tiny", **asked)
    events, last = streamed(client, **asked)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == last.output_text
    assert without_ids(last.output) == without_ids(whole.output)
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert events[0].response.usage is None


def test_logprobs(client, strictly):
    asked: dict[str, Any] = {"input": "Hello", "max_output_tokens": 5, "temperature": 0, "top_logprobs": 2}
    answer = client.responses.create(model="tiny", include=["message.output_text.logprobs"], **asked)
    strictly(Response, answer)
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == answer.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events, _ = streamed(client, **asked)
    told = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in entries]


def test_parse_and_the_sdks_stream_reader(client):
    answer = client.responses.parse(model="tiny", input="Hello", text_format=Animal)
    assert isinstance(answer.output_parsed, Animal)
    assert answer.status == "completed"
    with client.responses.stream(model="tiny", input="Hello", text_format=Animal) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(stream.get_final_response().output_parsed, Animal)
    assert kinds[-1] == "response.completed"


def test_json_object(client):
    answer = client.responses.create(
        model="tiny",
        input="x",
        text={"format": {"type": "json_object"}},
        extra_body={"logit_bias": {"125": 100}},
    )
    assert isinstance(json.loads(answer.output_text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_function_calls(client, strictly, choice):
    asked: dict[str, Any] = {"input": HELLO, "tools": TOOLS, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "extra_body": {"seed": 3}}
    answer = client.responses.create(model="tiny", **asked)
    strictly(Response, answer)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["unit"] in UNITS
    events, last = streamed(client, **asked)
    kinds = [event.type for event in events[2:]]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert kinds == [
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
    ]
    assert "".join(deltas) == call.arguments == last.output[0].arguments
    more = client.responses.create(
        model="tiny",
        input=[*HELLO, call, {"type": "function_call_output", "call_id": call.call_id, "output": "12"}],
        tools=TOOLS,
        tool_choice="none",
        max_output_tokens=4,
    )
    assert more.output[0].type == "message"


def test_a_response_goes_on_from_another(client, reference):
    first = client.responses.create(model="tiny", input="One", instructions="X", extra_body={"stop": "e"})
    asked: dict[str, Any] = {"input": [{"role": "user", "content": "Two"}], "temperature": 0}
    second = client.responses.create(
        model="tiny", previous_response_id=first.id, max_output_tokens=6, **asked
    )
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]
    (expected,) = reference.chat(messages, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert second.output_text == expected.outputs[0].text
    assert second.previous_response_id == first.id


def test_responses_are_kept_until_deleted(client, strictly):
    answer = client.responses.create(model="tiny", input="x", max_output_tokens=3)
    again = client.responses.retrieve(answer.id)
    strictly(Response, again)
    assert again.output == answer.output
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    client.responses.delete(answer.id)
    hidden = client.responses.create(model="tiny", input="x", max_output_tokens=3, store=False)
    for response_id in (answer.id, hidden.id, "resp_nonsense"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response_id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"input": []}, openai.BadRequestError),
        ({"input": [{"type": "image"}]}, openai.BadRequestError),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, openai.BadRequestError),
        ({"input": 5}, openai.BadRequestError),
        ({"max_output_tokens": 0}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, openai.BadRequestError),
        ({"tools": TOOLS}, openai.BadRequestError),  # this model's template shows no form of calls
        ({"tools": TOOLS * 2, "tool_choice": "required"}, openai.BadRequestError),
        ({"text": {"format": SCHEMA}}, openai.BadRequestError),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}}},
            openai.BadRequestError,
        ),
        ({"input": "word " * 400}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"background": True, "store": False}, openai.BadRequestError),
        ({"extra_body": {"conversation": "conv_1"}}, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_before_the_first_event(client, changes, error, stream):
    with pytest.raises(error) as caught:
        client.responses.create(**{"model": "tiny", "input": "x", "stream": stream, **changes})
    assert caught.value.body["message"]


def test_truncation_keeps_the_end(client):
    asked: dict[str, Any] = {"model": "tiny", "input": "word " * 400, "max_output_tokens": 3}
    assert client.responses.create(**asked, truncation="auto").usage.input_tokens == 255
