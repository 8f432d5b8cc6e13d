"""The openai client, unchanged, against a real engine on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from pydantic import BaseModel

from qinfer.async_llm import AsyncLLM
from qinfer.llm import LLM
from qinfer.server.app import build_app
from qinfer.server.options import ServerOptions


@pytest.fixture(scope="session")
def llm(model_dir: Path) -> LLM:
    return LLM(str(model_dir), served_model_name="tiny", num_kv_blocks=2048)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> LLM:
    """The same model without a server, to compare texts with."""
    return LLM(str(model_dir), num_kv_blocks=2048)


@pytest.fixture(scope="session")
def url(llm: LLM, run_app: Any) -> Iterator[str]:
    engine = AsyncLLM(llm)
    try:
        with run_app(build_app(engine, ServerOptions(api_keys=["key"]))) as url:
            yield f"{url}/v1"
    finally:
        assert engine.shutdown()


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def strictly() -> Callable[[type[BaseModel], BaseModel], None]:
    """Validates what was sent against the SDK's type, without conversions.

    Two places where the SDK's types are narrower than what OpenAI itself sends are put right first: a
    completion chunk has no finish_reason before its last, and the first token of an echoed prompt no logprob.
    """

    def validate(kind: type[BaseModel], answer: BaseModel) -> None:
        sent = answer.model_dump(exclude_unset=True)
        for choice in sent.get("choices", ()):
            if kind is Completion:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
                if choice.get("logprobs"):
                    lists = choice["logprobs"]
                    lists["token_logprobs"] = [x or 0.0 for x in lists["token_logprobs"]]
                    lists["top_logprobs"] = [x or {} for x in lists["top_logprobs"]]
        kind.model_validate(sent, strict=True)

    return validate
