"""Structured logs to stderr: one JSON object per line; and redaction of the environment's credentials.

Logs, events, library errors and program output are redacted before they are stored or shown.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote

import structlog

REDACTED = "[redacted]"
_CREDENTIAL_NAME_PATTERN = re.compile(
    r"KEY|SECRET|TOKEN|PASSWORD|PASSPHRASE|CREDENTIAL|CONN(?:ECTION)?_?STR|COOKIE|PRIVATE"
    r"|(?:^|_)(?:SAS|SIG|SIGNATURE|DSN|PASS|PASSWD|PWD|PAT|JWT|BEARER|AUTH|AUTHORIZATION|AUTH_CONFIG)$"
    r"|(?:^|_)(?:SAS|DSN)_",
    re.IGNORECASE,
)
"""Matches names of variables, URL parameters and JSON members whose values are credentials."""
_NOT_CREDENTIAL_NAME_PATTERN = re.compile(r"(?:_FILE|_PATH|_DIR|_URI|_URL|_SOCK)$|^(?-i:(?:OLD)?PWD)$", re.IGNORECASE)
_USER_AND_PASSWORD_PATTERN = re.compile(r"(\w+)://([^\s/?#@:]*)(?::([^\s@]*))?@")
_PARAMETER_PATTERN = re.compile(r"(?<![\w-])([\w-]+)=([^;&\s\"']+)")
"""Matches `name=value` in URLs and connection strings."""
_PRIVATE_KEY_MARKER = "PRIVATE KEY-----"
_MIN_CREDENTIAL_LENGTH = 8
"""Min characters of a credential; shorter values would match ordinary words."""


def find_secrets(environment: Mapping[str, str]) -> set[str]:
    """Return the credentials in an environment.

    These are values of variables with names such as `API_KEY` (whole and per line), and in all values private keys,
    passwords and tokens in URLs, parameters of URLs and connection strings, and members of JSON objects.
    """
    found = set()
    for name, value in environment.items():
        if _names_credential(name) or _PRIVATE_KEY_MARKER in value:
            found.update([value, *value.splitlines()])
        for scheme, user, password in _USER_AND_PASSWORD_PATTERN.findall(value):
            # in `https://TOKEN@host`, the user is a token
            found.add(password or (user if scheme.lower() in ("http", "https") else ""))
        found.update(part for member, part in _PARAMETER_PATTERN.findall(value) if _names_credential(member))
        found.update(_find_json_secrets(value))
    found |= {unquote(value) for value in found}
    return {value for value in found if len(value) >= _MIN_CREDENTIAL_LENGTH}


def _names_credential(name: str) -> bool:
    return _CREDENTIAL_NAME_PATTERN.search(name) is not None and _NOT_CREDENTIAL_NAME_PATTERN.search(name) is None


def _find_json_secrets(value: str) -> set[str]:
    """Return the credentials in a JSON object, such as the key file of a service account."""
    if not value.lstrip().startswith("{"):
        return set()
    found: set[str] = set()

    def read(pairs: list[tuple[str, Any]]) -> None:
        for name, member in pairs:
            if isinstance(member, str) and (_names_credential(name) or _PRIVATE_KEY_MARKER in member):
                found.update([member, *member.splitlines()])

    try:
        json.loads(value, object_pairs_hook=read)
    except (ValueError, RecursionError):
        return set()
    return found


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace credentials in `text` by `[redacted]`, plain or JSON-escaped."""
    redactor = StreamRedactor(environment)
    return redactor.feed(text) + redactor.close()


class StreamRedactor:
    """`redact` for text that arrives in pieces, also if a credential spans several pieces."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        secrets = find_secrets(os.environ if environment is None else environment)
        written = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
        self._credential_forms = sorted(written, key=len, reverse=True)
        """Longest first, so that of two credentials with a common prefix the longer one matches."""
        self._first_characters = frozenset(form[0] for form in self._credential_forms)
        self._pattern = re.compile("|".join(map(re.escape, self._credential_forms))) if written else None
        self._buffer = ""

    def feed(self, text: str) -> str:
        """Return the redacted text, except an end that may be the start of a credential, which is buffered."""
        if self._pattern is None:
            return text
        text, found, position = self._buffer + text, [], 0
        # Credentials that start before `cut` are complete in the text.
        cut = self._find_partial_secret(text, max(len(text) - len(self._credential_forms[0]) + 1, 0))
        for match in self._pattern.finditer(text):
            if match.start() >= cut:
                break
            found += [text[position : match.start()], REDACTED]
            position = match.end()
            if position > cut:
                cut = self._find_partial_secret(text, position)
        self._buffer = text[cut:]
        return "".join([*found, text[position:cut]])

    def close(self) -> str:
        """Return the buffered text, redacted."""
        rest, self._buffer = self._buffer, ""
        return rest if self._pattern is None else self._pattern.sub(REDACTED, rest)

    def _find_partial_secret(self, text: str, start: int) -> int:
        """Return the first index from `start` on where the text may cut off a credential; otherwise its length."""
        for index in range(start, len(text)):
            if text[index] in self._first_characters:
                rest = text[index:]
                if any(len(form) > len(rest) and form.startswith(rest) for form in self._credential_forms):
                    return index
        return len(text)


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
