"""Chat, completions and errors as the openai client sees them.

Each answer and each chunk is also validated by the SDK's own types in strict mode.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from qinfer.sampling_params import SamplingParams

HELLO: list[Any] = [{"role": "user", "content": "Say something."}]


def test_models(client, strictly):
    (model,) = client.models.list().data
    strictly(Model, model)
    assert model.id == "tiny"
    strictly(Model, client.models.retrieve("tiny"))


def test_chat_is_what_the_engine_says(client, reference, strictly):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=3
    )
    strictly(ChatCompletion, answer)
    (expected,) = reference.chat(HELLO, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert len(entry.top_logprobs) == 3
    assert answer._request_id


def test_chat_streams(client, reference, strictly):
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    (expected,) = reference.chat(HELLO, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.outputs[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert chunks[-2].choices[0].finish_reason == expected.outputs[0].finish_reason


def test_the_sdks_own_stream_reader(client):
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 12}
    text = client.chat.completions.create(**asked).choices[0].message.content
    asked["stop"] = [text[5:]]  # an end by "length" would be an error to that reader
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(events)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[:5]


def test_n_choices_with_a_seed(client, strictly):
    def choices() -> list[str]:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, temperature=1, seed=5, max_tokens=10
        )
        strictly(ChatCompletion, answer)
        return [choice.message.content for choice in answer.choices]

    first, second = choices(), choices()
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, reference, stream, strictly):
    prompts = ["The sun is", "One, two,"]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "logprobs": 2, "echo": True}
    answer = client.completions.create(model="tiny", prompt=prompts, stream=stream, **asked)
    chunks = list(answer) if stream else [answer]
    for chunk in chunks:
        strictly(Completion, chunk)
    outputs = reference.generate(prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    for index, output in enumerate(outputs):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part.text for part in parts) == prompts[index] + output.outputs[0].text
        count = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        assert sum(len(part.logprobs.tokens) for part in parts) == count
        assert parts[0].logprobs.token_logprobs[0] is None


def test_echoed_logprobs_are_those_of_the_model(client, reference):
    ids = reference.get_tokenizer().encode("Carol has 20 apples")
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    logprobs = []
    for logits in reference.engine.prompt_logits(ids):
        logprobs += logits.log_softmax(-1).tolist()
    expected = [logprobs[i][token] for i, token in enumerate(ids[1:])]
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (openai.BadRequestError, {"temperature": 3}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"extra_body": {"top_k": "x"}}),
        (openai.BadRequestError, {"extra_body": {"priority": 1}}),  # in order of arrival
        (openai.NotFoundError, {"model": "other"}),
        (
            openai.InternalServerError,
            {"extra_body": {"structured_outputs": {"structural_tag": {"format": {}}}}},
        ),
    ],
)
def test_errors_become_the_sdks_exceptions(client, error, changes):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **changes})
    assert caught.value.body["message"]
    assert str(caught.value.code) == str(caught.value.status_code)  # a number before openai 2
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(url):
    wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_long_prompt_names_the_context(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 400}])
    assert caught.value.param == "input_tokens"


def test_async_client(url):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="key") as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=5, temperature=0, stream=True
            )
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(asyncio.run(ask()))


def test_sixty_four_at_once_say_what_each_says_alone(client, reference, url):
    prompts = [f"{i} is a number that" for i in range(64)]
    outputs = reference.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)

    def ask(i: int) -> str:
        asked: dict[str, Any] = {"model": "tiny", "prompt": prompts[i], "temperature": 0, "max_tokens": 16}
        if i % 2:
            return client.completions.create(**asked).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(ask, range(64)))
    assert texts == [output.outputs[0].text for output in outputs]
