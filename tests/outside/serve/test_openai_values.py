"""Parameters and tokens over OpenAI's routes, on vLLM."""

from tests.surface.openai_values import *  # noqa: F403
