"""Conversations that clients send back, on the native engine."""

import pytest

from tests.surface.openai_turns import *  # noqa: F403

pytestmark = pytest.mark.slow("loads models")
