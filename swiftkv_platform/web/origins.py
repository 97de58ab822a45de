"""Hosts and origins of requests: which of them were not meant for this server, or come from another one's pages.

A browser names in `Origin` the page that asks, and says in `Sec-Fetch-Site` how that is related to who is asked.
Programs send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

_OWN_PAGES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` of a page of this server, and of a user's own doing."""
_PORTS = {"http": 80, "https": 443}
_LONGEST_SHOWN = 100
_NOT_PUBLIC = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Endings of names that nobody can register."""


def foreign_page(headers: Headers, scheme: str) -> str | None:
    """What says that another server's page has asked; None where nothing does. `scheme`: of the request; behind a proxy
    that is not trusted it is `http` for pages over https too."""
    site = headers.get("sec-fetch-site", "none")
    if site not in _OWN_PAGES:
        return f"Sec-Fetch-Site is {_shown(site)}; requests of web pages are accepted from this server's own alone"
    for origin in headers.getlist("origin"):
        page, own = _split(origin), _split(f"{scheme}://{headers.get('host', '')}")
        if page is None or own is None or not _is_at(page, own):
            return (
                f"Origin is {_shown(origin)}, and Host {_shown(headers.get('host', ''))}; requests of web pages are "
                "accepted from this server's own alone, and a proxy in front passes Host on"
            )
    return None


def foreign_host(headers: Headers, allowed: Collection[str], *, unregistered: bool = False) -> str | None:
    """What is wrong with `Host`, which a page that rebinds its own name to this address would send; None for nothing.

    Args:
        allowed: hosts without ports, in lower case.
        unregistered: accept addresses, and names that nobody can register, as well: pages cannot rebind them.
    """
    host = headers.get("host", "")
    parts = _split(f"http://{host}")
    name = "" if parts is None else (parts.hostname or "").rstrip(".")
    if name in allowed or (unregistered and is_unregistered(name)):
        return None
    accepted = [*sorted(allowed), *(["addresses and names that nobody can register"] if unregistered else [])]
    return f"Host is {_shown(host)}; accepted are {', '.join(accepted)}"


def is_unregistered(name: str) -> bool:
    """Whether a host is an address, or a name that nobody can register."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "" and ("." not in name or name.endswith(_NOT_PUBLIC))
    return True


def _split(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises where that is no number
    except ValueError:
        return None
    return parts


def _is_at(page: SplitResult, own: SplitResult) -> bool:
    return bool(page.hostname) and _address(page) in (_address(own), _address(own._replace(scheme="https")))


def _address(origin: SplitResult) -> tuple[str, str | None, int | None]:
    return origin.scheme, origin.hostname, origin.port or _PORTS.get(origin.scheme)


def _shown(value: str) -> str:
    return ascii(value[:_LONGEST_SHOWN])
