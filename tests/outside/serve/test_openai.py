"""vLLM behind OpenAI's routes."""

from tests.contract.serving.openai_routes import *  # noqa: F403
