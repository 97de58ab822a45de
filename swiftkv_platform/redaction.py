"""Redaction: removes the environment's credentials from text before it is stored or shown.

Logs, events, library errors and program output pass through here.
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
"""Minimum length of a secret in characters; shorter values would match ordinary words."""


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables named like credentials, each line of those values, and passwords in URLs."""
    found = set()
    for name, value in environment.items():
        if _SENSITIVE.search(name) and not _A_PLACE.search(name):
            found.update([value, *value.splitlines()])
        elif "://" in value:
            try:
                found.add(urlsplit(value).password or "")
            except ValueError:
                continue  # not a URL
    return {value for value in found if len(value) >= _SHORTEST}


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with the credentials replaced, whether written plainly or escaped as in JSON."""
    redactor = StreamRedactor(environment)
    return redactor.feed(text) + redactor.close()


class StreamRedactor:
    """`redact` for text that arrives in pieces; the result does not depend on where the pieces end."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        secrets = secrets_of(os.environ if environment is None else environment)
        written = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
        self._written = sorted(written, key=len, reverse=True)
        """Longest first: if one credential is a prefix of another, the longer one is matched."""
        self._begin = frozenset(form[0] for form in self._written)
        self._pattern = re.compile("|".join(map(re.escape, self._written))) if written else None
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the redacted text so far, holding back an end that may be the beginning of a credential."""
        if self._pattern is None:
            return text
        text, found, position = self._held + text, [], 0
        # Every credential that begins before this index also ends in the text.
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
        """Return the text held back, redacted."""
        rest, self._held = self._held, ""
        return rest if self._pattern is None else self._pattern.sub(REDACTED, rest)

    def _first_open(self, text: str, start: int) -> int:
        """Return the first index from `start` on at which a credential may begin that the text cuts off."""
        for place in range(start, len(text)):
            if text[place] in self._begin:
                rest = text[place:]
                if any(len(form) > len(rest) and form.startswith(rest) for form in self._written):
                    return place
        return len(text)
