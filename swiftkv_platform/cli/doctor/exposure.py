"""Check of `swiftkv doctor` for services that answer other machines without a key."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, check, ok, warning, worst
from swiftkv_platform.settings import is_loopback

_TIMEOUT_S = 2.0
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_USE_KEYS = "make keys (`swiftkv keys create`) and start it again, or let it listen on 127.0.0.1 only"
_CLOSE_RAY = "set RAY_AUTH_MODE=token for the cluster, or start it with --dashboard-host=127.0.0.1"


@check("exposure", "look at which addresses control plane, deployments and Ray's dashboard listen on")
def exposure(surroundings: Surroundings) -> Finding:
    """Ask each service without a key, by an address that other machines can use."""
    settings, state = surroundings.settings, surroundings.stack.state()
    own, serve_url, dashboard = (
        f"http://{settings.host}:{settings.port}",
        settings.serve_url,
        settings.ray_dashboard_url,
    )
    if state is not None:
        own, serve_url, dashboard = state.url, state.serve_url, state.ray_dashboard_url
    control_planes = dict.fromkeys((own, os.environ.get("SWIFTKV_URL") or own))
    dashboards = dict.fromkeys((dashboard, settings.serve_dashboard_url or dashboard))
    found = [
        *(_open(f"The control plane at {at}", _USE_KEYS) for url in control_planes for at in _open_planes(url)),
        *(_open(f"The deployment at {at}", _USE_KEYS) for at in _open_deployments(serve_url)),
        *(
            _open(f"Ray's dashboard at {at}, which runs any program,", _CLOSE_RAY)
            for url in dashboards
            for at in _open_dashboards(url)
        ),
    ]
    return worst(found) if found else ok("No service answers other machines without a key.")


def _open(service: str, advice: str) -> Finding:
    return warning(f"{service} answers other machines without a key.", advice)


def _open_planes(url: str) -> Iterator[str]:
    for at in _outside(url):
        answer = _get(f"{at}/jobs?limit=1")
        if isinstance(answer, dict) and answer.get("object") == "list":
            yield at


def _open_deployments(url: str) -> Iterator[str]:
    for at in _outside(url):
        routes = _get(f"{at}/-/routes")
        for route in routes if isinstance(routes, dict) else ():
            if _get(f"{at}{route.rstrip('/')}/v1/models") is not None:
                yield f"{at}{route}"


def _open_dashboards(url: str) -> Iterator[str]:
    for at in _outside(url):
        if isinstance(_get(f"{at}/api/jobs/"), list):
            yield at


def _outside(url: str) -> Iterator[str]:
    """Yield base addresses by which other machines may reach the service: its own if that is no loopback address, else
    its port at each address of this machine's networks."""
    parts = urlsplit(url)
    if parts.hostname and not is_loopback(parts.hostname) and parts.hostname not in ("0.0.0.0", "::"):  # noqa: S104
        yield url.rstrip("/")
        return
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family in _FAMILIES and not is_loopback(each.address) and "%" not in each.address:
                host = f"[{each.address}]" if ":" in each.address else each.address
                yield f"{parts.scheme}://{host}:{parts.port}"


def _get(url: str) -> Any:
    """Return the JSON of an answer to a request without a key; None if it is refused or there is none.

    Without keys our services check `Host` against web pages; other callers can send any, so this does.
    """
    headers = {"Host": "localhost"} if url.startswith("http://") else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        return answer.json() if answer.is_success else None
    except (httpx.TransportError, httpx.InvalidURL, ValueError):
        return None
