"""Requests with retries and typed errors, and bodies read as they come. Knows HTTP, none of the routes."""

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
from typing import Any, BinaryIO, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import BaseModel, ValidationError
from ulid import ULID

from swiftkv_platform.client.errors import ServiceUnavailableError, UnreachableError, error_from, retry_after_of
from swiftkv_platform.errors import ArtifactCorruptError, InvalidInputError

Item = TypeVar("Item", bound=BaseModel)

_LOG = logging.getLogger(__name__)
_PAGE = 100
_FIRST_BACKOFF_S = 0.25
_LONGEST_PAUSE_S = 30.0

# Raised before the request has left, so repeating it can do nothing twice.
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class _Page(BaseModel):
    data: list[Any]
    has_more: bool = False
    last_id: str | None = None
    left_out: list[str] = []


class Transport:
    """One server: its address, key, retries and errors.

    Args:
        when_away: what to do when nothing answers, appended to the error's message.
        max_retries: further tries after a connection error or a 503 that carries `Retry-After`; pauses double from
            0.25 s.
        transport: replaces the network, for tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        when_away: str,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url = _checked_url(base_url)
        self.base_url = base_url.rstrip("/")
        self._when_away = when_away
        self._max_retries = max_retries
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {_header('api_key', api_key)}"} if api_key else {},
            timeout=timeout,
            transport=transport,
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=not _is_loopback(url.host),
        )

    def close(self) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool,
        json: Any = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        form: dict[str, str] | None = None,
        file: tuple[str, BinaryIO] | None = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send one request and return its successful response.

        Args:
            form: fields of a form, which is sent in the place of `json`.
            file: name and content of the form's field `file`; read as it is sent.
            timeout_s: replaces the client's timeout.
            repeatable: whether a request that may have arrived can be sent again without doing its work twice.

        Raises:
            APIError: the server refused.
            UnreachableError: no connection, after the retries, or a server of something else.
        """
        files = None if file is None else {"file": file}
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            pause = _FIRST_BACKOFF_S * 2**attempt
            try:
                response = self._http.request(
                    method, path, json=json, data=form, files=files, params=params, headers=headers, timeout=timeout
                )
            except httpx.TransportError as error:
                if last or not (repeatable or isinstance(error, _NEVER_SENT)):
                    raise self.unreachable(error) from error
            else:
                if response.is_success:
                    kind = response.headers.get("content-type", "").partition(";")[0]
                    if response.content and kind != "application/json":
                        raise self._other_server(f"{method} {path} gave {kind or 'no type'} instead of JSON")
                    return response
                asked = retry_after_of(response)
                if last or response.status_code != 503 or asked is None:
                    raise error_from(response)
                pause = asked
            time.sleep(min(pause, _LONGEST_PAUSE_S))
        raise AssertionError("the last attempt returns or raises")

    def get(self, kind: type[Item], path: str, params: dict[str, Any] | None = None) -> Item:
        """The object at a path. Raises as `request`."""
        return self.read(kind, self.request("GET", path, params=params, repeatable=True).json())

    def read(self, kind: type[Item], document: Any) -> Item:
        """The object that an answer is. Raises `UnreachableError` for another document: another server gave it."""
        try:
            return kind.model_validate(document)
        except ValidationError as error:
            raise self._other_server(f"its answer is no {kind.__name__.lstrip('_')}") from error

    def rows(self, path: str, params: dict[str, Any] | None = None, limit: int | None = None) -> Iterator[Any]:
        """Yield the entries of a list over all its pages, at most `limit`. Those that the server cannot read are
        logged. Raises as `request`."""
        left = limit
        params = dict(params or {})
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = self.get(_Page, path, {**params, "limit": size})
            yield from page.data
            if page.left_out:
                _LOG.warning("%s leaves out what the server cannot read: %s", path, ", ".join(page.left_out))
            if not page.has_more:
                return
            left = None if left is None else left - len(page.data)
            params["after"] = page.last_id

    def list(
        self, kind: type[Item], path: str, params: dict[str, Any] | None = None, limit: int | None = None
    ) -> builtins.list[Item]:
        """The objects of a list, as `rows` has them."""
        return [self.read(kind, row) for row in self.rows(path, params, limit)]

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        follow_redirects: bool = False,
    ) -> Iterator[httpx.Response]:
        """Open a response whose body is read as it comes; not retried.

        Raises:
            APIError: the server refused.
            UnreachableError: no connection, or one that broke while the body was read.
        """
        try:
            with self._http.stream(
                method, path, json=json, params=params, headers=headers, follow_redirects=follow_redirects
            ) as response:
                if not response.is_success:
                    response.read()
                    raise error_from(response)
                yield response
        except httpx.TransportError as error:
            raise self.unreachable(error) from error

    def save(self, path: str, destination: Path, *, name: str, sha256: str | None) -> Path:
        """Write an answer's body to `destination`, whole or not at all, and return it.

        Args:
            name: name of the body in messages.

        Raises:
            ArtifactCorruptError: what came does not have the digest `sha256`, where one is given.
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
                    f"{name} has the digest {digest.hexdigest()} instead of {sha256}; fetch it again",
                    field=name,
                    value=digest.hexdigest(),
                )
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)
        return destination

    def unreachable(self, error: Exception) -> UnreachableError:
        reason = str(error) or type(error).__name__
        return UnreachableError(f"No answer from {self.base_url}: {reason}.\n{self._when_away}")

    def _other_server(self, what: str) -> UnreachableError:
        return UnreachableError(
            f"{self.base_url} answers, but {what}: is this the server's address?\n{self._when_away}"
        )


class Patience:
    """Forgives failures while the server is away for no longer than `outage_s` seconds at a stretch."""

    def __init__(self, outage_s: float) -> None:
        self._outage_s = outage_s
        self._away_since: float | None = None

    def answered(self) -> None:
        self._away_since = None

    def forgive(self, error: UnreachableError | ServiceUnavailableError, pause: float) -> None:
        """Sleep before the next try, or raise `error` when the server has been away for too long."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since >= self._outage_s:
            raise error
        time.sleep(max(pause, getattr(error, "retry_after", None) or 0.0))


def _header(name: str, value: str) -> str:
    """The value, if an HTTP header takes it. Raises `InvalidInputError` without the value, which may be secret."""
    if not (value.isascii() and value.isprintable()):
        message = f"{name} has a line break or another character that no HTTP header takes; use printable ASCII"
        raise InvalidInputError(message, field=name)
    return value


def idempotent(key: str | None) -> dict[str, str]:
    """The header by which a request that comes twice is answered once, of a key that is made up where none is given.
    Raises `InvalidInputError`."""
    return {"Idempotency-Key": _header("idempotency_key", key) if key else str(ULID())}


def _checked_url(base_url: str) -> httpx.URL:
    with suppress(httpx.InvalidURL):
        url = httpx.URL(base_url)
        if url.scheme in ("http", "https") and url.host:
            return url
    raise InvalidInputError.of("base_url", base_url, "; an address such as http://127.0.0.1:8000 is accepted")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# `str.splitlines` and httpx would also break at U+2028 and its like, which a log may hold. A final \r is held back: it
# may be the first half of \r\n.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def iter_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 byte stream without their ends; an unfinished last line counts as one."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = _LINE_END.split(buffer + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if buffer:
        yield buffer.rstrip(b"\r").decode(errors="replace")


def iter_events(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """Yield the events that carry data, without one that is cut off; keep-alive comments end in events without data.

    Raises:
        httpx_sse.SSEError: the response is no event stream. It is an `httpx.TransportError`.
    """
    return (event for event in EventSource(response).iter_sse() if event.data)
