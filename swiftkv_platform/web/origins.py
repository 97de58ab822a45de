"""Checks of `Host`, `Origin` and `Sec-Fetch-Site`, against DNS rebinding and cross-site requests.

Browsers send the requesting page in `Origin`, and its relation to the server in `Sec-Fetch-Site`. Programs send
neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

_SAME_ORIGIN_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for a page of this server, and for a user's own navigation."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN_LENGTH = 100
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Suffixes of local names; no public page has one."""


def explain_foreign_page(headers: Headers, scheme: str) -> str | None:
    """Return the reason why a request comes from another server's page; None if it does not. `scheme`: the request's;
    `http` behind an untrusted proxy, even for https pages."""
    for site in headers.getlist("sec-fetch-site"):
        if site not in _SAME_ORIGIN_SITES:
            return f"Sec-Fetch-Site is {_quote_value(site)}; only this server's own web pages may send requests"
    for origin in headers.getlist("origin"):
        page, own = _parse_origin(origin), _parse_origin(f"{scheme}://{headers.get('host', '')}")
        if page is None or own is None or not _is_same_origin(page, own):
            host = _quote_value(headers.get("host", ""))
            return (
                f"Origin is {_quote_value(origin)}, and Host {host}; only this server's own pages may send requests. "
                "A proxy in front must forward Host"
            )
    return None


def explain_foreign_host(headers: Headers, allowed: Collection[str], *, local_names: bool = False) -> str | None:
    """Return the reason to refuse `Host`; None if it is accepted. Guards against DNS rebinding, in which a page's host
    name resolves to this server.

    Args:
        allowed: hosts without ports, in lower case.
        local_names: also accept addresses and local names (`name`, `name.svc`, `name.local`).
    """
    host = headers.get("host", "")
    parts = _parse_origin(f"http://{host}")
    name = "" if parts is None else (parts.hostname or "").rstrip(".")
    if name in allowed or (local_names and is_local_name(name)):
        return None
    accepted = [*sorted(allowed), *(["addresses and local names"] if local_names else [])]
    return f"Host is {_quote_value(host)}; accepted: {', '.join(accepted)}"


def is_local_name(name: str) -> bool:
    """Whether a host is an IP address, or a name without a dot or with a local suffix."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "" and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
    return True


def _parse_origin(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    return parts


def _is_same_origin(page: SplitResult, own: SplitResult) -> bool:
    return bool(page.hostname) and _get_address(page) in (_get_address(own), _get_address(own._replace(scheme="https")))


def _get_address(origin: SplitResult) -> tuple[str, str | None, int | None]:
    return origin.scheme, origin.hostname, origin.port or _DEFAULT_PORTS.get(origin.scheme)


def _quote_value(value: str) -> str:
    return ascii(value[:_MAX_SHOWN_LENGTH])
