"""Errors below `/v1` in the shape that OpenAI's clients read; elsewhere as problem documents. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse

from swiftkv_platform.web.problems import AsciiJSON, Problem, problem_headers, problem_response

_OPENAI = "/v1/"
_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class OpenAIError(BaseModel):
    """An error as OpenAI's clients know it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    type: str
    param: str | None
    """Dotted path of the field that was refused."""
    code: str
    """Stable machine-readable name."""


class OpenAIErrorBody(BaseModel):
    """Body of an answer with an error."""

    error: OpenAIError


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody, "description": "An error in OpenAI's shape"} for status in ("4XX", "default")
}
"""Documentation of routes below `/v1`."""


def openai_error(problem: Problem) -> dict[str, Any]:
    """A problem in OpenAI's shape."""
    kind = "server_error" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = OpenAIError(
        message=problem.detail,
        type=_TYPES.get(problem.status, kind),
        param=problem.errors[0].field if problem.errors else None,
        code=problem.code,
    )
    return OpenAIErrorBody(error=error).model_dump()


def error_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed, in the shape that its path asks for."""
    if _OPENAI not in problem.instance:
        return problem_response(problem, headers)
    # OpenAI's clients know bad input as 400.
    bad_input = problem.status == HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.BAD_REQUEST if bad_input else problem.status
    return AsciiJSON(openai_error(problem), status, {**problem_headers(problem.status), **(headers or {})})
