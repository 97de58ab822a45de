"""Errors of failed calls, parsed from the server's problem details (RFC 9457).

SwiftKVError
├── UnreachableError             no response from the address
├── WaitTimeoutError             a wait timed out
└── APIError                     error response: status, code, errors[]
    ├── InvalidRequestError      400, 413, 415, 422; also an InvalidInputError
    ├── AuthenticationError      401, 403
    ├── ResourceNotFoundError    404; also a NotFoundError
    ├── RequestConflictError     409, 412; also a ConflictError
    ├── RateLimitedError         429; retry_after
    └── ServerError              5xx
        └── ServiceUnavailableError   503; retry_after
"""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, SwiftKVError

_MAX_EXCERPT = 500
"""Max characters of a plain-text error response in a message."""


class FieldError(BaseModel):
    """An invalid field of a request."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    field: str | None = None
    value: Any = None
    message: str = ""

    def __str__(self) -> str:
        # The server's message usually names the field already.
        if not self.field or self.field in self.message:
            return self.message
        return f"{self.field}: {self.message}"


class Problem(BaseModel):
    """RFC 9457 problem details with this API's `code` and `errors`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    title: str = ""
    status: int
    detail: str = ""
    code: str = "unknown"
    errors: tuple[FieldError, ...] = ()


class UnreachableError(SwiftKVError):
    """No connection, or a broken one; the message says how to start the server."""

    code = "unreachable"


class WaitTimeoutError(SwiftKVError):
    """A wait timed out; the job or deployment keeps running."""

    code = "wait_timeout"


class APIError(SwiftKVError):
    """The server returned an error."""

    def __init__(self, problem: Problem, *, request: str, retry_after: float | None = None) -> None:
        first = problem.errors[0] if problem.errors else FieldError()
        super().__init__(_format_message(problem, request, retry_after), field=first.field, value=first.value)
        self.status = problem.status
        """HTTP status code."""
        self.code = problem.code
        self.errors = problem.errors
        """One entry per invalid field: `field`, `value`, `message`."""
        self.retry_after = retry_after
        """Seconds of the `Retry-After` header, if any."""


class InvalidRequestError(APIError, InvalidInputError):
    """The request is not valid."""


class AuthenticationError(APIError):
    """The key is missing, wrong, or lacks the scope."""


class ResourceNotFoundError(APIError, NotFoundError):
    """The job, model, deployment or file does not exist."""


class RequestConflictError(APIError, ConflictError):
    """The request conflicts with the current state, such as a job's status or a version."""


class RateLimitedError(APIError):
    """A rate limit or quota is exceeded, or a queue is full."""


class ServerError(APIError):
    """The server failed."""


class ServiceUnavailableError(ServerError):
    """Ray, the database or the model is temporarily unavailable."""


_ERROR_BY_STATUS: dict[int, type[APIError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: ResourceNotFoundError,
    409: RequestConflictError,
    412: RequestConflictError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: RateLimitedError,
    503: ServiceUnavailableError,
}

_ADVICE_BY_STATUS: dict[int, str] = {
    401: "Pass api_key= (command line: SWIFTKV_API_KEY).",
    403: "Use a key with the required scope, or ask the operator for it.",
    404: "To find ids: `swiftkv jobs list`, `swiftkv models list`, `swiftkv deployments list`.",
    413: "Send a smaller request, or ask the operator to raise SWIFTKV_MAX_REQUEST_BYTES.",
}


def make_api_error(response: httpx.Response) -> APIError:
    """Return the exception for an unsuccessful response, whose body must have been read."""
    request = f"{response.request.method} {response.request.url}"
    problem = _parse_problem(response)
    default = ServerError if response.status_code >= 500 else APIError
    kind = _ERROR_BY_STATUS.get(response.status_code, default)
    return kind(problem, request=request, retry_after=parse_retry_after(response))


def parse_retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the `Retry-After` header; None if it is absent or a date."""
    try:
        return max(float(response.headers["retry-after"]), 0.0)
    except (KeyError, ValueError):
        return None


def _parse_problem(response: httpx.Response) -> Problem:
    try:
        document = response.json()
        if isinstance(refused := document.get("error"), dict):  # OpenAI's shape, below /v1
            fields = [{"field": refused["param"], "message": refused["message"]}] if refused.get("param") else []
            document = {"detail": refused["message"], "code": refused["code"], "errors": fields}
        return Problem.model_validate({"status": response.status_code, **document})
    except (ValueError, TypeError, KeyError, AttributeError, ValidationError):
        # Proxies and Ray Serve may return plain text.
        detail = response.text[:_MAX_EXCERPT].strip()
        return Problem(status=response.status_code, title=response.reason_phrase, detail=detail)


def _format_message(problem: Problem, request: str, retry_after: float | None) -> str:
    lines = [problem.detail or problem.title or "The server reported no reason."]
    lines += [f"  {error}" for error in problem.errors if error.message not in lines[0]]
    if retry_after is not None:
        lines.append(f"Retry in {retry_after:g} s.")
    elif problem.status in _ADVICE_BY_STATUS:
        lines.append(_ADVICE_BY_STATUS[problem.status])
    elif problem.status >= 500:
        lines.append("See the server's log for details.")
    return "\n".join(lines) + f"\n({problem.status} {problem.code}, {request})"
