"""Sends one webhook over HTTP: no redirect, no proxy from the environment, nothing of the answer but its status."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

_DEADLINE_S = 15.0
"""Limit of connecting, writing and reading together: a receiver that sends a byte at a time gains nothing."""
_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
"""Limits of each step of a delivery."""


def send_webhook(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """The answer's HTTP status. Raises `ConnectionError` where there is none in time."""
    try:
        return asyncio.run(_send(url, headers, body))
    except (httpx.HTTPError, TimeoutError) as error:
        raise ConnectionError(type(error).__name__) from error


async def _send(url: str, headers: Mapping[str, str], body: bytes) -> int:
    sent = {"Content-Type": "application/json", "User-Agent": "swiftkv-platform", **headers}
    async with (
        asyncio.timeout(_DEADLINE_S),
        httpx.AsyncClient(timeout=_TIMEOUT, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=sent) as response,
    ):
        return response.status_code
