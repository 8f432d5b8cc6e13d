"""The HTTP face: OpenAI's routes on an engine, so that a client changes nothing but its base URL.

`build_app` makes a FastAPI app of an `AsyncLLM` and keeps no global state, so any number of apps may live in
one process. Routes only receive and answer; what they mean is in `completions`, `chat`, `exposition`. Around
them stand two plain ASGI layers (`middleware`): the frame that gives ids, headers and a last resort for
errors, and the API key.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.middleware.cors import CORSMiddleware

from qinfer import __version__
from qinfer.async_llm import AsyncLLM
from qinfer.errors import EngineDeadError
from qinfer.evals.certificate import GateStatus
from qinfer.server import chat, completions, embeddings, errors, ignored, tokens
from qinfer.server.chat_protocol import ChatRequest
from qinfer.server.door import Door, PassDoor
from qinfer.server.embeddings import EmbeddingsRequest
from qinfer.server.exposition import make_registry
from qinfer.server.http_metrics import HttpMetrics
from qinfer.server.live import live_routes
from qinfer.server.load_report import load_report
from qinfer.server.metrics import ServerMetrics
from qinfer.server.middleware import OPEN_PATHS, BoundBody, RequestFrame, RequireKey
from qinfer.server.options import ServerOptions
from qinfer.server.page import page_routes
from qinfer.server.protocol import CompletionRequest, PriorityHeader
from qinfer.server.response_routes import STREAMED, response_routes
from qinfer.server.state import ServerState
from qinfer.server.streaming import while_connected
from qinfer.server.tokens import DetokenizeRequest, TokenizeRequest
from qinfer.server.wire import Body, Chat, Completion, ModelCard, ModelList

GATE_HEADER = "x-qinfer-gate"


class _App(FastAPI):
    """FastAPI, whose document would promise 422 where this server says 400, and bodies in answers to HEAD."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        document = super().openapi()
        for methods in document["paths"].values():
            for method, operation in methods.items():
                operation["responses"].pop("422", None)
                for response in operation["responses"].values() if method == "head" else ():
                    response.pop("content", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def build_app(
    engine: AsyncLLM,
    options: ServerOptions | None = None,
    *,
    gate: GateStatus | None = None,
    door: Door | None = None,
) -> FastAPI:
    """An app that serves `engine`, which the caller shuts down, as long as `door` is open.

    `gate` is that of the engine's LLM unless given.
    """
    options = options or ServerOptions()
    names = tuple(options.served_model_names or engine.card.names)
    state = ServerState(engine, names, gate or engine.card.gate, options, door or Door())
    metrics, http = ServerMetrics(engine.max_model_len, options.histogram_bounds), HttpMetrics()
    engine.observe(metrics)
    app = _App(title="qinfer", version=__version__, redirect_slashes=False)
    errors.register(app)
    app.include_router(_openai_routes(state), responses=errors.DOCUMENTED)
    app.include_router(response_routes(state), responses=errors.DOCUMENTED)
    app.include_router(_token_routes(state), responses=errors.DOCUMENTED)
    app.include_router(_operator_routes(state, http), responses=errors.DOCUMENTED)
    app.include_router(_metrics_route(make_registry(state, metrics, http)))
    app.include_router(live_routes(state, metrics), responses=errors.DOCUMENTED)
    if options.web_page:
        app.include_router(page_routes())
    if options.dev_mode:
        app.include_router(_dev_routes(state), responses=errors.DOCUMENTED)
    _add_layers(app, state, metrics, http)
    return app


def _add_layers(app: FastAPI, state: ServerState, metrics: ServerMetrics, http: HttpMetrics) -> None:
    """What stands around the routes; each goes around those before it."""
    options = state.options
    if options.api_keys:
        app.add_middleware(RequireKey, keys=tuple(options.api_keys))
    app.add_middleware(BoundBody, max_bytes=options.max_body_bytes)
    refused = partial(metrics.reject, "draining")
    app.add_middleware(PassDoor, door=state.door, open_paths=OPEN_PATHS, refused=refused)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", GATE_HEADER, ignored.HEADER],
        )
    gate = [(GATE_HEADER, state.gate.state)]
    load = partial(load_report, state.engine)
    app.add_middleware(RequestFrame, headers=gate, metrics=http, load=load, log=options.log_answers)


def _openai_routes(state: ServerState) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(object="list", data=state.cards()))

    @router.get("/models/{model_id:path}", response_model=ModelCard)
    async def model(model_id: str) -> Response:
        state.check_model(model_id)
        return _json(next(card for card in state.cards() if card.id == model_id))

    @router.post("/completions", response_model=Completion, responses=STREAMED)
    async def create_completion(
        body: CompletionRequest, request: Request, x_vllm_priority: PriorityHeader = None
    ) -> Response:
        state.note(body, request)
        body.priority = body.priority if x_vllm_priority is None else x_vllm_priority
        answer = completions.answer(state, body, request.state.request_id)
        return await while_connected(request, answer)

    @router.post("/chat/completions", response_model=Chat, responses=STREAMED)
    async def create_chat_completion(
        body: ChatRequest, request: Request, x_vllm_priority: PriorityHeader = None
    ) -> Response:
        state.note(body, request)
        body.priority = body.priority if x_vllm_priority is None else x_vllm_priority
        answer = chat.answer(state, body, request.state.request_id)
        return await while_connected(request, answer)

    @router.post("/embeddings", response_model=embeddings.EmbeddingList)
    async def create_embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        state.note(body, request)
        answer = embeddings.answer(state, body, request.state.request_id)
        return await while_connected(request, answer)

    return router


def _token_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", response_model=tokens.Tokenized)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        state.note(body, request)
        return _json(await tokens.tokenize(state, body))

    @router.post("/detokenize", response_model=tokens.Detokenized)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        state.note(body, request)
        return _json(await tokens.detokenize(state, body))

    @router.get("/tokenizer_info", response_model=tokens.TokenizerInfo)
    async def tokenizer_info() -> Response:
        return _json(tokens.info(state))

    return router


def _operator_routes(state: ServerState, http: HttpMetrics) -> APIRouter:
    router = APIRouter()

    @router.head("/health")  # balancers ask so: the answer of GET, of which the server sends the head alone
    @router.get("/health")
    @router.head("/ping")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        try:
            await state.check_health()
        except EngineDeadError as error:
            return errors.Failure(503, str(error)).response()
        gate = {"state": state.gate.state, "line": state.gate.line}
        return JSONResponse({"status": "ready", "model": state.model_names[0], "gate": gate})

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": http.live})

    return router


def _metrics_route(registry: CollectorRegistry) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _dev_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return JSONResponse({"reset": await state.engine.reset_prefix_cache()})

    @router.post("/start_profile")
    async def start_profile() -> Response:
        await state.engine.start_profile()
        return JSONResponse({"profiling": True})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        return JSONResponse({"profiling": False, "file": str(await state.engine.stop_profile())})

    @router.get("/server_info")
    async def server_info() -> Response:
        known = {"version": __version__, "model": state.model_names[0], "gate": state.gate.state}
        limits = {"max_model_len": state.engine.max_model_len, "tool_call_parser": state.tool_parser}
        return JSONResponse({**known, **limits, "stats": state.engine.stats._asdict()})

    return router


def _json(body: Body) -> Response:
    return Response(body.json_text(), media_type="application/json")
