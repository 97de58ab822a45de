"""Guards around every request: its origin and its size.

Knows no route.

Without API keys, any web page that a user of this machine opens could submit a job, directly or by rebinding its own
host name to the loopback address. So the Host header must name this server, a browser's Origin must be this server, and
a body must be JSON, which a page cannot send to another origin without a preflight request. File uploads are forms,
which a page can send; for those, the browser must not report another site as the sender (`Sec-Fetch-Site`).

With keys, a browser sends its session in a cookie, which a page of a sibling origin can make it send as well. So a
request that changes something and has no `Authorization` of its own must come from this server's pages. Programs are
unaffected.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.origins import explain_foreign_host, explain_foreign_page
from swiftkv_platform.web.problems import make_problem, respond_with_problem

_JSON_TYPE = "application/json"
_FORM_TYPE = "multipart/form-data"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class SessionOriginGuard(Middleware):
    """Refuses requests that a page of another site sends with the session's cookie."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # Signing in needs no key yet; another site's page must not sign a browser in either.
        asks = scope["method"] not in _SAFE_METHODS and "authorization" not in headers
        detail = explain_foreign_page(headers, scope["scheme"]) if asks else None
        await (self._app if detail is None else _respond_forbidden(scope, detail))(scope, receive, send)


class OriginGuard(Middleware):
    """Refuses requests to unknown host names, and requests from pages of other sites. `forms`: paths whose body is a
    form."""

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...], forms: Collection[str] = ()) -> None:
        super().__init__(app)
        self._forms = frozenset(forms)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._check_request(scope) or self._app)(scope, receive, send)

    def _check_request(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        detail = explain_foreign_host(headers, self._allowed_hosts)
        if detail is not None:
            return _respond_forbidden(scope, detail, "host_not_allowed")
        asks = scope["method"] not in _SAFE_METHODS or "origin" in headers  # a link on another site may lead here
        detail = explain_foreign_page(headers, scope["scheme"]) if asks else None
        if detail is not None:
            return _respond_forbidden(scope, detail)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = _FORM_TYPE if path in self._forms else _JSON_TYPE
        if has_body and kind != wanted:
            detail = f"Content-Type is {kind or 'missing'!r}; only {wanted} is accepted"
            return respond_with_problem(make_problem(path, 415, "content_type_not_allowed", detail))
        return None


def _respond_forbidden(scope: Scope, detail: str, code: str = "origin_not_allowed") -> Response:
    return respond_with_problem(make_problem(scope["path"], 403, code, detail))
