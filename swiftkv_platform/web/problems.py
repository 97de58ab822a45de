"""HTTP responses to errors, in the control plane and the replicas: problem documents (RFC 9457), and below `/v1` the
error formats of OpenAI and Anthropic. Knows no route.
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
"""Status by class of error; the first match wins."""

_HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "30"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "5"},
}
_MAX_VALUE_BYTES = 500
"""Max size of an invalid value that the response repeats."""


class FieldProblem(BaseModel, use_attribute_docstrings=True):
    field: str | None
    """Dotted path, such as `swiftkv.num_key_value_layers`; null for the whole request."""
    value: Any = None
    """The invalid value; null if it is missing or too long to repeat."""
    message: str
    """The problem, and the accepted values."""


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
    """Return the problem document of a request to `path`."""
    return Problem(
        type=f"urn:swiftkv:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=path,
        code=code,
        errors=list(errors),
    )


def make_json_problem(error: Mapping[str, Any]) -> FieldProblem:
    """Return the problem of a body that is not JSON. `error`: FastAPI's; its `loc` ends with a position."""
    position = f" (character {error['loc'][-1]})" if len(error["loc"]) > 1 else ""
    return FieldProblem(field=None, message=f"the body is not valid JSON: {error['ctx']['error']}{position}")


def join_messages(errors: Iterable[FieldProblem]) -> str:
    return "; ".join(f"{each.field}: {each.message}" if each.field else each.message for each in errors)


def make_error_problem(error: SwiftKVError, path: str) -> Problem:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    errors = []
    if error.field is not None:
        errors.append(FieldProblem(field=error.field, value=drop_long_value(error.value), message=error.message))
    return make_problem(path, status, error.code, error.message, errors)


def make_problem_headers(status: int, error: SwiftKVError | None = None) -> dict[str, str]:
    """Return the headers of an error response; `Retry-After` is the error's own delay if it has one."""
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    return headers


class ASCIIJSONResponse(JSONResponse):
    """JSON in ASCII, since errors repeat values that UTF-8 may be unable to encode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def drop_long_value(value: Any) -> Any:
    """Return a JSON value if an error response can repeat it, else None. The cost for a long value is bounded."""
    try:
        if not _may_be_short_enough(value):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= _MAX_VALUE_BYTES else None


def _may_be_short_enough(value: Any) -> bool:
    """Whether a value may be short enough to repeat. Visits no more items than a short value can have."""
    remaining, pending = _MAX_VALUE_BYTES, [value]
    while pending and remaining >= 0:
        item = pending.pop()
        remaining -= len(item) if isinstance(item, str | list | tuple | dict) else 1
        if remaining >= 0 and isinstance(item, list | tuple | dict):
            pending.extend(item)
            pending.extend(item.values() if isinstance(item, dict) else ())
    return remaining >= 0


_OPENAI_PREFIX = "/v1/"
_ANTHROPIC_PREFIX = "/v1/messages"
_OPENAI_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    **_OPENAI_TYPES,
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def is_anthropic_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's Messages API, after any route prefix."""
    return _ANTHROPIC_PREFIX in path


class OpenAIError(BaseModel, use_attribute_docstrings=True):
    """An error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    """Dotted path of the invalid field."""
    code: str
    """Stable machine-readable name."""


class OpenAIErrorBody(BaseModel):
    error: OpenAIError


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIErrorBody, "description": "An error in OpenAI's format"} for status in ("4XX", "default")
}
"""`responses` of routes below `/v1`, for the OpenAPI document."""


def to_openai_error(problem: Problem) -> dict[str, Any]:
    kind = "server_error" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind, param = _OPENAI_TYPES.get(problem.status, kind), problem.errors[0].field if problem.errors else None
    return {"error": {"message": problem.detail, "type": kind, "param": param, "code": problem.code}}


def to_anthropic_error(problem: Problem) -> dict[str, Any]:
    """Return a problem in Anthropic's error format, with OpenAI's `param` and `code` added."""
    error = to_openai_error(problem)["error"]
    if problem.code == ContextLengthError.code:  # Anthropic's clients look for this text
        error["message"] = f"prompt is too long: {problem.detail}"
    default = "api_error" if error["type"] == "server_error" else error["type"]
    return {"type": "error", "error": error | {"type": _ANTHROPIC_TYPES.get(problem.status, default)}}


def respond_with_problem(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response to a problem, in the error format of its path. `headers` override the defaults of its
    status."""
    headers = {**make_problem_headers(problem.status), **(headers or {})}
    if _OPENAI_PREFIX not in problem.instance:
        return ASCIIJSONResponse(problem.model_dump(), problem.status, headers, "application/problem+json")
    # OpenAI and Anthropic answer bad input with 400.
    bad_input = problem.status == HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.BAD_REQUEST if bad_input else problem.status
    body = (to_anthropic_error if is_anthropic_path(problem.instance) else to_openai_error)(problem)
    return ASCIIJSONResponse(body, status, headers)


def respond_with_error(error: SwiftKVError, path: str) -> JSONResponse:
    problem = make_error_problem(error, path)
    return respond_with_problem(problem, make_problem_headers(problem.status, error))
