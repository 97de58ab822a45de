"""Problem documents: control plane and replicas answer the same error with the same document and headers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftkv_platform.api import error_handlers
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
from swiftkv_platform.serve.problems import add_problem_handlers

MEMBERS = {"type", "title", "status", "detail", "instance", "code", "errors"}


def answers(error: SwiftKVError, path: str = "/failing") -> tuple[httpx.Response, httpx.Response]:
    """Answers of the control plane and of a replica where a route raises `error`."""

    def ask(app: FastAPI) -> httpx.Response:
        @app.get(path)
        def failing() -> None:
            raise error

        return TestClient(app, raise_server_exceptions=False).get(path)

    control_plane, replica = FastAPI(), FastAPI()
    error_handlers.install(control_plane)
    add_problem_handlers(replica)
    return ask(control_plane), ask(replica)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (InvalidInputError("n is 0; 1 would do", field="n", value=0), 422, {}),
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
    ],
)
def test_both_applications_answer_an_error_alike(error: SwiftKVError, status: int, headers: dict[str, str]) -> None:
    plane, replica = answers(error)
    assert (plane.status_code, plane.headers["content-type"]) == (status, "application/problem+json")
    assert (replica.status_code, replica.headers["content-type"]) == (status, "application/problem+json")
    document = plane.json()
    assert replica.json() == document
    assert document.keys() == MEMBERS
    assert (document["type"], document["instance"]) == (f"urn:swiftkv:problem:{error.code}", "/failing")
    for answer in (plane, replica):
        assert {name: answer.headers[name] for name in headers} == headers


def test_openai_routes_keep_their_shape_and_tell_the_same_wait() -> None:
    for refused in answers(QueueFullError("queue full", retry_after_s=4.2), "/v1/failing"):
        assert refused.json() == {
            "error": {"message": "queue full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
        }
        assert (refused.headers["content-type"], refused.headers["retry-after"]) == ("application/json", "5")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (None, None),
        ("short", "short"),
        ({"a": [1, None, 0.5]}, {"a": [1, None, 0.5]}),
        ("x" * 500, None),
        ([[7] * 90] * 9, None),
        (float("nan"), None),
        ("\ud800", None),
        (object(), None),
    ],
)
def test_a_refused_value_is_repeated_whole_or_not_at_all(sent: Any, shown: Any) -> None:
    for answer in answers(InvalidInputError("refused", field="f", value=sent)):
        assert answer.json()["errors"][0]["value"] == shown


class Unread(dict[str, int]):
    """An object too large to be written down before it is known that it is."""

    def __len__(self) -> int:
        return 1_000_000

    def items(self) -> Any:
        raise AssertionError("it was read")


@pytest.mark.parametrize("value", [Unread(), [[Unread()]], {"a": Unread()}], ids=["itself", "in lists", "in an object"])
def test_a_huge_value_is_not_written_down_to_find_that_it_is_long(value: Any) -> None:
    for answer in answers(InvalidInputError("refused", field="f", value=value)):
        assert (answer.status_code, answer.json()["errors"][0]["value"]) == (422, None)
