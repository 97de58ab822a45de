"""OpenAI's routes: bodies, answers, and the routes themselves."""

from swiftkv_platform.serve.openai.routes import openai_router
from swiftkv_platform.serve.openai.streams import DONE

__all__ = ["DONE", "openai_router"]
