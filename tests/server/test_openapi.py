"""The OpenAPI document against the server: requests drawn from it, right and wrong, find no bug of ours.

schemathesis makes bodies, paths and parameters that the document allows, and such that it forbids. Whatever
comes, no answer is a 500, every status is one that the document names for the route, and an answer with JSON
has the form that the document gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from qinfer.async_llm import AsyncLLM
from qinfer.llm import LLM
from qinfer.server.app import build_app
from qinfer.server.options import ServerOptions
from qinfer.testing import tiny_model

CONTEXT = 192  # no answer is long
EXAMPLES = 8  # for each route, and as many wrong ones
REQUIRED = ("prompt", "messages", "input", "tokens")
SOUND: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"prompt": "x"},
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "POST /v1/responses": {"input": "x"},
    "POST /v1/embeddings": {"input": "x"},
}
CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, run_app: Any) -> Iterator[str]:
    folder = tiny_model("smollm2", tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)
    engine = AsyncLLM(LLM(str(folder), num_kv_blocks=512))
    try:
        with run_app(build_app(engine, ServerOptions())) as url:
            yield url
    finally:
        assert engine.shutdown(60)


def few_fields(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """What the body must have and three fields more: with all at once some pair always contradicts itself."""
    more = [name for name in body if name not in REQUIRED]
    kept = data.draw(st.sets(st.sampled_from(more), max_size=3)) if more else set[str]()
    return {name: value for name, value in body.items() if name in REQUIRED or name in kept}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_route_answers_what_the_document_does_not_say(url: str, mode: GenerationMode):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    seen: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # any text is right in a path
        seen[operation.label] = set()

        @settings(
            max_examples=EXAMPLES,
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
        def ask(case: Any, data: st.DataObject) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                case.body = few_fields(case.body, data)
                if not data.draw(st.booleans()):  # the first example, which is the simplest, among them
                    case.body |= SOUND.get(case.operation.label, {})
            response = case.call(base_url=url, timeout=120)
            assert response.status_code not in (500, 422), response.text
            seen[case.operation.label].add(response.status_code)
            case.validate_response(response, checks=list(CHECKS))

        ask()
    for route in SOUND:
        assert (200 in seen[route]) == (mode is GenerationMode.POSITIVE), route
        assert 400 in seen[route] or mode is GenerationMode.POSITIVE, route
