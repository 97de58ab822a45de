"""JSON responses: base classes, lists and their query parameters, and every error as a problem document."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.errors import InvalidInputError, StorageError, SwiftKVError
from swiftkv_platform.limits import PAGE_BYTES
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

T = TypeVar("T")


Item = TypeVar("Item", bound=BaseModel)


class ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, from_attributes=True)


class ListResponse(ResponseModel, Generic[Item]):
    """Page of a list; `after={last_id}` gives the next."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None
    left_out: list[str] = []
    """Ids of unreadable rows of this page, stored by another version of the program."""


def make_list_response(
    page: Page[T],
    make_item: Callable[[T], Item],
    cursor: Callable[[Item], str] = attrgetter("id"),
    order: Literal["asc", "desc"] = "asc",
) -> ListResponse[Item]:
    """Return the response of a list. It ends before its objects exceed `PAGE_BYTES`, but has at least one.
    `first_id` and `last_id`, in `order`, may be ids of unreadable rows."""
    # 1. objects that fit  2. unreadable rows between them  3. the page's first and last id
    data = limit_page_bytes(map(make_item, page.items))
    is_cut = len(data) < len(page.items)
    ids, left_out = [cursor(item) for item in data], list(page.unreadable_ids)
    if left_out:
        if is_cut:  # those after the page's end belong to a later page
            left_out = [each for each in left_out if (each < ids[-1] if order == "asc" else each > ids[-1])]
        ids = sorted([*ids, *left_out], reverse=order == "desc")
    return ListResponse(
        data=data,
        has_more=page.has_more or is_cut,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        left_out=left_out,
    )


def limit_page_bytes(items: Iterable[Item]) -> list[Item]:
    """Return the first objects that fit `PAGE_BYTES` as JSON, at least one. Later objects are not created."""
    found: list[Item] = []
    size = 0
    for item in items:
        size += len(to_json(item))
        if found and size > PAGE_BYTES.default:
            break
        found.append(item)
    return found


Order = Literal["asc", "desc"]


def make_page_query(default_limit: int, default_order: Order, *, max_limit: int = 1000) -> Callable[..., PageQuery]:
    """Return a dependency that parses a page's query parameters."""

    def read_page(
        after: str | None = Query(None, description="`last_id` of the previous page"),
        limit: int = Query(default_limit, ge=1, le=max_limit),
        order: Order = default_order,
    ) -> PageQuery:
        return PageQuery(after, limit, order)

    return read_page


NewestFirst = Annotated[PageQuery, Depends(make_page_query(20, "desc"))]


OldestFirst = Annotated[PageQuery, Depends(make_page_query(100, "asc"))]


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
