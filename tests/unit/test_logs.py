"""Structured logs."""

import builtins
import io
import logging
import sys

import pytest
from ray.train.v2._internal.logging.patch_print import redirected_print

from swiftkv_platform.logs import configure_logging, get_logger


def test_a_worker_whose_stderr_is_wrapped_logs_a_line_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray Train replaces `print` in workers, and W&B wraps stderr: a printed line would go to both and to the log."""
    stderr = io.StringIO()
    monkeypatch.setattr(builtins, "print", redirected_print)
    monkeypatch.setattr(sys, "stderr", stderr)
    configure_logging()
    with caplog.at_level(logging.INFO):
        get_logger().info("training_started")
    assert stderr.getvalue().count("training_started") == 1
    assert caplog.messages == []
