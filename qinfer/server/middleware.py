"""What happens around every request, as plain ASGI: its id, the API key, a last resort for our own bugs.

Not Starlette's `BaseHTTPMiddleware`: that one reads the body through a queue and hides the client's leaving.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinfer.server import ignored, load_report
from qinfer.server.chunking import EXTENSION, piece_writer
from qinfer.server.errors import Failure
from qinfer.server.http_metrics import HttpMetrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/load", "/metrics", "/docs", "/openapi.json"})
MAX_HEADERS = 256
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestFrame:
    """Gives a request its id and headers, counts its answer, and turns an escaped exception into a 500.

    The id is the client's `X-Request-Id` where that is up to 128 visible characters, else a new one; it is in
    `scope["state"]["request_id"]` and in the answer. `headers` go on every answer. `metrics` counts answers
    by the route's path, the method and the status, and those under way outside OPEN_PATHS. With `log` these
    get a line each in the log. `load` makes the report that a balancer asks for (`load_report`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        headers: Sequence[tuple[str, str]],
        metrics: HttpMetrics,
        load: Callable[[str], str | None],
        log: bool,
    ) -> None:
        self.app, self.headers, self.metrics, self.load, self.log = app, headers, metrics, load, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        asked = Headers(scope=scope)
        given = asked.get("x-request-id", "")
        request_id = given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        crowded = len(asked) > MAX_HEADERS
        status = sent = 0
        began = time.monotonic()

        async def framed(message: Message) -> None:
            nonlocal status, sent
            sent += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in self.headers:
                    headers[name] = value
                if (names := scope["state"].get("ignored")) is not None:
                    headers[ignored.HEADER] = names
                if (form := asked.get(load_report.ASKED)) and (report := self.load(form)):
                    headers[load_report.HEADER] = report
            await send(message)

        write = piece_writer(scope)

        def counted(data: bytes) -> bool:
            nonlocal sent
            written = write(data)
            sent += len(data) if written else 0
            return written

        scope["extensions"] = {**(scope.get("extensions") or {}), EXTENSION: counted}
        working = scope["path"] not in OPEN_PATHS
        self.metrics.live += working
        try:
            if crowded:
                failure = Failure(400, f"{len(asked)} headers, and at most {MAX_HEADERS} are read")
                return await failure.response()(scope, receive, framed)
            await self.app(scope, receive, framed)
        except Exception:  # nothing above us would answer, and a traceback is for the log only
            logger.exception("request %s failed", request_id)
            if status:
                raise  # the answer has begun: all that is left is to close the connection
            await Failure(500, "internal error").response()(scope, receive, framed)
        finally:
            self.metrics.live -= working
            handler, length = getattr(scope.get("route"), "path", "none"), asked.get("content-length", "0")
            seconds = time.monotonic() - began
            if self.log and working:
                client, method = (scope.get("client") or ("?",))[0], scope["method"]
                logger.info("%s %s %s %d %.3f s %s", client, method, handler, status, seconds, request_id)
            self.metrics.count(
                handler,
                scope["method"],
                status,
                seconds,
                received=int(length) if length.isdecimal() and length.isascii() else 0,
                sent=sent,
            )


class BoundBody:
    """Answers 413 to a body longer than `max_bytes`: before a byte is read where it says its length, else
    (chunked) as soon as more than that has come.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if length.isdigit() and int(length) > self.max_bytes:
            failure = Failure(413, f"the body has {length} bytes; at most {self.max_bytes} are read")
            return await failure.response()(scope, receive, send)
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, f"the body is longer than the {self.max_bytes} bytes that are read")
            return message

        await self.app(scope, bounded, send)


class RequireKey:
    """Answers 401 where the bearer token is none of `keys`; OPEN_PATHS and OPTIONS need none.

    Keys are compared as SHA-256 digests in constant time.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self.app = app
        self.digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in OPEN_PATHS
        if guarded and not self._known(Headers(scope=scope).get("authorization", "")):
            failure = Failure(401, "a valid API key is required: Authorization: Bearer KEY")
            return await failure.response()(scope, receive, send)
        await self.app(scope, receive, send)

    def _known(self, authorization: str) -> bool:
        kind, _, key = authorization.partition(" ")
        if kind.lower() != "bearer":
            return False
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self.digests]  # always all of them
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
