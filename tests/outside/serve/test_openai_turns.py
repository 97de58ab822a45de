"""Conversations that clients send back over OpenAI's routes, on vLLM."""

from tests.surface.openai_turns import *  # noqa: F403
