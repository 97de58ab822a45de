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
    """Values of variables that are named like credentials, each of their lines, and passwords in addresses."""
    found = set()
    for name, value in environment.items():
        if _SENSITIVE.search(name) and not _A_PLACE.search(name):
            found.update([value, *value.splitlines()])
        elif "://" in value:
            try:
                found.add(urlsplit(value).password or "")
            except ValueError:
                continue  # no address after all
    return {value for value in found if len(value) >= _SHORTEST}


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without this process's credentials, written plainly or as JSON."""
    redactor = StreamRedactor(environment)
    return redactor.feed(text) + redactor.close()


class StreamRedactor:
    """`redact` for text that comes in pieces: what it gives does not depend on where they end."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        secrets = secrets_of(os.environ if environment is None else environment)
        written = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
        self._written = sorted(written, key=len, reverse=True)
        """The longest first: of two that begin alike the longer is meant."""
        self._begin = frozenset(form[0] for form in self._written)
        self._pattern = re.compile("|".join(map(re.escape, self._written))) if written else None
        self._held = ""

    def feed(self, text: str) -> str:
        """All of the text so far but what may be the beginning of a credential."""
        if self._pattern is None:
            return text
        text, found, position = self._held + text, [], 0
        # Before this place every credential that begins has ended.
        held = self._first_open(text, max(len(text) - len(self._written[0]) + 1, 0))
        for match in self._pattern.finditer(text):
            if match.start() >= held:
                break
            found += [text[position : match.start()], REDACTED]
            position = match.end()
            if position > held:
                held = self._first_open(text, position)
        self._held = text[held:]
        return "".join([*found, text[position:held]])

    def close(self) -> str:
        """The rest."""
        rest, self._held = self._held, ""
        return rest if self._pattern is None else self._pattern.sub(REDACTED, rest)

    def _first_open(self, text: str, start: int) -> int:
        """The first place from `start` on where a credential may begin that ends beyond the text."""
        for place in range(start, len(text)):
            if text[place] in self._begin:
                rest = text[place:]
                if any(len(form) > len(rest) and form.startswith(rest) for form in self._written):
                    return place
        return len(text)
