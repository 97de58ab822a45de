"""Structured logs to stderr: one JSON object per line."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from swiftkv_platform.redaction import redact

_JSON_RENDERER = structlog.processors.JSONRenderer()


def configure_logging(*, level: int = logging.INFO, **bound: Any) -> None:
    """Send this process's structured logs to stderr and bind `bound` (job_id, attempt, rank, ...) to every line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _render_without_credentials,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # Look up sys.stderr for each line, since tests and Ray replace it. Not `PrintLogger`: Ray Train replaces
        # `print` in workers, and a line would be in the log twice.
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(**bound)


def _render_without_credentials(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """Render an event as a JSON line, with this process's credentials redacted."""
    line = _JSON_RENDERER(logger, method, event)
    return redact(line if isinstance(line, str) else line.decode())


def get_logger(**bound: Any) -> structlog.stdlib.BoundLogger:
    """Return a logger that adds `bound` to each line."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(**bound)
    return logger
