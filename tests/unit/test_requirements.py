"""A missing program skips a test, except where everything is required."""

from __future__ import annotations

import pytest

from tests.requirements import REQUIRE_ALL, missing, required_module


def test_what_is_missing_skips_where_not_everything_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRE_ALL, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such browser"):
        missing("no such browser")


def test_what_is_missing_fails_where_everything_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_ALL, "1")
    with pytest.raises(pytest.fail.Exception, match="no such browser"):
        missing("no such browser")
    with pytest.raises(pytest.fail.Exception, match="no_such_package is not installed, and no other"):
        required_module("no_such_package.part", otherwise=", and no other")


def test_a_package_that_is_there_comes_back() -> None:
    assert required_module("json.decoder").JSONDecoder
