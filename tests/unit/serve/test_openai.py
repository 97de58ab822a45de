"""The native engine behind OpenAI's routes."""

from tests.surface.openai_routes import *  # noqa: F403
