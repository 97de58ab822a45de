"""Tools over OpenAI's routes, on vLLM."""

from tests.surface.openai_tools import *  # noqa: F403
