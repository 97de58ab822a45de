"""Requests of chat pages, editors and agents, on vLLM."""

from tests.surface.programs import *  # noqa: F403
