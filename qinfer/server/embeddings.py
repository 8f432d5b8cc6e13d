"""POST /v1/embeddings: a vector of length 1 for each text, as numbers or as base64 of little-endian float32.

The texts run through the engine like any request, among those that generate. How rows become one vector is
the model's business: an embedding model's folder says it in `1_Pooling/config.json`, as sentence-transformers
writes it; any other model's rows are averaged.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Literal, cast

import numpy as np
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from qinfer.outputs import RequestOutput
from qinfer.sampling_params import SamplingParams
from qinfer.server.answer import encoded, truncated
from qinfer.server.errors import ApiError
from qinfer.server.open_body import OpenBody
from qinfer.server.protocol import Count, Text, TokenIds, kind_of
from qinfer.server.sampling import check_room
from qinfer.server.state import ServerState
from qinfer.server.streaming import merge
from qinfer.server.wire import Body

MAX_TEXTS = 2048
Texts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_TEXTS), Tag("list[str]")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_TEXTS), Tag("list[list]")],
    Discriminator(
        kind_of,
        custom_error_type="input_type",
        custom_error_message="must be text, token ids, or a list of either",
    ),
]


class EmbeddingsRequest(OpenBody):
    """POST /v1/embeddings."""

    model: Text | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: str | None = None
    # vLLM's
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    def texts(self) -> Sequence[str | list[int]]:
        """What to embed, always as a list."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [self.input]
        return cast("Sequence[str | list[int]]", self.input)


class Embedding(Body):
    """One vector."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingUsage(Body):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Body):
    """The answer."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def answer(state: ServerState, request: EmbeddingsRequest, request_id: str) -> Response:
    """Answers the request; raises UserError or ApiError for what cannot be done."""
    state.check_model(request.model)
    size = state.engine.card.config.hidden_size
    if request.dimensions not in (None, size):
        raise ApiError(400, f"this model's vectors have {size} dimensions, and no part of them", "dimensions")
    prompts = await asyncio.to_thread(_prompts, state, request)
    state.engine.require_room(len(prompts), sum(map(len, prompts)))
    outputs = await _outputs(state, prompts, request_id)
    if any(output.outputs[0].finish_reason == "error" for output in outputs):
        raise ApiError(500, "the model's hidden states are not numbers")
    data = [
        Embedding(index=i, object="embedding", embedding=_written(output, request.encoding_format))
        for i, output in enumerate(outputs)
    ]
    count = sum(map(len, prompts))
    usage = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
    body = EmbeddingList(object="list", data=data, model=state.model_names[0], usage=usage)
    return Response(body.json_text(), media_type="application/json")


def _prompts(state: ServerState, request: EmbeddingsRequest) -> list[list[int]]:
    texts = request.texts()
    if not texts or not all(texts):
        raise ApiError(400, "input is empty: give at least one character or token", "input")
    return [_tokens(state, request, text) for text in texts]


def _tokens(state: ServerState, request: EmbeddingsRequest, text: str | list[int]) -> list[int]:
    keep, length = request.truncate_prompt_tokens, state.engine.max_model_len
    if isinstance(text, str):
        text = encoded(state, text, keep, add_special_tokens=request.add_special_tokens)
    kept = truncated(text, keep, length)
    if not kept:
        raise ApiError(400, "no token of the input is left", "truncate_prompt_tokens")
    check_room(len(kept), length)
    return kept


async def _outputs(state: ServerState, prompts: list[list[int]], request_id: str) -> list[RequestOutput]:
    from qinfer.engine.pooling import pooling_of  # imports torch, which a server does after taking its port

    unique, pooling = uuid.uuid4().hex[:8], pooling_of(state.engine.card.path)
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    sources = [
        state.engine.generate(ids, params, f"embd-{request_id}-{unique}-{i}", pooling=pooling)
        for i, ids in enumerate(prompts)
    ]
    found: dict[int, RequestOutput] = {}
    async with aclosing(merge(sources)) as merged:
        async for index, output in merged:
            found[index] = output
    return [found[i] for i in range(len(prompts))]


def _written(output: RequestOutput, form: str) -> list[float] | str:
    assert output.embedding is not None, "the request has finished"
    if form == "float":
        return output.embedding
    return base64.b64encode(np.asarray(output.embedding, dtype="<f4").tobytes()).decode()
