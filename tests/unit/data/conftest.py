"""Fixtures of the data pipeline's tests."""

from tests.training_text import own_cache, write

__all__ = ["own_cache", "write"]
