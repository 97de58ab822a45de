"""Requests of chat pages, editors and agents, on the native engine."""

from tests.contract.serving.programs import *  # noqa: F403
