"""Errors as problem documents (RFC 9457), and below `/v1` in the shape that OpenAI's or Anthropic's clients read: their
statuses, types and headers, the same in every application of ours. The one place where errors become HTTP. Knows no
route.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict
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
"""The first class that fits decides."""

_HEADERS: Mapping[int, Mapping[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "30"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "5"},
}
"""Headers by status. `Retry-After` is a hint here, where it is unknown how long the wait will be."""
_LONGEST_VALUE = 500
"""Bytes of a refused value that are repeated in the answer."""


class FieldProblem(BaseModel):
    """One field that was refused."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    field: str | None
    """Dotted path, such as `swiftkv.num_key_value_layers`; null where the request as a whole is meant."""
    value: Any = None
    """Value as it was sent; null where it is missing or long."""
    message: str
    """Statement of the problem, and of what is accepted."""


class Problem(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """`urn:swiftkv:problem:` and the `code`."""
    title: str
    status: int
    detail: str
    instance: str
    code: str
    """Stable machine-readable name."""
    errors: list[FieldProblem] = []


def make_problem(path: str, status: int, code: str, detail: str, errors: Sequence[FieldProblem] = ()) -> Problem:
    """The document of a problem with a request for `path`."""
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
    """The problem with a body that cannot be parsed. `complaint`: FastAPI's, whose place is a character."""
    where = f" (character {complaint['loc'][-1]})" if len(complaint["loc"]) > 1 else ""
    return FieldProblem(field=None, message=f"the body is no JSON: {complaint['ctx']['error']}{where}")


def sentence_of(errors: Iterable[FieldProblem]) -> str:
    """One sentence on several fields."""
    return "; ".join(f"{each.field}: {each.message}" if each.field else each.message for each in errors)


def problem_of(error: SwiftKVError, path: str) -> Problem:
    """The document of an error."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    errors = []
    if error.field is not None:
        errors.append(FieldProblem(field=error.field, value=short_value(error.value), message=error.message))
    return make_problem(path, status, error.code, error.message, errors)


def problem_headers(status: int, error: SwiftKVError | None = None) -> dict[str, str]:
    """Headers of an answer with a problem; `Retry-After` is the wait that the error knows, in whole seconds."""
    headers = dict(_HEADERS.get(status, {}))
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    return headers


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An `application/problem+json` answer, with the headers of its status where `headers` names no others."""
    return AsciiJSON(
        problem.model_dump(),
        status_code=problem.status,
        headers={**problem_headers(problem.status), **(headers or {})},
        media_type="application/problem+json",
    )


class AsciiJSON(JSONResponse):
    """Errors repeat what they were sent, and whatever that was has to fit."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def short_value(value: Any) -> Any:
    """The value if it is JSON, and short enough to repeat; takes no longer for a long one."""
    try:
        if not _has_room_for(value):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= _LONGEST_VALUE else None


def _has_room_for(value: Any) -> bool:
    """Whether a value may be short enough to repeat; looks at no more of its parts than a short value has."""
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
    """Whether a path is of Anthropic's Messages API, under whatever prefix."""
    return _ANTHROPIC in path


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
    kind, param = _TYPES.get(problem.status, kind), problem.errors[0].field if problem.errors else None
    return {"error": {"message": problem.detail, "type": kind, "param": param, "code": problem.code}}


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """A problem in Anthropic's shape, with OpenAI's `param` and `code` beside its own."""
    error = openai_error(problem)["error"]
    if problem.code == ContextLengthError.code:  # as programs that speak to Anthropic know it
        error["message"] = f"prompt is too long: {problem.detail}"
    other = "api_error" if error["type"] == "server_error" else error["type"]
    return {"type": "error", "error": error | {"type": _ANTHROPIC_TYPES.get(problem.status, other)}}


def error_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed, in the shape that its path asks for."""
    if _OPENAI not in problem.instance:
        return problem_response(problem, headers)
    # Their clients know bad input as 400.
    bad_input = problem.status == HTTPStatus.UNPROCESSABLE_ENTITY
    status = HTTPStatus.BAD_REQUEST if bad_input else problem.status
    body = (anthropic_error if is_anthropics(problem.instance) else openai_error)(problem)
    return AsciiJSON(body, status, {**problem_headers(problem.status), **(headers or {})})
