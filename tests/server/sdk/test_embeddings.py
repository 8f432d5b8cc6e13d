"""/v1/embeddings through the openai client, which asks for base64, and by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from transformers import AutoModelForCausalLM

from qinfer.engine.pooling import pooling_of

TEXTS = ["The sun is", "One, two, three"]


@pytest.fixture(scope="module")
def expected(model_dir, reference):
    """Means of transformers' last hidden states, of length 1."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    vectors = []
    for text in TEXTS:
        ids = torch.tensor([reference.get_tokenizer().encode(text)])
        with torch.no_grad():
            mean = model.model(ids).last_hidden_state[0].double().mean(0)
        vectors.append((mean / mean.norm()).tolist())
    return vectors


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_vectors_are_the_models(client, strictly, expected, reference, form):
    asked: dict[str, Any] = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **asked)
    assert answer.model == "tiny"
    assert [one.index for one in answer.data] == [0, 1]
    count = sum(len(reference.get_tokenizer().encode(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == count
    if form == "base64":
        assert all(isinstance(one.embedding, str) for one in answer.data)
        return
    strictly(CreateEmbeddingResponse, answer)
    for one, vector in zip(answer.data, expected, strict=True):
        assert one.embedding == pytest.approx(vector, abs=2e-5)
        assert math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-5)


def test_every_shape_of_input(client, reference):
    ids = reference.get_tokenizer().encode(TEXTS[0])

    def ask(given: Any) -> list[list[float]]:
        return [one.embedding for one in client.embeddings.create(model="tiny", input=given).data]

    first = ask(TEXTS[0])
    for given in (ids, [ids], [TEXTS[0]]):
        assert ask(given)[0] == pytest.approx(first[0], abs=1e-6)
    assert len(ask([*TEXTS] * 40)) == 80


def test_truncation_and_the_whole_size(client):
    long = "word " * 400
    body = {"truncate_prompt_tokens": -1}
    answer = client.embeddings.create(model="tiny", input=long, extra_body=body, dimensions=64)
    assert answer.usage.prompt_tokens == 255
    assert len(answer.data[0].embedding) == 64


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [-1]}, "prompt"),
        ({"input": [[5], [384]]}, "prompt"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "word " * 400}, "input_tokens"),
        ({"dimensions": 32}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_mistakes_are_400_and_named(client, changes, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(**{"model": "tiny", "input": "x", **changes})
    assert caught.value.param == param


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


def test_vectors_are_no_generation(client, url):
    def counts() -> list[str]:
        text = httpx.get(url.removesuffix("/v1") + "/metrics").text
        names = ("qinfer_generation_tokens_total", "qinfer_time_to_first_token_seconds_count")
        return [line for line in text.splitlines() if line.startswith(names)]

    before = counts()
    assert len(before) == 2
    client.embeddings.create(model="tiny", input=TEXTS)
    assert counts() == before


@pytest.mark.parametrize(
    ("raw", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        (None, "mean"),
    ],
)
def test_an_embedding_models_folder_says_how_to_pool(tmp_path, raw, pooling):
    if raw is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(raw))
    assert pooling_of(tmp_path) == pooling


def test_other_poolings_are_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(NotImplementedError, match="cls_token"):
        pooling_of(tmp_path)
