"""Conversations in other forms than chat completions, on vLLM."""

from tests.contract.serving.conversations import *  # noqa: F403
