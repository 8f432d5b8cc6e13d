"""/v1/responses: a conversation as items in, items out; streamed as named events without a `[DONE]`.

A response is a chat (`responses_protocol` says how) whose one choice is told as items (`response_answer`).
Finished responses are kept for a while unless the client says `store: false`. With `background` the client is
answered at once and asks again later: then the response is a job (`response_jobs`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from starlette.responses import JSONResponse, Response

from qinfer.server.chat import work_of
from qinfer.server.errors import ApiError
from qinfer.server.response_answer import ResponseAnswer
from qinfer.server.response_jobs import Job
from qinfer.server.response_store import ResponseStore
from qinfer.server.responses_protocol import ResponsesRequest
from qinfer.server.state import ServerState
from qinfer.server.streaming import EventStream


async def answer(state: ServerState, store: ResponseStore, request: ResponsesRequest) -> Response:
    """Answers the request; raises UserError, ApiError or NotImplementedError for what cannot be done."""
    request.refuse_absent()
    before = request.previous_response_id
    history = store.get(before, "previous_response_id").messages if before is not None else []
    chat = request.chat(history)
    state.admit(chat)
    work = await asyncio.to_thread(work_of, state, chat)
    messages = [*history, *request.messages()]
    made = ResponseAnswer(state, store, request, chat, messages, work)
    if not request.background:
        return await made.respond()
    made.require_room()
    job = Job(made, store)
    return _stream(state, job.follow()) if request.stream else JSONResponse(made.body())


async def retrieve(
    state: ServerState, store: ResponseStore, response_id: str, *, stream: bool, starting_after: int | None
) -> Response:
    """A response as it is now, or its events after number `starting_after`; ApiError where there are none."""
    if not stream:
        if starting_after is not None:
            raise ApiError(400, "starting_after needs stream=true", "starting_after")
        return JSONResponse(store.body(response_id))
    start = 0 if starting_after is None else starting_after + 1
    job = store.jobs.get(response_id)
    if job is not None and job.answer.request.stream:
        return _stream(state, job.follow(start))
    events = store.get(response_id).events if job is None else ()
    if not events:
        raise ApiError(400, "only what was made with background and stream can be streamed again", "stream")
    return _stream(state, _each(events[start:]))


async def cancel(store: ResponseStore, response_id: str) -> Response:
    """Ends a response in the background; one that has ended is given as it is."""
    job = store.jobs.get(response_id)
    if job is not None:
        await job.cancel()
    body = store.body(response_id)
    if not body["background"]:
        raise ApiError(400, "only a response in the background can be cancelled")
    return JSONResponse(body)


async def delete(store: ResponseStore, response_id: str) -> Response:
    """Forgets a response, which ends before if it is being made."""
    job = store.jobs.get(response_id)
    if job is not None:
        await job.cancel()
    store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _stream(state: ServerState, events: AsyncGenerator[str, None]) -> EventStream:
    return EventStream(events, keep_alive=state.options.keep_alive_seconds)


async def _each(events: Sequence[str]) -> AsyncGenerator[str, None]:
    for event in events:
        yield event
