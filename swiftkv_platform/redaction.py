"""Keeps the environment's credentials out of what is written down: logs, events, saved output. Knows no sink.

Whatever a library puts into an error or a program prints passes through here before it is kept or shown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

REDACTED = "[redacted]"
_SENSITIVE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
_A_PLACE = re.compile(r"(_FILE|_PATH|_DIR|_URI|_URL)$", re.IGNORECASE)
_SHORTEST = 8
"""Characters; a shorter value would be found in ordinary words."""


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Values of variables that are named like credentials, and passwords in addresses."""
    found = set()
    for name, value in environment.items():
        if _SENSITIVE.search(name) and not _A_PLACE.search(name):
            found.add(value)
        elif "://" in value:
            try:
                found.add(urlsplit(value).password or "")
            except ValueError:
                continue  # no address after all
    return {value for value in found if len(value) >= _SHORTEST}


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without this process's credentials, written plainly or as JSON."""
    for secret in secrets_of(os.environ if environment is None else environment):
        for written in {secret, json.dumps(secret)[1:-1]}:
            text = text.replace(written, REDACTED)
    return text
