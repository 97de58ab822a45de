"""Errors as `application/problem+json` (RFC 9457), below `/v1` in OpenAI's shape. Knows status codes, not causes."""

from __future__ import annotations

import json
import math
import reprlib
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import (
    DeadlineExceededError,
    EngineDeadError,
    ForbiddenError,
    InvalidInputError,
    NotFoundError,
    QueueFullError,
    RateLimitedError,
    SwiftKVError,
    UnauthenticatedError,
)

RETRY_AFTER_S = 1
"""A hint for clients that came at a bad moment."""

MAX_VALUE_LENGTH = 200
"""Characters of an offending value that are sent back."""
MAX_ERRORS = 16
"""Fields of a body that are told apart; of others there is the number."""

STATUS: dict[type[SwiftKVError], HTTPStatus] = {
    InvalidInputError: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    NotFoundError: HTTPStatus.NOT_FOUND,
    QueueFullError: HTTPStatus.TOO_MANY_REQUESTS,
    RateLimitedError: HTTPStatus.TOO_MANY_REQUESTS,
    DeadlineExceededError: HTTPStatus.GATEWAY_TIMEOUT,
    EngineDeadError: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""Statuses by error class; subclasses inherit, everything else is a 500."""

_HEADERS = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": str(RETRY_AFTER_S)},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": str(RETRY_AFTER_S)},
}
_CLIENT_CLOSED_REQUEST = 499
_OPENAI = "/v1/"
_OPENAI_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class _Brief(reprlib.Repr):
    """Python's notation of a value's beginning: the whole of what was sent may take seconds to write down."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 64
        self.maxstring = self.maxlong = self.maxother = MAX_VALUE_LENGTH


class _AsciiJSON(JSONResponse):
    """Errors repeat what they were sent, also lone surrogates, which JSON may escape and UTF-8 cannot hold."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def add_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app` a document."""

    @app.exception_handler(SwiftKVError)
    async def known_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return refusal(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        errors = [_field_error(detail) for detail in found[:MAX_ERRORS]]
        detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in errors)
        detail += f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
        return _response(_document(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_input", detail, request.url.path, errors))

    @app.exception_handler(ClientDisconnect)
    async def nobody_listens(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        # FastAPI's own answer to a body that is no text names nothing.
        errors = [{"field": "body", "value": None, "message": str(error.detail)}]
        named = errors if status is HTTPStatus.BAD_REQUEST else []
        document = _document(status, status.name.lower(), str(error.detail), request.url.path, named)
        return _response(document, dict(error.headers or {}))


def refusal(error: SwiftKVError, path: str) -> JSONResponse:
    """The answer to a request that failed so."""
    headers = {}
    if isinstance(error, RateLimitedError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _response(problem(error, path), headers)


def too_large(path: str, detail: str) -> JSONResponse:
    """The answer to a body that is too large."""
    return _response(_document(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_entity_too_large", detail, path, []))


def problem(error: SwiftKVError, instance: str) -> dict[str, Any]:
    """The problem document of an error at the path `instance`."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)
    errors = []
    if error.field is not None:
        errors.append({"field": error.field, "value": _shortened(error.value), "message": error.message})
    return _document(status or HTTPStatus.INTERNAL_SERVER_ERROR, error.code, error.message, instance, errors)


def openai_error(document: dict[str, Any]) -> dict[str, Any]:
    """A problem document in OpenAI's shape."""
    status = HTTPStatus(document["status"])
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    param = document["errors"][0]["field"] if document["errors"] else None
    error = {"message": document["detail"], "type": _OPENAI_TYPES.get(status, kind), "param": param}
    return {"error": {**error, "code": document["code"]}}


def _document(
    status: HTTPStatus, code: str, detail: str, instance: str, errors: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "type": "about:blank",
        "title": status.phrase,
        "status": int(status),
        "detail": detail,
        "instance": instance,
        "code": code,
        "errors": errors,
    }


def _response(document: dict[str, Any], headers: dict[str, str] | None = None) -> JSONResponse:
    status = HTTPStatus(document["status"])
    headers = {**_HEADERS.get(status, {}), **(headers or {})}
    if _OPENAI in document["instance"]:
        # OpenAI's clients know bad input as 400.
        status = HTTPStatus.BAD_REQUEST if status is HTTPStatus.UNPROCESSABLE_ENTITY else status
        return _AsciiJSON(openai_error(document), status, headers)
    return _AsciiJSON(document, status, headers, media_type="application/problem+json")


def _field_error(detail: Any) -> dict[str, Any]:
    """One of pydantic's errors; the path starts behind `body`."""
    path = ".".join(str(part) for part in detail["loc"][1:])
    message = detail["msg"].removeprefix("Value error, ")
    return {"field": path or "body", "value": _shortened(detail.get("input")), "message": message}


def _shortened(value: Any) -> Any:
    """JSON as it is where it is short, else the beginning of its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value if value is None or math.isfinite(value) else repr(value)  # JSON has no NaN
    text = value if isinstance(value, str) else _Brief().repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
