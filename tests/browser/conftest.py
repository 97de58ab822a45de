"""Fixtures of the browser tests."""

from tests.browsers import browser, page

__all__ = ["browser", "page"]
