"""Tools over OpenAI's routes, on the native engine."""

from tests.surface.openai_tools import *  # noqa: F403
