"""Requests of chat pages, editors and agents, on vLLM."""

import pytest

from tests.contract.serving.programs import *  # noqa: F403


@pytest.fixture
def block_size() -> int:
    """vLLM's on a CPU."""
    return 128
