"""Tools over OpenAI's routes, on vLLM."""

from tests.contract.serving.openai_tools import *  # noqa: F403
