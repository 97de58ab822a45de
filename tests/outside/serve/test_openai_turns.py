"""Conversations that clients send back, on vLLM."""

from tests.surface.openai_turns import *  # noqa: F403
