"""What no HTTP server can read is answered in the shape of every other error.

uvicorn finds out before there is a request that an app could see: bytes that are no HTTP, a head of more than
64 KiB, a length that lies.
"""

from __future__ import annotations

import h11

from qinfer.server.errors import Failure
from qinfer.server.patience import PatientH11


class JsonH11(PatientH11):
    """uvicorn's HTTP/1.1, whose 400 is one of ours, whose streams cost less, and whose patience ends."""

    def send_400_response(self, msg: str) -> None:
        """Answers where no answer has begun yet, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = Failure(400, "this is no HTTP/1.1 request").json().encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            headers.append(("content-length", str(len(body))))
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
