"""Conversations in other forms than chat completions, on vLLM."""

from tests.surface.conversations import *  # noqa: F403
