"""Errors as `application/problem+json` (RFC 9457). Knows status codes, not what went wrong."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from swiftkv_platform.errors import EngineDeadError, InvalidInputError, QueueFullError, SwiftKVError

RETRY_AFTER_S = 1
"""A hint for clients that came at a bad moment."""

MAX_VALUE_LENGTH = 200
"""Characters of an offending value that are sent back."""

STATUS: dict[type[SwiftKVError], HTTPStatus] = {
    InvalidInputError: HTTPStatus.UNPROCESSABLE_ENTITY,
    QueueFullError: HTTPStatus.TOO_MANY_REQUESTS,
    EngineDeadError: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""By error class; subclasses inherit, everything else is a 500."""


def add_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""

    @app.exception_handler(SwiftKVError)
    async def known_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return _response(problem(error, request.url.path))

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [_field_error(detail) for detail in error.errors()]
        detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in errors)
        return _response(_document(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_input", detail, request.url.path, errors))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        document = _document(status, status.name.lower(), str(error.detail), request.url.path, [])
        return _response(document, dict(error.headers or {}))


def problem(error: SwiftKVError, instance: str) -> dict[str, Any]:
    """The problem document of an error at the path `instance`."""
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), None)
    errors = []
    if error.field is not None:
        errors.append({"field": error.field, "value": _shortened(error.value), "message": error.message})
    return _document(status or HTTPStatus.INTERNAL_SERVER_ERROR, error.code, error.message, instance, errors)


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
    headers = dict(headers or {})
    if document["status"] in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return JSONResponse(document, document["status"], headers, media_type="application/problem+json")


def _field_error(detail: Any) -> dict[str, Any]:
    """One of pydantic's errors; the path starts behind `body`."""
    path = ".".join(str(part) for part in detail["loc"][1:])
    return {"field": path or "body", "value": _shortened(detail.get("input")), "message": detail["msg"]}


def _shortened(value: Any) -> Any:
    """JSON as it is where it is short, else the beginning of its text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value if value is None or math.isfinite(value) else repr(value)  # JSON has no NaN
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
