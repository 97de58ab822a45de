"""Captured traffic of vLLM."""

from tests.contract.serving.captured_traffic import *  # noqa: F403
