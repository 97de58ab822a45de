"""Exception handlers that return every error as a problem document: platform errors, framework errors and bugs."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import InvalidInputError, StorageError, SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.web.invalid_fields import (
    describe_validation_error,
    drop_redundant_errors,
    get_body_annotation,
    get_json_path,
)
from swiftkv_platform.web.middleware import RESPONSE_HEADERS
from swiftkv_platform.web.problems import (
    FieldProblem,
    drop_long_value,
    join_messages,
    make_json_problem,
    make_problem,
    respond_with_error,
    respond_with_problem,
)
from swiftkv_platform.web.safe_json import JsonPath, format_path

_CLIENT_CLOSED_REQUEST = 499
_MAX_FIELDS = 20
"""Max invalid fields in a response."""
_MAX_VALIDATION_ERRORS = 200
"""Max validation errors that are examined: a body may cause tens of thousands."""
_UNKNOWN_V1_ROUTE = (
    "the control plane serves only /v1/files and /v1/fine_tuning; send other OpenAI requests to a deployment, such as "
    "URL/v1/chat/completions with the `url` that GET /deployments returns"
)


_EXHAUSTION_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}
"""Errors of a full, limited, read-only or failing disk, and of a machine without file descriptors, memory or
processes."""


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` return every error as a problem document."""
    app.add_exception_handler(SwiftKVError, _handle_platform_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_request)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_exception_handler(OSError, _handle_os_error)
    app.add_exception_handler(Exception, _handle_unexpected_error)


def _handle_platform_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SwiftKVError)
    return respond_with_error(error, request.url.path)


def _handle_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = get_body_annotation(request.scope)
    complaints = error.errors()[:_MAX_VALIDATION_ERRORS]
    found = drop_redundant_errors([(get_json_path(item, body), item) for item in complaints])
    errors = [_make_field_problem(place, item, body) for place, item in found[:_MAX_FIELDS]]
    return respond_with_problem(
        make_problem(request.url.path, 422, InvalidInputError.code, join_messages(errors), errors)
    )


def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code, detail = HTTPStatus(error.status_code).name.lower(), str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND and request.url.path.startswith("/v1/"):
        detail = _UNKNOWN_V1_ROUTE
    return respond_with_problem(make_problem(request.url.path, error.status_code, code, detail), error.headers)


def _handle_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _handle_os_error(request: Request, error: Exception) -> JSONResponse:
    """Return 503 for exhausted resources of this machine, as for a full object store. Re-raises other errors."""
    assert isinstance(error, OSError)
    # Without room in any directory for temporary files, Python finds none.
    if error.errno not in _EXHAUSTION_ERRNOS and not str(error.strerror).startswith("No usable temporary directory"):
        raise error
    get_logger().error("out of resources", path=request.url.path, reason=str(error))
    detail = (
        f"the control plane's machine is out of resources: {error.strerror}; retry after its operator has freed some"
    )
    return _handle_platform_error(request, StorageError(detail))


def _handle_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    get_logger().error("unhandled error", path=request.url.path, exc_info=error)
    detail = "internal error of the control plane; see its log"
    # This answer is sent outside of the middleware that adds headers to all others.
    return respond_with_problem(make_problem(request.url.path, 500, SwiftKVError.code, detail), RESPONSE_HEADERS)


def _make_field_problem(place: JsonPath, item: Mapping[str, Any], body: Any) -> FieldProblem:
    if item["type"] == "json_invalid":
        return make_json_problem(item)
    field, message = format_path(place), describe_validation_error(item, body)
    if item["type"] == "missing":
        return FieldProblem(field=field or str(item["loc"][0]), message=message)
    # A rule over several fields names the one to change itself.
    context = item.get("ctx", {})
    field = ".".join(filter(None, [field, context.get("field")])) or None
    value = context.get("value", item.get("input"))
    return FieldProblem(field=field, value=drop_long_value(value), message=message)
