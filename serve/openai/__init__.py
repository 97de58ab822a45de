"""OpenAI's routes: bodies, answers, and the routes themselves."""

from swiftkv_platform.serve.openai.answers import DONE
from swiftkv_platform.serve.openai.routes import openai_router

__all__ = ["DONE", "openai_router"]
