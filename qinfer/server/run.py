"""One server, from the port to the exit code.

The order is the point. First the port, so that a mistake costs no loading; then the model, in a child
(`engine_process`), while `waiting` answers 503; then uvicorn on the same socket, and one line that says
where. SIGTERM and SIGINT end it at any time with exit code 0: during loading at once, later as `ending` says.
The engine's death is exit code 1. The child ends with this process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from qinfer.async_llm import AsyncLLM
from qinfer.engine_process import EngineProcess
from qinfer.heap import settle_heap
from qinfer.model_card import ModelCard
from qinfer.server.app import build_app
from qinfer.server.connections import LoopErrors, raise_file_limit
from qinfer.server.door import Door
from qinfer.server.ending import GRACE, Ending, leave
from qinfer.server.options import ServerOptions
from qinfer.server.protocol_errors import JsonH11
from qinfer.server.waiting import LoadingAnswers, listen

if TYPE_CHECKING:
    from qinfer.llm import LLM

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    load: Callable[[], LLM],
    options: ServerOptions | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    on_ready: Callable[[str, ModelCard], None] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Serves the model that `load` makes in a child until SIGTERM or SIGINT; must run on the main thread.

    The child is forked: nothing may have computed in this process before. `meanwhile` is called while it
    loads. `on_ready` is told the URL and the model once requests are answered; without it a line goes to
    stderr. Raises UserError where the port is taken, before `load` is called, and whatever `load` raises. A
    signal during loading raises SystemExit(0), the engine's death SystemExit(1).
    """
    options = options or ServerOptions()
    raise_file_limit()
    with _ending_on_signals(), contextlib.closing(listen(host, port)) as listener:
        process = EngineProcess(load, listener)
        try:
            with LoadingAnswers(listener):
                process.while_it_loads(meanwhile)
                process.wait()
            _serve_by(process, options, listener, on_ready or _say_where)
        finally:
            process.kill()


def _serve_by(
    process: EngineProcess,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[str, ModelCard], None],
) -> None:
    engine = AsyncLLM(
        process,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
    )
    door = Door()
    server = _Server(_config(build_app(engine, options, door=door)))
    ending = Ending(server, engine, door, options.shutdown_timeout)
    settle_heap()
    asyncio.run(_serve(server, engine, ending, listener, on_ready))
    ending.cancel()
    if engine.errored:
        raise SystemExit(1)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise SystemExit(0) on the main thread, wherever it is."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """uvicorn without signal handling of its own: it would raise the signal again after closing."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; who does not read an answer's end is cut off before uvicorn raises within it."""
        cut = asyncio.get_running_loop().call_later(GRACE - 0.5, self._cut_off)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut_off(self) -> None:
        for connection in self.server_state.connections:
            connection.transport.abort()


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=JsonH11,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(GRACE),
    )


async def _serve(
    server: _Server,
    engine: AsyncLLM,
    ending: Ending,
    listener: socket.socket,
    on_ready: Callable[[str, ModelCard], None],
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(LoopErrors())
    for number in SIGNALS:
        loop.add_signal_handler(number, ending.on_signal)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        on_ready(_url(listener), engine.card)
    watching = asyncio.ensure_future(ending.watch())
    try:
        await serving
    finally:
        watching.cancel()
        if not await asyncio.to_thread(engine.shutdown, GRACE):
            logger.warning("the engine is still in a step: leaving without it")
            leave(int(engine.errored))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say_where(url: str, card: ModelCard) -> None:
    print(
        f"{', '.join(card.names)} is served at {url}/v1 ({card.gate.line})",
        file=sys.stderr,
        flush=True,
    )
