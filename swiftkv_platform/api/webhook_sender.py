"""Sends one webhook over HTTP: no redirect, no proxy from the environment, nothing of the answer but its status."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

_TIMEOUT = httpx.Timeout(10.0, connect=5.0)


def send_webhook(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """The answer's HTTP status. Raises `ConnectionError` where there is none."""
    sent = {"Content-Type": "application/json", "User-Agent": "swiftkv-platform", **headers}
    try:
        with (
            httpx.Client(timeout=_TIMEOUT, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, content=body, headers=sent) as response,
        ):
            return response.status_code
    except httpx.HTTPError as error:
        raise ConnectionError(type(error).__name__) from error
