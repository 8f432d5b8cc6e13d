"""The routes of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from qinfer.server import responses
from qinfer.server.protocol import PriorityHeader
from qinfer.server.response_store import ResponseStore
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.state import ServerState
from qinfer.server.streaming import while_connected

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def response_routes(state: ServerState) -> APIRouter:
    """Makes, gives, cancels and forgets responses, which the routes alone keep."""
    router = APIRouter(prefix="/v1/responses")
    store = ResponseStore()

    @router.post("", responses=STREAMED)
    async def create(
        body: ResponsesRequest, request: Request, x_vllm_priority: PriorityHeader = None
    ) -> Response:
        state.note(body, request)
        body.priority = body.priority if x_vllm_priority is None else x_vllm_priority
        return await while_connected(request, responses.answer(state, store, body))

    @router.get("/{response_id}", responses=STREAMED)
    async def retrieve(
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    ) -> Response:
        return await responses.retrieve(
            state, store, response_id, stream=stream, starting_after=starting_after
        )

    @router.delete("/{response_id}")
    async def delete(response_id: str) -> Response:
        return await responses.delete(store, response_id)

    @router.post("/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        return await responses.cancel(store, response_id)

    return router
