"""Client of Ray's dashboard: the token, time limits, and one error for every failure. Knows no job and no deployment.

It uses the documented REST interface, not Ray's SDK: the SDK has no time limits, and distinguishes an unknown
submission from other failures only by the text of a `RuntimeError`.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from swiftkv_platform.errors import ClusterUnavailableError

_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): ", re.MULTILINE)
"""Start of a traceback's line with the error."""
_MAX_REASON_CHARS = 2000
_WEB_SOCKET_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
_HEARTBEAT_S = 30.0
"""Seconds between pings: if the dashboard's machine is gone, no connection is closed."""
_MAX_MESSAGE_BYTES = 64 << 20
_LIVE_NODES_PATH = "/api/v0/nodes?limit=1&timeout=5&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"


class RayDashboard:
    """Client of the dashboard at `url`, which connects with the first request. `timeout_s`: max seconds to wait for
    data. `token_file`: file of Ray's token; by default the environment's."""

    def __init__(self, url: str, *, timeout_s: float, token_file: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._token_file = token_file
        # A proxy from the environment cannot reach a cluster's own addresses.
        self._http = httpx.Client(base_url=self.url, timeout=_make_timeout(timeout_s), trust_env=False)

    def request(self, method: str, path: str, *, json: Any = None, timeout_s: float | None = None) -> httpx.Response:
        """Return Ray's response with any status. `timeout_s`: instead of the client's. Raises `ClusterUnavailableError`
        without a response."""
        timeout = self._http.timeout if timeout_s is None else _make_timeout(timeout_s)
        try:
            return self._http.request(
                method, path, json=json, headers=_make_auth_headers(self._token_file), timeout=timeout
            )
        except httpx.TransportError as error:
            raise self.make_no_response_error(error) from error

    @contextmanager
    def stream(self, path: str, params: Mapping[str, str | int]) -> Iterator[httpx.Response]:
        """Stream Ray's response to a GET. An unsuccessful response is read at once.

        Raises `ClusterUnavailableError` without a response, and `httpx.RemoteProtocolError` if it is interrupted.
        """
        try:
            with self._http.stream(
                "GET", path, params=dict(params), headers=_make_auth_headers(self._token_file)
            ) as response:
                if not response.is_success:
                    response.read()
                yield response
        except httpx.RemoteProtocolError:
            raise
        except httpx.TransportError as error:
            raise self.make_no_response_error(error) from error

    async def stream_messages(self, path: str) -> AsyncGenerator[str, None]:
        """Yield the messages of a WebSocket until Ray closes it; none if Ray returns 404.

        Raises `ClusterUnavailableError`.
        """
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=_WEB_SOCKET_TIMEOUT, headers=_make_auth_headers(self._token_file)
                ) as session,
                session.ws_connect(
                    f"{self.url}{path}", heartbeat=_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE_BYTES
                ) as socket,
            ):
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.ERROR:
                        raise self.make_no_response_error(socket.exception() or ConnectionError())
                    yield str(message.data)
        except aiohttp.WSServerHandshakeError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise self.make_no_response_error(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.make_no_response_error(error) from error

    def parse_object(self, response: httpx.Response, action: str) -> dict[str, Any]:
        """Return the JSON object of a response. Raises `ClusterUnavailableError` ("could not `action`") for an
        unsuccessful one."""
        self.check_success(response, action)
        try:
            document: dict[str, Any] = response.json()
        except ValueError as error:
            raise self.make_failure_error(response, action) from error
        return document

    def check_success(self, response: httpx.Response, action: str) -> None:
        """Raise `ClusterUnavailableError` unless the response is successful."""
        if not response.is_success:
            raise self.make_failure_error(response, action)

    def check_alive(self) -> None:
        """Raise `ClusterUnavailableError` unless Ray responds and has a live node (the head counts): without one it
        accepts no jobs."""
        document = self.parse_object(self.request("GET", _LIVE_NODES_PATH), "list its nodes")
        if not document["data"]["result"]["result"]:
            raise self._make_unavailable_error("has no live node")

    def make_failure_error(self, response: httpx.Response, action: str) -> ClusterUnavailableError:
        """Return the error for an unsuccessful response: Ray could not `action`."""
        hint = ""
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "; its token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        why = extract_last_error(response.text) or response.reason_phrase
        return self._make_unavailable_error(f"could not {action}: {response.status_code} {why}{hint}")

    def make_no_response_error(self, error: BaseException) -> ClusterUnavailableError:
        """Return the error for a request without a response."""
        return self._make_unavailable_error(
            f"does not answer: {error or type(error).__name__}; is it running, and is SWIFTKV_RAY_DASHBOARD_URL "
            "its dashboard's address?"
        )

    def close(self) -> None:
        self._http.close()

    def _make_unavailable_error(self, problem: str) -> ClusterUnavailableError:
        return ClusterUnavailableError(f"Ray at {self.url} {problem}", field="ray_dashboard_url", value=self.url)


def _make_timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=3.0)


def extract_last_error(text: str) -> str:
    """Return the error at the end of a traceback, or the text itself without a traceback; at most 2000 characters."""
    starts = [match.start() for match in _ERROR_LINE.finditer(text)]
    return text[starts[-1] if starts else 0 :].strip()[:_MAX_REASON_CHARS]


def _make_auth_headers(token_file: Path | None) -> dict[str, str]:
    """Return the header with Ray's bearer token, if there is one. Read for each request, since a restarted Ray may
    have another token."""
    token = "" if token_file else os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        named = token_file or os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        path = Path(named).expanduser()
        token = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return {"Authorization": f"Bearer {token}"} if token else {}
