"""Conversations that clients send back, on the native engine."""

from tests.surface.openai_turns import *  # noqa: F403
