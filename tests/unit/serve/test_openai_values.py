"""Parameters and tokens over OpenAI's routes, on the native engine."""

from tests.surface.openai_values import *  # noqa: F403
