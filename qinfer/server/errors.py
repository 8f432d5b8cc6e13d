"""One shape for every error: `{"error": {"message", "type", "param", "code"}}`, with the HTTP status as code.

What the user did wrong is 400 (never FastAPI's 422), an unknown model or route 404, a feature that qinfer
does not have 501, an engine that was stopped 503 and one that died 500. Messages are bounded: a validation
error quotes at most 10 faults and 200 characters of each, since pydantic repeats the input in every one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qinfer.errors import EngineDeadError, EngineStoppedError, OverloadedError, UserError

logger = logging.getLogger(__name__)

MAX_FAULTS = 10
MAX_QUOTED = 200
MAX_VALUE = 50
_TOLD = ("missing", "value_error", "assertion_error", "extra_forbidden")  # faults whose words need no value
_TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "BadRequestError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ErrorFields(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Every answer that is an error, as the OpenAPI document shows it."""

    error: ErrorFields


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "What was asked for is wrong; `param` names the field."),
        (401, "A valid API key is required."),
        (404, "There is no such model, response or route."),
        (413, "The body is too long."),
        (500, "A bug, or an engine that has died."),
        (501, "A feature that qinfer does not have."),
        (503, "Not ready, full or shutting down: try again."),
    )
}


class ApiError(Exception):
    """An answer that is an error: HTTP status, one line, and the field at fault where there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


class Failure(NamedTuple):
    """An error as the client sees it."""

    status: int
    message: str
    param: str | None = None

    def json(self) -> str:
        """The JSON document as text; in ASCII, since a message may quote what is no valid Unicode."""
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole HTTP answer; 503 says when to try again, 401 how to."""
        known = {503: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(self.status, {})
        return Response(self.json(), self.status, {**known, **(headers or {})}, media_type="application/json")


def failure_of(error: Exception) -> Failure:
    """What a client may know of an exception: nothing of our own bugs but that there was one."""
    match error:
        case ApiError():
            return Failure(error.status, error.message, error.param)
        case UserError():
            return Failure(400, str(error), error.parameter)
        case OverloadedError():
            return Failure(503, str(error))
        case EngineStoppedError():
            return Failure(503, "the server is shutting down")
        case EngineDeadError():
            return Failure(500, "the engine has died; the server must be restarted")
        case NotImplementedError():
            return Failure(501, str(error) or "this feature is not implemented")
    return Failure(500, "internal error")


def register(app: FastAPI) -> None:
    """Makes every error that escapes a route one of the documents above."""
    for kind in (ApiError, UserError, OverloadedError, EngineDeadError, NotImplementedError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(
        HTTPException, _on_http
    )  # Starlette's: unknown routes and unreadable bodies too
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_error(_: Request, error: Exception) -> Response:
    return failure_of(error).response()


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors(), error.body).response()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI could not parse the body
        reason = str(error.__cause__).split(";")[0].replace("\n", " ")[:MAX_QUOTED]
        message = f"the body is not valid JSON: {reason}"
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path[:MAX_QUOTED]}"
    headers = dict(error.headers or {})
    route = getattr(request.scope.get("route"), "path_format", None)
    if error.status_code == 405 and (methods := request.app.openapi()["paths"].get(route)):
        headers["Allow"] = ", ".join(sorted(map(str.upper, methods)))  # of all routes of this path
        message = f"{request.url.path[:MAX_QUOTED]} takes {headers['Allow']}, not {request.method}"
    return Failure(error.status_code, message).response(headers)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the number is nginx's, for the log and the metrics


def invalid(faults: Sequence[Mapping[str, Any]], body: Any) -> Failure:
    """400 for pydantic's `faults`: one clause per field, the first field as `param`."""
    clauses: dict[str, str] = {}
    for fault in faults[:MAX_FAULTS]:
        where, *location = fault["loc"]
        path = _path(location, body, is_missing=fault["type"] == "missing")
        if where != "body":  # the query's or the path's
            path = ".".join(map(str, location))
        message = str(fault.get("ctx", {}).get("error") or fault["msg"])[:MAX_QUOTED]
        if fault["type"] == "json_invalid":
            return Failure(400, f"the body is not valid JSON: {message} at character {fault['loc'][-1]}")
        if where == "body" and not path and not isinstance(body, Mapping):
            return Failure(400, "the body must be a JSON object with content-type application/json")
        clauses.setdefault(path, f"{path}: {message}{_value(fault)}" if path else message)
    return Failure(400, "; ".join(clauses.values()), next(iter(clauses)) or None)


def _value(fault: Mapping[str, Any]) -> str:
    """ ", not VALUE" where pydantic's own words leave out a value that fits a line."""
    given = fault.get("input", ...)
    if fault["type"] in _TOLD or not (given is None or isinstance(given, str | int | float)):
        return ""
    told = json.dumps(given)
    return f", not {told}" if len(told) <= MAX_VALUE else ""


def _path(location: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """The dotted path of a field: of pydantic's location, those steps that lead through the body itself.

    Pydantic mixes in names of its own, of union members and validators; they lead nowhere in the body. A
    missing field leads nowhere either, but stands last and has a mapping above it.
    """
    steps: list[str] = []
    for position, step in enumerate(location):
        in_list = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if in_list or (isinstance(body, Mapping) and step in body):
            body = body[step]
        elif not (is_missing and isinstance(body, Mapping) and position == len(location) - 1):
            continue
        steps.append(str(step))
    return ".".join(steps)
