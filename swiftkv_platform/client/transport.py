"""HTTP requests with retries and typed errors, and streamed bodies, for any route."""

from __future__ import annotations

import builtins
import hashlib
import ipaddress
import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import BaseModel, ValidationError
from ulid import ULID

from swiftkv_platform.client.errors import ServiceUnavailableError, UnreachableError, make_api_error, parse_retry_after
from swiftkv_platform.errors import ArtifactCorruptError, InvalidInputError

Item = TypeVar("Item", bound=BaseModel)

_LOG = logging.getLogger(__name__)
_PAGE_SIZE = 100
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 30.0

# Raised before the request is sent, so that a retry cannot repeat its effect.
_CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _Page(BaseModel):
    data: list[Any]
    has_more: bool = False
    last_id: str | None = None
    left_out: list[str] = []


class Transport:
    """Connection to one server.

    Args:
        unreachable_advice: appended to the message of `UnreachableError`.
        max_retries: max retries after a connection error or a 503 with `Retry-After`. Back-off doubles from 0.25 s,
            or follows `Retry-After`.
        transport: httpx transport for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        unreachable_advice: str,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url = _parse_base_url(base_url)
        self.base_url = base_url.rstrip("/")
        self._unreachable_advice = unreachable_advice
        self._max_retries = max_retries
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {_check_header('api_key', api_key)}"} if api_key else {},
            timeout=timeout,
            transport=transport,
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=not _is_loopback(url.host),
        )

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, *, repeatable: bool, **options: Any) -> httpx.Response:
        """Send one request and return its successful response.

        Args:
            repeatable: whether the request is safe to send again after it may have arrived.
            options: options of `httpx.Client.request`, e.g. `json`, `params` and `headers`.

        Raises:
            APIError: the server returned an error.
            UnreachableError: no connection after all retries, or a response of another server.
        """
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            pause = _FIRST_BACKOFF_S * 2**attempt
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                if is_last or not (repeatable or isinstance(error, _CONNECT_ERRORS)):
                    raise self.make_unreachable_error(error) from error
            else:
                if response.is_success:
                    kind = response.headers.get("content-type", "").partition(";")[0]
                    if response.content and kind != "application/json":
                        raise self._make_wrong_server_error(f"{method} {path} returned {kind or 'no type'}, not JSON")
                    return response
                retry_after = parse_retry_after(response)
                if is_last or response.status_code != 503 or retry_after is None:
                    raise make_api_error(response)
                pause = retry_after
            time.sleep(min(pause, _MAX_BACKOFF_S))
        raise AssertionError("the last attempt returns or raises")

    def get(self, kind: type[Item], path: str, params: dict[str, Any] | None = None) -> Item:
        """Get the object at a path. Raises as `request`."""
        return self.send(kind, "GET", path, params=params, repeatable=True)

    def send(self, kind: type[Item], method: str, path: str, **options: Any) -> Item:
        """Send a request and parse its response. Arguments and errors: as `request`."""
        return self.parse(kind, self.request(method, path, **options).json())

    def parse(self, kind: type[Item], document: Any) -> Item:
        """Parse a response. Raises `UnreachableError` if it is not a `kind`, i.e. comes from another server."""
        try:
            return kind.model_validate(document)
        except ValidationError as error:
            raise self._make_wrong_server_error(f"the response is not a {kind.__name__.lstrip('_')}") from error

    def iter_entries(self, path: str, params: dict[str, Any] | None = None, limit: int | None = None) -> Iterator[Any]:
        """Yield the entries of a list across its pages, max `limit`. Logs ids of entries that the server cannot read.
        Raises as `request`."""
        left = limit
        params = dict(params or {})
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page = self.get(_Page, path, {**params, "limit": size})
            yield from page.data
            if page.left_out:
                _LOG.warning("%s omits entries that the server cannot read: %s", path, ", ".join(page.left_out))
            if not page.has_more:
                return
            left = None if left is None else left - len(page.data)
            params["after"] = page.last_id

    def list(
        self, kind: type[Item], path: str, params: dict[str, Any] | None = None, limit: int | None = None
    ) -> builtins.list[Item]:
        """Return the entries of a list as objects; see `iter_entries`."""
        return [self.parse(kind, row) for row in self.iter_entries(path, params, limit)]

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Open a streaming response, without retries. `options`: options of `httpx.Client.stream`.

        Raises:
            APIError: the server returned an error.
            UnreachableError: no connection, or a connection that broke during the body.
        """
        try:
            with self._http.stream(method, path, **options) as response:
                if not response.is_success:
                    response.read()
                    raise make_api_error(response)
                yield response
        except httpx.TransportError as error:
            raise self.make_unreachable_error(error) from error

    def download(self, path: str, destination: Path, *, name: str, sha256: str | None) -> Path:
        """Download a body to `destination`, atomically, and return it.

        Args:
            name: name of the body in messages.

        Raises:
            ArtifactCorruptError: the body's digest is not `sha256`.
        """
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = destination.with_name(destination.name + ".part")
        digest = hashlib.sha256()
        try:
            with self.stream("GET", path, follow_redirects=True) as response, partial.open("wb") as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    digest.update(chunk)
            if sha256 is not None and digest.hexdigest() != sha256:
                raise ArtifactCorruptError(
                    f"{name} has digest {digest.hexdigest()}, expected {sha256}; download it again",
                    field=name,
                    value=digest.hexdigest(),
                )
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)
        return destination

    def make_unreachable_error(self, error: Exception) -> UnreachableError:
        reason = str(error) or type(error).__name__
        return UnreachableError(f"No response from {self.base_url}: {reason}.\n{self._unreachable_advice}")

    def _make_wrong_server_error(self, reason: str) -> UnreachableError:
        message = f"{self.base_url} is not a SwiftKV server: {reason}. Check the URL.\n{self._unreachable_advice}"
        return UnreachableError(message)


class OutageTimer:
    """Tolerates failed requests for `outage_s` consecutive seconds."""

    def __init__(self, outage_s: float) -> None:
        self._outage_s = outage_s
        self._outage_started: float | None = None

    def reset(self) -> None:
        self._outage_started = None

    def wait_or_raise(self, error: UnreachableError | ServiceUnavailableError, pause: float) -> None:
        """Sleep before the next attempt, or raise `error` if the outage is too long."""
        now = time.monotonic()
        self._outage_started = self._outage_started or now
        if now - self._outage_started >= self._outage_s:
            raise error
        time.sleep(max(pause, getattr(error, "retry_after", None) or 0.0))


def _check_header(name: str, value: str) -> str:
    """Return `value` if it is valid in an HTTP header. Raises `InvalidInputError` without the value, a possible
    secret."""
    if not (value.isascii() and value.isprintable()):
        message = f"{name} has a line break or another character that HTTP headers do not allow; use printable ASCII"
        raise InvalidInputError(message, field=name)
    return value


def make_idempotency_header(key: str | None) -> dict[str, str]:
    """Return the `Idempotency-Key` header; without a key, generate one. Raises `InvalidInputError`."""
    return {"Idempotency-Key": _check_header("idempotency_key", key) if key else str(ULID())}


def _parse_base_url(base_url: str) -> httpx.URL:
    with suppress(httpx.InvalidURL):
        url = httpx.URL(base_url)
        if url.scheme in ("http", "https") and url.host:
            return url
    raise InvalidInputError.for_field("base_url", base_url, "; expected a URL, e.g. http://127.0.0.1:8000")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Unlike `str.splitlines` and httpx, do not break lines at U+2028 and similar characters of a log. A final \r stays in
# the buffer, since \n may follow.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def iter_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 byte stream without line ends, including an unfinished last line."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = _LINE_END.split(buffer + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if buffer:
        yield buffer.rstrip(b"\r").decode(errors="replace")


def iter_events(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """Yield events with data; skips keep-alive comments.

    Raises:
        httpx_sse.SSEError: the response is not an event stream; a subclass of `httpx.TransportError`.
    """
    return (event for event in EventSource(response).iter_sse() if event.data)
