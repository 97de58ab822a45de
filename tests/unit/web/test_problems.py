"""Problem documents: control plane and replicas answer the same error with the same document and headers."""

from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftkv_platform.control_plane import responses
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    DeadlineExceededError,
    EngineDeadError,
    ForbiddenError,
    GenerationError,
    InvalidInputError,
    NotFoundError,
    QueueFullError,
    QuotaExceededError,
    RateLimitedError,
    StorageError,
    SwiftKVError,
    UnauthenticatedError,
)
from swiftkv_platform.serve.http import add_problem_handlers

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "errors"}


def answers(error: SwiftKVError, path: str = "/failing") -> tuple[httpx.Response, httpx.Response]:
    """Answers of the control plane and of a replica where a route raises `error`."""

    def ask(app: FastAPI) -> httpx.Response:
        @app.get(path)
        def failing() -> None:
            raise error

        return TestClient(app, raise_server_exceptions=False).get(path)

    control_plane, replica = FastAPI(), FastAPI()
    responses.install_error_handlers(control_plane)
    add_problem_handlers(replica, [])
    return ask(control_plane), ask(replica)


def test_openai_routes_keep_their_shape_and_tell_the_same_wait() -> None:
    for refused in answers(QueueFullError("queue full", retry_after_s=4.2), "/v1/failing"):
        assert refused.json() == {
            "error": {"message": "queue full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
        }
        assert (refused.headers["content-type"], refused.headers["retry-after"]) == ("application/json", "5")


class Unread(dict[str, int]):
    """An object that says that it is large and fails if it is read."""

    def __len__(self) -> int:
        return 1_000_000

    def items(self) -> Any:
        raise AssertionError("it was read")


ERRORS: list[tuple[SwiftKVError, int, dict[str, str]]] = [
    (InvalidInputError("n is 0; 1 is accepted", field="n", value=0), 422, {}),
    (UnauthenticatedError("no key"), 401, {"www-authenticate": "Bearer"}),
    (ForbiddenError("another tenant's"), 403, {}),
    (NotFoundError("there is no model x", field="model", value="x"), 404, {}),
    (RateLimitedError("too many", field="Authorization", retry_after_s=12.3), 429, {"retry-after": "13"}),
    (RateLimitedError("too many", retry_after_s=0.2), 429, {"retry-after": "1"}),
    (QueueFullError("queue full", retry_after_s=4.2), 429, {"retry-after": "5"}),
    (QueueFullError("queue full"), 429, {"retry-after": "1"}),
    (QuotaExceededError("too many jobs wait"), 429, {"retry-after": "30"}),
    (StorageError("away"), 503, {"retry-after": "5"}),
    (ClusterUnavailableError("away"), 503, {"retry-after": "5"}),
    (EngineDeadError("the engine failed"), 503, {"retry-after": "5"}),
    (DeadlineExceededError("too late"), 504, {}),
    (GenerationError("no numbers"), 500, {}),
]


def test_both_applications_answer_an_error_alike() -> None:
    for error, status, headers in ERRORS:
        plane, replica = answers(error)
        for answer in (plane, replica):
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
            assert {name: answer.headers[name] for name in headers} == headers
        document = plane.json()
        assert replica.json() == document
        assert document.keys() == MEMBERS
        assert (document["type"], document["instance"]) == (f"urn:swiftkv:problem:{error.code}", "/failing")


def test_a_refused_value_is_repeated_whole_or_not_at_all() -> None:
    """A value that is too large is recognised without being serialised."""
    small: list[Any] = [None, "short", {"a": [1, None, 0.5]}]
    large: list[Any] = ["x" * 500, [[7] * 90] * 9, Unread(), [[Unread()]], {"a": Unread()}]
    for value in (*small, *large, float("nan"), "\ud800", object()):
        shown = value if any(value is each for each in small) else None
        for answer in answers(InvalidInputError("refused", field="f", value=value)):
            assert (answer.status_code, answer.json()["errors"][0]["value"]) == (422, shown)
