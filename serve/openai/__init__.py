"""OpenAI's routes: bodies, answers, and the routes themselves."""

from swiftkv_platform.serve.openai.routes import DONE, openai_router

__all__ = ["DONE", "openai_router"]
