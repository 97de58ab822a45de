"""Redaction: removes the environment's credentials from text before it is stored or shown.

Logs, events, library errors and program output pass through here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

REDACTED = "[redacted]"
_SENSITIVE = re.compile(
    r"KEY|SECRET|TOKEN|PASSWORD|PASSPHRASE|CREDENTIAL|CONN(?:ECTION)?_?STR|COOKIE|PRIVATE"
    r"|(?:^|_)(?:SAS|SIG|SIGNATURE|DSN|PASS|PASSWD|PWD|PAT|JWT|BEARER|AUTH|AUTHORIZATION|AUTH_CONFIG)$"
    r"|(?:^|_)(?:SAS|DSN)_",
    re.IGNORECASE,
)
"""Matches names of variables, query parameters and members whose values are credentials."""
_NO_CREDENTIAL = re.compile(r"(?:_FILE|_PATH|_DIR|_URI|_URL|_SOCK)$|^(?-i:(?:OLD)?PWD)$", re.IGNORECASE)
_USER_AND_PASSWORD = re.compile(r"(\w+)://([^\s/?#@:]*)(?::([^\s@]*))?@")
_MEMBER = re.compile(r"(?<![\w-])([\w-]+)=([^;&\s\"']+)")
"""Matches a query parameter of a URL, and a part of a connection string."""
_PRIVATE_KEY = "PRIVATE KEY-----"
_SHORTEST = 8
"""Minimum length of a secret in characters; shorter values would match ordinary words."""


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the credentials of an environment: values of variables named like one, each line of those values, and in
    any value private keys, passwords and tokens in URLs, parts of connection strings, and members of JSON objects."""
    found = set()
    for name, value in environment.items():
        if _is_credential(name) or _PRIVATE_KEY in value:
            found.update([value, *value.splitlines()])
        for scheme, user, password in _USER_AND_PASSWORD.findall(value):
            # `https://TOKEN@host` has a token for a user.
            found.add(password or (user if scheme.lower() in ("http", "https") else ""))
        found.update(part for member, part in _MEMBER.findall(value) if _is_credential(member))
        found.update(_json_members(value))
    found |= {unquote(value) for value in found}
    return {value for value in found if len(value) >= _SHORTEST}


def _is_credential(name: str) -> bool:
    return _SENSITIVE.search(name) is not None and _NO_CREDENTIAL.search(name) is None


def _json_members(value: str) -> set[str]:
    """Return the credentials in a JSON object, such as the key file of a service account."""
    if not value.lstrip().startswith("{"):
        return set()
    found: set[str] = set()

    def read(pairs: list[tuple[str, Any]]) -> None:
        for name, member in pairs:
            if isinstance(member, str) and (_is_credential(name) or _PRIVATE_KEY in member):
                found.update([member, *member.splitlines()])

    try:
        json.loads(value, object_pairs_hook=read)
    except (ValueError, RecursionError):
        return set()
    return found


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
