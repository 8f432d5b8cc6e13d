"""The HTTP face: OpenAI's routes on an engine, so that a client changes nothing but its base URL.

`build_app` makes a FastAPI app of an `AsyncLLM` and keeps no global state, so any number of apps may live in
one process. Routes only receive and answer; what they mean is in `completions`, `chat`, `exposition`. Around
them stand two plain ASGI layers (`middleware`): the frame that gives ids, headers and a last resort for
errors, and the API key.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from qinfer import __version__
from qinfer.async_llm import AsyncLLM
from qinfer.errors import EngineDeadError
from qinfer.evals.certificate import GateStatus
from qinfer.server import chat, completions, errors
from qinfer.server.exposition import Compat, make_registry
from qinfer.server.metrics import ServerMetrics
from qinfer.server.middleware import BoundBody, RequestFrame, RequireKey, check_keys
from qinfer.server.protocol import ChatRequest, CompletionRequest
from qinfer.server.state import ServerState
from qinfer.server.streaming import while_connected
from qinfer.server.wire import ModelCard, ModelList

GATE_HEADER = "x-qinfer-gate"
MAX_BODY_BYTES = 32 << 20


def build_app(
    engine: AsyncLLM,
    *,
    served_model_names: Sequence[str] | None = None,
    api_keys: Sequence[str] = (),
    gate: GateStatus | None = None,
    metrics_compat: Compat = "vllm",
    trust_request_chat_template: bool = False,
) -> FastAPI:
    """An app that serves `engine`; names and gate are those of its LLM unless given.

    `api_keys` empty: open to all; UserError where one of them is empty. The caller shuts the engine down.
    """
    check_keys(api_keys)
    names = tuple(served_model_names or engine.llm.served_model_names)
    state = ServerState(engine, names, gate or engine.llm.gate, trust_request_chat_template)
    metrics = ServerMetrics(engine.max_model_len)
    engine.observe(metrics)
    app = FastAPI(title="qinfer", version=__version__, redirect_slashes=False)
    errors.register(app)
    app.include_router(_openai_routes(state))
    app.include_router(_operator_routes(state, metrics, metrics_compat))
    if api_keys:
        app.add_middleware(RequireKey, keys=tuple(api_keys))
    headers = [(GATE_HEADER, state.gate.state)]
    app.add_middleware(BoundBody, max_bytes=MAX_BODY_BYTES)
    app.add_middleware(RequestFrame, headers=headers, count=metrics.count_http)  # the outermost
    return app


def _openai_routes(state: ServerState) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(object="list", data=state.cards()))

    @router.get("/models/{model_id:path}", response_model=ModelCard)
    async def model(model_id: str) -> Response:
        state.check_model(model_id)
        return _json(next(card for card in state.cards() if card.id == model_id))

    @router.post("/completions", response_class=Response)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        answer = completions.answer(state, body, request.state.request_id)
        return await while_connected(request, answer)

    @router.post("/chat/completions", response_class=Response)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        answer = chat.answer(state, body, request.state.request_id)
        return await while_connected(request, answer)

    return router


def _operator_routes(state: ServerState, metrics: ServerMetrics, compat: Compat) -> APIRouter:
    router = APIRouter()
    registry = make_registry(state, metrics, compat)

    @router.get("/health")
    async def health() -> Response:
        try:
            await state.engine.check_health()
        except EngineDeadError as error:
            return errors.Failure(503, str(error)).response()
        gate = {"state": state.gate.state, "line": state.gate.line}
        return JSONResponse({"status": "ready", "model": state.model_names[0], "gate": gate})

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _json(body: ModelList | ModelCard) -> Response:
    return Response(body.json_text(), media_type="application/json")
