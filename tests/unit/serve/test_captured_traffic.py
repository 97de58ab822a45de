"""Captured traffic of the native engine."""

import pytest

from tests.contract.serving.captured_traffic import *  # noqa: F403

pytestmark = pytest.mark.slow("loads models")
