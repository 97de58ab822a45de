"""Checks of `Host`, `Origin` and `Sec-Fetch-Site`: refuse requests for another host, or from another server's pages.

A browser names the requesting page in `Origin`, and its relation to the server in `Sec-Fetch-Site`. Programs send
neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

_OWN_PAGES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for a page of this server, and for a user's own navigation."""
_PORTS = {"http": 80, "https": 443}
_LONGEST_SHOWN = 100
_NOT_PUBLIC = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Suffixes of names in domains that are not public."""


def foreign_page(headers: Headers, scheme: str) -> str | None:
    """Return why a request seems to come from another server's page; None if it does not. `scheme`: of the request;
    behind an untrusted proxy it is `http` even for https pages."""
    for site in headers.getlist("sec-fetch-site"):
        if site not in _OWN_PAGES:
            return f"Sec-Fetch-Site is {_shown(site)}; only this server's own web pages may send requests"
    for origin in headers.getlist("origin"):
        page, own = _split(origin), _split(f"{scheme}://{headers.get('host', '')}")
        if page is None or own is None or not _is_at(page, own):
            return (
                f"Origin is {_shown(origin)}, and Host {_shown(headers.get('host', ''))}; only this server's own "
                "web pages may send requests; a proxy in front must pass Host on"
            )
    return None


def foreign_host(headers: Headers, allowed: Collection[str], *, local_names: bool = False) -> str | None:
    """Return why `Host` is refused, None if it is accepted. Guards against DNS rebinding, where a page's host name
    resolves to this server.

    Args:
        allowed: hosts without ports, in lower case.
        local_names: accept addresses and local names (without a dot, `.svc`, `.local`) too; no public page has one.
    """
    host = headers.get("host", "")
    parts = _split(f"http://{host}")
    name = "" if parts is None else (parts.hostname or "").rstrip(".")
    if name in allowed or (local_names and is_local_name(name)):
        return None
    accepted = [*sorted(allowed), *(["addresses and local names"] if local_names else [])]
    return f"Host is {_shown(host)}; accepted are {', '.join(accepted)}"


def is_local_name(name: str) -> bool:
    """Whether a host is an IP address, or a local name: without a dot, or in a domain that is not public."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "" and ("." not in name or name.endswith(_NOT_PUBLIC))
    return True


def _split(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    return parts


def _is_at(page: SplitResult, own: SplitResult) -> bool:
    return bool(page.hostname) and _address(page) in (_address(own), _address(own._replace(scheme="https")))


def _address(origin: SplitResult) -> tuple[str, str | None, int | None]:
    return origin.scheme, origin.hostname, origin.port or _PORTS.get(origin.scheme)


def _shown(value: str) -> str:
    return ascii(value[:_LONGEST_SHOWN])
