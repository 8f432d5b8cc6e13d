"""Answering before there is a model: the port is ours from the first moment, and says 503 until it is ready.

A port that is taken is found out before minutes of loading, a second server cannot slip in meanwhile, and a
health check reads "not yet" instead of hanging. One thread answers whatever comes, one connection after the
other; the model loads on the main thread, where a signal can end it.
"""

from __future__ import annotations

import errno
import socket
import threading
from types import TracebackType

from qinfer.errors import UserError
from qinfer.server.errors import Failure

_BACKLOG = 2048
_HOSTS = "--host takes an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
_PATIENCE = 1.0  # seconds for a client to send its request
_PAUSE = 0.1  # seconds before another try
_MAX_REQUEST = 1 << 16  # bytes read of it; nobody looks at them


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, port 0 on a free one; UserError in one line where that is impossible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host!r}:{port}: {error.strerror or error}; {_HOSTS}", "host"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart at once after a stop
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited: peers gone for hours
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken: choose another with --port, or 0 for a free one"
            raise UserError(message, "port") from error
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {_HOSTS}", "host") from error
    return listener


class LoadingAnswers:
    """A context in which every request to `listener` is answered with 503."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qinfer-loading", daemon=True)
        failure = Failure(503, "the model is loading")
        body = failure.json().encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._answer = head.encode() + body

    def __enter__(self) -> LoadingAnswers:
        self._listener.settimeout(0.1)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it has gone already, or no file is left for it, as loading may need them all
                self._over.wait(_PAUSE)
                continue
            with connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        received = b""
        try:
            while b"\r\n\r\n" not in received and len(received) < _MAX_REQUEST:
                if not (data := connection.recv(_MAX_REQUEST)):
                    break
                received += data
            connection.sendall(self._answer)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # too slow, or gone: this client learns nothing, the next one is waiting
            return
