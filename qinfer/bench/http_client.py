"""A small HTTP/1.1 client for measuring: one connection per request, bytes handed on as they arrive.

What measures must cost less than what is measured, and both often share a machine: this reads a chunked body
piece by piece and does nothing else. Standard library only. Raises OSError where there is no connection and
HttpError for anything that is no HTTP, or ends early.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from qinfer.errors import UserError


class HttpError(Exception):
    """An answer that cannot be read, or is none."""


class Address(NamedTuple):
    """Where a server listens, and what its paths begin with."""

    secure: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        """From http://host:port/prefix; UserError for anything else."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--base-url {url!r} is no address such as http://127.0.0.1:8000", "base_url")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))


class Answer(NamedTuple):
    """A status, and the body as pieces in the order and at the time of their arrival."""

    status: int
    pieces: AsyncIterator[bytes]

    async def text(self) -> str:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces]).decode("utf-8", "replace")


@asynccontextmanager
async def request(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Answer]:
    """Sends one request on a connection of its own, which ends with the context."""
    context = ssl.create_default_context() if address.secure else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        host = f"[{address.host}]" if ":" in address.host else address.host
        sent = {"host": f"{host}:{address.port}", "connection": "close", **(headers or {})}
        if body:
            sent |= {"content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        writer.write(f"{method} {address.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        await writer.drain()
        status, received = await _head(reader)
        yield Answer(status, _body(reader, received))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise HttpError(f"the answer ended early or is no HTTP: {error}") from None
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers, names in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = dict(line.split(":", 1) for line in lines)
    return int(first.split(" ", 2)[1]), {name.lower(): value.strip() for name, value in headers.items()}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")  # no trailers are sent by the servers that are measured
    elif (length := headers.get("content-length")) is not None:
        yield await reader.readexactly(int(length))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events, as soon as each is complete; comments are passed over."""
    waiting = b""
    async for piece in pieces:
        *whole, waiting = (waiting + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines).decode()
