"""Tools over OpenAI's routes, on the native engine."""

import pytest

from tests.contract.serving.openai_tools import *  # noqa: F403

pytestmark = pytest.mark.slow("loads models")
