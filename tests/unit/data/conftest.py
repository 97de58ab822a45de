"""Fixtures of the data pipeline's tests."""

from tests.support.training_text import own_cache, write

__all__ = ["own_cache", "write"]
