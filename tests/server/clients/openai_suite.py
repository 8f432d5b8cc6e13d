"""What one version of the openai client must see of a server; `test_openai_versions` runs it under several.

It runs in a process of its own, where `import openai` finds the version under test, and knows nothing of
qinfer: QINFER_URL and QINFER_MODEL say whom to ask, OPENAI_VERSION what it is. Every answer, chunk and event
is validated by the types of that SDK in strict mode, so nothing is converted on the way.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

URL, MODEL = os.environ["QINFER_URL"], os.environ["QINFER_MODEL"]
# without its second sentence the first tokens of a French answer and an English one are equally likely
ASKED = "What is the capital of France? Answer in one sentence."
QUESTION: list[Any] = [{"role": "user", "content": ASKED}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
FLAT_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


@pytest.fixture(scope="module")
def client():
    with openai.OpenAI(base_url=URL, api_key="key", max_retries=0, timeout=300) as client:
        yield client


def strictly(kind: type[BaseModel], answer: BaseModel) -> None:
    """Validates what was sent, without conversions; a completion's chunk has no reason before its last."""
    sent = answer.model_dump(exclude_unset=True, by_alias=True)
    if kind is Completion:
        for choice in sent["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    kind.model_validate(sent, strict=True)


def chunks_of(stream: Any) -> list[Any]:
    chunks = list(stream)
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    return chunks


def test_it_is_the_version_that_is_meant():
    assert openai.__version__ == os.environ["OPENAI_VERSION"]


def test_models(client):
    (model,) = client.models.list().data
    strictly(Model, model)
    assert model.id == MODEL
    strictly(Model, client.models.retrieve(MODEL))


def test_chat(client):
    answer = client.chat.completions.create(messages=QUESTION, max_tokens=16, **GREEDY)
    strictly(ChatCompletion, answer)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_chat_streams_what_it_says_whole(client):
    asked: dict[str, Any] = {
        **GREEDY,
        "messages": QUESTION,
        "max_tokens": 16,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    strictly(ChatCompletion, whole)
    usage = {"include_usage": True}
    chunks = chunks_of(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert tokens == [entry.token for entry in whole.choices[0].logprobs.content]
    assert chunks[-1].usage == whole.usage


def test_the_async_client(client):
    async def ask() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=URL, api_key="key", timeout=300) as client:
            asked: dict[str, Any] = {**GREEDY, "messages": QUESTION, "max_tokens": 8}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**asked), client.chat.completions.create(**asked, stream=True)
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    strictly(ChatCompletion, whole)
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, stream):
    asked: dict[str, Any] = {
        "prompt": ["One, two, three,", "The sun"],
        "max_tokens": 5,
        "n": 1,
        "logprobs": 1,
    }
    answer = client.completions.create(**GREEDY, **asked, stream=stream)
    chunks = list(answer) if stream else [answer]
    for chunk in chunks:
        strictly(Completion, chunk)
    texts = ["".join(c.text for k in chunks for c in k.choices if c.index == i) for i in (0, 1)]
    assert texts[0].startswith(" four")
    assert texts[1]


def check_call(call: Any) -> None:
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_tools(client, choice, reason):
    asked: dict[str, Any] = {**GREEDY, "messages": QUESTION, "tools": [TOOL], "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    answer = client.chat.completions.create(**asked)
    strictly(ChatCompletion, answer)
    assert answer.choices[0].finish_reason == reason
    (call,) = answer.choices[0].message.tool_calls
    check_call(call)
    chunks = chunks_of(client.chat.completions.create(**asked, stream=True))
    deltas = [d for chunk in chunks for d in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "weather"
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == reason


def newest(client: Any, name: str) -> Any:
    """Chat completions, which had some methods under `beta` at first."""
    return client.chat.completions if hasattr(client.chat.completions, name) else client.beta.chat.completions


def test_parse(client):
    chat = (
        client.beta.chat.completions
        if not hasattr(client.chat.completions, "parse")
        else client.chat.completions
    )
    answer = chat.parse(messages=QUESTION, response_format=Animal, **GREEDY)
    assert answer.choices[0].message.parsed.kind in ("cat", "dog")
    tools = [openai.pydantic_function_tool(Animal)]
    answer = chat.parse(
        messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False, **GREEDY
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments.legs == 4


def test_the_stream_reader(client):
    chat = (
        client.beta.chat.completions
        if not hasattr(client.chat.completions, "stream")
        else client.chat.completions
    )
    with chat.stream(messages=QUESTION, response_format=Animal, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.parsed.legs == 4


def test_embeddings(client):
    texts = ["The sun is hot.", "Cats sleep."]
    numbers = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    strictly(CreateEmbeddingResponse, numbers)
    packed = client.embeddings.create(model=MODEL, input=texts)  # as base64, which the SDK unpacks
    for one, other in zip(numbers.data, packed.data, strict=True):
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-3)
        # the same text in another step's company: bfloat16 rounds otherwise
        assert sum(x * y for x, y in zip(one.embedding, other.embedding, strict=True)) > 0.999


def test_responses(client):
    asked: dict[str, Any] = {
        **GREEDY,
        "input": QUESTION,
        "max_output_tokens": 16,
        "instructions": "Be brief.",
    }
    answer = client.responses.create(**asked)
    strictly(Response, answer)
    assert "Paris" in answer.output_text
    kept = client.responses.retrieve(answer.id)
    strictly(Response, kept)
    assert kept.output_text == answer.output_text
    events = list(client.responses.create(**asked, stream=True))
    for number, event in enumerate(events):
        EVENT.validate_python(event.model_dump(exclude_unset=True, by_alias=True), strict=True)
        assert event.sequence_number == number
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_functions_of_responses(client):
    choice = {"type": "function", "name": "weather"}
    answer = client.responses.create(**GREEDY, input="Paris?", tools=[FLAT_TOOL], tool_choice=choice)
    strictly(Response, answer)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


def test_parsed_responses(client):
    answer = client.responses.parse(**GREEDY, input="A cat.", text_format=Animal)
    assert answer.output_parsed.legs == 4


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"temperature": 5}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, changes, error, stream):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**GREEDY, "messages": QUESTION, "stream": stream, **changes})
    assert caught.value.body["message"]
    assert caught.value.request_id


def test_a_wrong_key():
    wrong = openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_giving_up(client):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.01).chat.completions.create(messages=QUESTION, **GREEDY)
