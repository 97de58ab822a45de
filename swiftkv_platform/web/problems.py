"""The one place where errors become HTTP: problem documents (RFC 9457), and below `/v1` the error formats of OpenAI and
Anthropic. Statuses, types and headers are the same in the control plane and the replicas. Knows no route.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ClusterUnavailableError,
    ConflictError,
    ContextLengthError,
    DatabaseUnavailableError,
    DeadlineExceededError,
    EngineDeadError,
    ForbiddenError,
    IdempotencyConflictError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    OverloadedError,
    PreconditionFailedError,
    QuotaExceededError,
    StorageError,
    SwiftKVError,
    UnauthenticatedError,
)

_STATUS: Sequence[tuple[type[SwiftKVError], HTTPStatus]] = (
    (InvalidInputError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (IdempotencyConflictError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (UnauthenticatedError, HTTPStatus.UNAUTHORIZED),
    (ForbiddenError, HTTPStatus.FORBIDDEN),
    (QuotaExceededError, HTTPStatus.TOO_MANY_REQUESTS),
    (OverloadedError, HTTPStatus.TOO_MANY_REQUESTS),
    (NotFoundError, HTTPStatus.NOT_FOUND),
    (PreconditionFailedError, HTTPStatus.PRECONDITION_FAILED),
    (ConflictError, HTTPStatus.CONFLICT),
    (ObjectNotFoundError, HTTPStatus.NOT_FOUND),
    (ArtifactCorruptError, HTTPStatus.INTERNAL_SERVER_ERROR),
    (StorageError, HTTPStatus.SERVICE_UNAVAILABLE),
    (ClusterUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DatabaseUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (EngineDeadError, HTTPStatus.SERVICE_UNAVAILABLE),
    (DeadlineExceededError, HTTPStatus.GATEWAY_TIMEOUT),
    (SwiftKVError, HTTPStatus.INTERNAL_SERVER_ERROR),
)
"""Statuses by class of error; the first match counts."""

_HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "30"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "5"},
}
"""Headers by status. `Retry-After` is a guess, for errors that do not know how long to wait."""
_LONGEST_VALUE = 500
"""Most bytes of a refused value that the answer repeats."""


class FieldProblem(BaseModel, use_attribute_docstrings=True):
    """One field that was refused."""

    field: str | None
    """Dotted path, such as `swiftkv.num_key_value_layers`; null for the request as a whole."""
    value: Any = None
    """Value as it was sent; null if it is missing or too long to repeat."""
    message: str
    """Statement of what is wrong, and of what is accepted."""


class Problem(BaseModel, use_attribute_docstrings=True):
    """RFC 9457 problem details."""

    type: str
    """`urn:swiftkv:problem:` followed by `code`."""
    title: str
    status: int
    detail: str
    instance: str
    code: str
    """Stable machine-readable name."""
    errors: list[FieldProblem] = []


def make_problem(path: str, status: int, code: str, detail: str, errors: Sequence[FieldProblem] = ()) -> Problem:
    """Return the problem document for a request to `path`."""
    return Problem(
        type=f"urn:swiftkv:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=path,
        code=code,
        errors=list(errors),
    )


def no_json(complaint: Mapping[str, Any]) -> FieldProblem:
    """Return the problem of a body that is not JSON. `complaint`: FastAPI's error; its `loc` ends with a position."""
    where = f" (character {complaint['loc'][-1]})" if len(complaint["loc"]) > 1 else ""
    return FieldProblem(field=None, message=f"the body is not valid JSON: {complaint['ctx']['error']}{where}")


def sentence_of(errors: Iterable[FieldProblem]) -> str:
    """Join the problems of several fields into one sentence."""
    return "; ".join(f"{each.field}: {each.message}" if each.field else each.message for each in errors)


def problem_of(error: SwiftKVError, path: str) -> Problem:
    """Return the problem document of an error in a request to `path`."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    errors = []
    if error.field is not None:
        errors.append(FieldProblem(field=error.field, value=short_value(error.value), message=error.message))
    return make_problem(path, status, error.code, error.message, errors)


def problem_headers(status: int, error: SwiftKVError | None = None) -> dict[str, str]:
    """Return the headers of a problem response; `Retry-After` is the error's own wait if known, in whole seconds."""
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    return headers


class AsciiJSON(JSONResponse):
    """JSON in ASCII only: errors repeat what was sent, which may hold text that UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def short_value(value: Any) -> Any:
    """Return the value if it is JSON and short enough to repeat, else None; the cost is bounded for a long one."""
    try:
        if not _has_room_for(value):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= _LONGEST_VALUE else None


def _has_room_for(value: Any) -> bool:
    """Whether a value may be short enough to repeat; visits no more parts than a short value can have."""
    room, pending = _LONGEST_VALUE, [value]
    while pending and room >= 0:
        item = pending.pop()
        room -= len(item) if isinstance(item, str | list | tuple | dict) else 1
        if room >= 0 and isinstance(item, list | tuple | dict):
            pending.extend(item)
            pending.extend(item.values() if isinstance(item, dict) else ())
    return room >= 0


_OPENAI = "/v1/"
_ANTHROPIC = "/v1/messages"
_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    **_TYPES,
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def is_anthropics(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API, under any prefix."""
    return _ANTHROPIC in path


class OpenAIError(BaseModel, use_attribute_docstrings=True):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    """Dotted path of the refused field."""
    code: str
    """Stable machine-readable name."""


class OpenAIErrorBody(BaseModel):
    """Body of an error response."""

    error: OpenAIError


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody, "description": "An error in OpenAI's shape"} for status in ("4XX", "default")
}
"""OpenAPI `responses` of routes below `/v1`."""


def openai_error(problem: Problem) -> dict[str, Any]:
    """Return a problem in OpenAI's error format."""
    kind = "server_error" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind, param = _TYPES.get(problem.status, kind), problem.errors[0].field if problem.errors else None
    return {"error": {"message": problem.detail, "type": kind, "param": param, "code": problem.code}}


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Return a problem in Anthropic's error format, with OpenAI's `param` and `code` added."""
    error = openai_error(problem)["error"]
    if problem.code == ContextLengthError.code:  # Anthropic's clients look for this text
        error["message"] = f"prompt is too long: {problem.detail}"
    other = "api_error" if error["type"] == "server_error" else error["type"]
    return {"type": "error", "error": error | {"type": _ANTHROPIC_TYPES.get(problem.status, other)}}


def error_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the error response in the format of its path: OpenAI's, Anthropic's or a problem document. `headers`
    override the default ones of its status."""
    headers = {**problem_headers(problem.status), **(headers or {})}
    if _OPENAI not in problem.instance:
        return AsciiJSON(problem.model_dump(), problem.status, headers, "application/problem+json")
    # OpenAI and Anthropic answer bad input with 400.
    bad_input = problem.status == HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.BAD_REQUEST if bad_input else problem.status
    body = (anthropic_error if is_anthropics(problem.instance) else openai_error)(problem)
    return AsciiJSON(body, status, headers)


def response_to(error: SwiftKVError, path: str) -> JSONResponse:
    """Return the response to a request to `path` that failed with `error`."""
    problem = problem_of(error, path)
    return error_response(problem, problem_headers(problem.status, error))
