"""What these tests drive."""

from tests.browsers import browser, page

__all__ = ["browser", "page"]
