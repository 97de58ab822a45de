"""The size of a request's body by its `Content-Length`."""

import sys

import pytest
from starlette.datastructures import Headers

from swiftkv_platform.web.middleware import announced_bytes


@pytest.mark.parametrize(
    ("announced", "size"),
    [
        ("12", 12),
        ("0012", 12),
        ("0" * 5000, 0),
        ("0" * 5000 + "12", 12),
        ("9" * 5000, sys.maxsize),
        (str(sys.maxsize + 1), sys.maxsize),
        ("", 0),
        ("-1", 0),
        ("1_000", 0),
        ("\xb2", 0),
    ],
    ids=lambda value: f"{value!r:.12}",
)
def test_any_length_is_a_number_of_bytes(announced: str, size: int) -> None:
    assert announced_bytes(Headers({"Content-Length": announced})) == size


def test_a_body_without_a_length_announces_nothing() -> None:
    assert announced_bytes(Headers({})) == 0
