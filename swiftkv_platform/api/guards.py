"""Guards around every request: its origin, its size, what browsers may do with the answer.
Knows no route.

Without API keys, any web page that a user of this machine opens could submit a job, directly or by rebinding its own
host name to the loopback address. So the Host header must name this server, a browser's Origin must be this server, and
a body must be JSON, which a page cannot send elsewhere without asking first. Where files are uploaded a body is a form,
which a page can send: there the browser must not say that another site's page does (`Sec-Fetch-Site`).
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.problems import error_response, make_problem

_JSON = "application/json"
_FORM = "multipart/form-data"
_OWN_PAGES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` of a page of this server, and of a user's own doing."""


class OriginGuard(Middleware):
    """Refuses requests that were not meant for this server, or come from elsewhere in a browser.

    Args:
        forms: paths whose body is a form.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...], forms: Collection[str] = ()) -> None:
        super().__init__(app)
        self._forms = frozenset(forms)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        if (urlsplit(f"//{host}").hostname or "") not in self._allowed_hosts:
            accepted = ", ".join(sorted(self._allowed_hosts))
            return error_response(
                make_problem(path, 403, "host_not_allowed", f"Host is {host!r}; accepted are {accepted}")
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            detail = f"Origin is {origin!r}; requests of web pages are accepted from this server's own alone"
            return error_response(make_problem(path, 403, "origin_not_allowed", detail))
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = _FORM if path in self._forms else _JSON
        if wanted == _FORM and headers.get("sec-fetch-site", "none") not in _OWN_PAGES:
            detail = "Sec-Fetch-Site is that of another site's page; requests of this server's own are accepted"
            return error_response(make_problem(path, 403, "origin_not_allowed", detail))
        if has_body and kind != wanted:
            detail = f"Content-Type is {kind or 'missing'!r}; only {wanted} is accepted"
            return error_response(make_problem(path, 415, "content_type_not_allowed", detail))
        return None


_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_NOTHING_RUNS = "default-src 'none'; frame-ancestors 'none'"


class SecurityHeaders(Middleware):
    """Gives every answer the headers that keep browsers from guessing, framing, remembering and telling."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", _NOTHING_RUNS)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        await self._app(scope, receive, with_headers)


def too_large(path: str, detail: str) -> Response:
    """The answer to a body that is too large."""
    return error_response(make_problem(path, 413, "request_entity_too_large", detail))
