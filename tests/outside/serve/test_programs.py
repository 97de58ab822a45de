"""Requests of chat pages, editors and agents, on vLLM."""

from tests.contract.serving.programs import *  # noqa: F403
