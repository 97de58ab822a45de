"""Requests of chat pages, editors and agents, on the native engine."""

from tests.surface.programs import *  # noqa: F403
