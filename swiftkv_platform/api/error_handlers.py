"""The one place where errors become HTTP: RFC 9457 problem details, for the framework's own refusals as well."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from swiftkv_platform.api.refused_fields import accepted_keys, most_telling, place_of
from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ClusterUnavailableError,
    ConflictError,
    DatabaseUnavailableError,
    ForbiddenError,
    IdempotencyConflictError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    PreconditionFailedError,
    QuotaExceededError,
    RateLimitedError,
    StorageError,
    SwiftKVError,
    UnauthenticatedError,
)
from swiftkv_platform.logs import get_logger
from swiftkv_platform.web.hostile_json import Place, dotted

_STATUS: Sequence[tuple[type[SwiftKVError], int]] = (
    (InvalidInputError, 422),
    (IdempotencyConflictError, 422),
    (UnauthenticatedError, 401),
    (ForbiddenError, 403),
    (QuotaExceededError, 429),
    (RateLimitedError, 429),
    (NotFoundError, 404),
    (PreconditionFailedError, 412),
    (ConflictError, 409),
    (ObjectNotFoundError, 404),
    (ArtifactCorruptError, 500),
    (StorageError, 503),
    (ClusterUnavailableError, 503),
    (DatabaseUnavailableError, 503),
    (SwiftKVError, 500),
)
"""The first class that fits decides."""

_RETRY_AFTER_S = 5
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "30"},
    503: {"Retry-After": str(_RETRY_AFTER_S)},
}
"""Headers by status."""
_LONGEST_VALUE = 500
"""Characters of a refused value that are repeated in the answer."""
_MOST_FIELDS = 20
"""Refused fields that an answer names."""


class FieldProblem(BaseModel):
    """One field that was refused."""

    field: str | None
    """Dotted path, such as `swiftkv.num_key_value_layers`; null where the request as a whole is meant."""
    value: Any = None
    """Value as it was sent; null where it is missing or long."""
    message: str
    """Statement of the problem, and of what would do."""


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    """Stable machine-readable name."""
    errors: list[FieldProblem] = []


def problem_response(
    path: str,
    status: int,
    code: str,
    detail: str,
    *,
    errors: Sequence[FieldProblem] = (),
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An `application/problem+json` answer."""
    problem = Problem(
        type=f"urn:swiftkv:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=path,
        code=code,
        errors=list(errors),
    )
    return _AsciiJSON(
        problem.model_dump(mode="json"),
        status_code=status,
        headers={**_HEADERS.get(status, {}), **(headers or {})},
        media_type="application/problem+json",
    )


class _AsciiJSON(JSONResponse):
    """Errors repeat what they were sent, and whatever that was has to fit."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""
    app.add_exception_handler(SwiftKVError, _on_our_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def _on_our_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SwiftKVError)
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    errors = []
    if error.field is not None:
        errors.append(FieldProblem(field=error.field, value=_shown(error.value), message=error.message))
    headers = {"Retry-After": "1"} if isinstance(error, RateLimitedError) else None
    return problem_response(request.url.path, status, error.code, error.message, errors=errors, headers=headers)


def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = _body_annotation(request)
    found = most_telling([(place_of(item, body), item) for item in error.errors()])
    errors = [_field_problem(place, item, body) for place, item in found[:_MOST_FIELDS]]
    detail = "; ".join(f"{item.field}: {item.message}" if item.field else item.message for item in errors)
    return problem_response(request.url.path, 422, InvalidInputError.code, detail, errors=errors)


def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).name.lower()
    headers = dict(error.headers) if error.headers else None
    return problem_response(request.url.path, error.status_code, code, str(error.detail), headers=headers)


def _on_bug(request: Request, error: Exception) -> JSONResponse:
    get_logger().error("unhandled error", path=request.url.path, exc_info=error)
    detail = "the control plane made a mistake; its log says more"
    return problem_response(request.url.path, 500, SwiftKVError.code, detail)


def _field_problem(place: Place, item: Mapping[str, Any], body: Any) -> FieldProblem:
    field, message = dotted(place), item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "json_invalid":
            return FieldProblem(field=None, message=f"the body is no JSON: {item['ctx']['error']}")
        case "extra_forbidden":
            message = f"unknown key; accepted here: {', '.join(accepted_keys(item, body))}"
        case "missing":
            return FieldProblem(field=field or str(item["loc"][0]), message="required, and missing")
    # A rule over several fields says itself which one it would change.
    context = item.get("ctx", {})
    field, value = context.get("field", field), context.get("value", item.get("input"))
    return FieldProblem(field=field, value=_shown(value), message=message)


def _body_annotation(request: Request) -> Any:
    """Type that the request's endpoint takes as its body; None for none."""
    parameters = request.scope["route"].dependant.body_params
    return parameters[0].field_info.annotation if parameters else None


def _shown(value: Any) -> Any:
    """The value if it is short enough to repeat, and text."""
    try:
        return value if len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode()) <= _LONGEST_VALUE else None
    except (TypeError, ValueError, RecursionError):
        return None
