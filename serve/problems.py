"""Errors as `application/problem+json` (RFC 9457), below `/v1` in OpenAI's shape. Knows status codes, not causes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.web.problems import (
    AsciiJSON,
    FieldProblem,
    Problem,
    make_problem,
    problem_headers,
    problem_of,
    problem_response,
    short_value,
)

MAX_ERRORS = 16
"""Fields of a body that are told apart; of others there is the number."""

_CLIENT_CLOSED_REQUEST = 499
_OPENAI = "/v1/"
_OPENAI_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def add_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app` a document."""

    @app.exception_handler(SwiftKVError)
    async def known_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return refusal(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        errors = [_field_problem(detail) for detail in found[:MAX_ERRORS]]
        detail = "; ".join(f"{entry.field}: {entry.message}" for entry in errors)
        detail += f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
        return _response(make_problem(request.url.path, 422, InvalidInputError.code, detail, errors))

    @app.exception_handler(ClientDisconnect)
    async def nobody_listens(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        # FastAPI's own answer to a body that is no text names nothing.
        errors = [FieldProblem(field="body", message=str(error.detail))]
        named = errors if status is HTTPStatus.BAD_REQUEST else []
        document = make_problem(request.url.path, status, status.name.lower(), str(error.detail), named)
        return _response(document, error.headers)


def refusal(error: SwiftKVError, path: str) -> JSONResponse:
    """The answer to a request that failed so."""
    problem = problem_of(error, path)
    return _response(problem, problem_headers(problem.status, error))


def too_large(path: str, detail: str) -> JSONResponse:
    """The answer to a body that is too large."""
    return _response(make_problem(path, 413, "request_entity_too_large", detail))


def openai_error(problem: Problem) -> dict[str, Any]:
    """A problem in OpenAI's shape."""
    kind = "server_error" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    param = problem.errors[0].field if problem.errors else None
    error = {"message": problem.detail, "type": _OPENAI_TYPES.get(problem.status, kind), "param": param}
    return {"error": {**error, "code": problem.code}}


def _response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    if _OPENAI not in problem.instance:
        return problem_response(problem, headers)
    # OpenAI's clients know bad input as 400.
    bad_input = problem.status == HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.BAD_REQUEST if bad_input else problem.status
    return AsciiJSON(openai_error(problem), status, {**problem_headers(problem.status), **(headers or {})})


def _field_problem(detail: Any) -> FieldProblem:
    """One of pydantic's errors; the path starts behind `body`."""
    path = ".".join(str(part) for part in detail["loc"][1:])
    message = detail["msg"].removeprefix("Value error, ")
    return FieldProblem(field=path or "body", value=short_value(detail.get("input")), message=message)
