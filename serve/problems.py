"""Error responses of a replica: `application/problem+json` (RFC 9457), below `/v1` in OpenAI's or Anthropic's format.
Knows status codes, not causes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.web.problems import (
    FieldProblem,
    error_response,
    make_problem,
    no_json,
    problem_headers,
    problem_of,
    sentence_of,
    short_value,
)

MAX_ERRORS = 16
"""Most invalid fields that an answer lists; the rest is only counted."""
MAX_KIND_LENGTH = 100
"""Most characters of a body's content type that an answer repeats."""

_CLIENT_CLOSED_REQUEST = 499


def add_problem_handlers(app: FastAPI, routes: Sequence[str]) -> None:
    """Make `app` answer every error with a document. `routes`: those below `/v1`, named in answers to unknown paths."""

    @app.exception_handler(SwiftKVError)
    async def known_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return refusal(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if not _is_json(kind):
            detail = f"content-type is {kind[:MAX_KIND_LENGTH]!r}; the body must be JSON, of type application/json"
            named = [FieldProblem(field="content-type", value=kind[:MAX_KIND_LENGTH], message=detail)]
            return error_response(make_problem(request.url.path, 415, "unsupported_media_type", detail, named))
        found = error.errors()
        errors = [_field_problem(detail) for detail in found[:MAX_ERRORS]]
        detail = sentence_of(errors)
        detail += f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
        return error_response(make_problem(request.url.path, 422, InvalidInputError.code, detail, errors))

    @app.exception_handler(ClientDisconnect)
    async def nobody_listens(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        # FastAPI's error for a body that is not text names no field.
        errors = [FieldProblem(field="body", message=str(error.detail))]
        named = errors if status is HTTPStatus.BAD_REQUEST else []
        said = _no_route(request, routes) if status is HTTPStatus.NOT_FOUND else str(error.detail)
        document = make_problem(request.url.path, status, status.name.lower(), said, named)
        return error_response(document, error.headers)


def _no_route(request: Request, routes: Sequence[str]) -> str:
    """Return the message for a path without a route."""
    path = short_value(request.url.path) or "of this name"
    return (
        f"there is no route {path}; the routes below /v1 are {', '.join(routes)}: embeddings, images, sounds, "
        "files and stored responses are not served"
    )


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def refusal(error: SwiftKVError, path: str) -> JSONResponse:
    """Return the response to a request that failed with `error`."""
    problem = problem_of(error, path)
    return error_response(problem, problem_headers(problem.status, error))


def too_large(path: str, detail: str) -> JSONResponse:
    """Return the 413 response to a body that is too large."""
    return error_response(make_problem(path, 413, "request_entity_too_large", detail))


def _field_problem(detail: Any) -> FieldProblem:
    """Convert one of pydantic's errors; the field's path begins after `body`."""
    if detail["type"] == "json_invalid":
        return no_json(detail)
    path = ".".join(str(part) for part in detail["loc"][1:])
    message = detail["msg"].removeprefix("Value error, ")
    return FieldProblem(field=path or "body", value=short_value(detail.get("input")), message=message)
