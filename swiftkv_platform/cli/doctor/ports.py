"""Check of the ports that `swiftkv up` takes."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, worst
from swiftkv_platform.local.state import PARTS, port_of
from swiftkv_platform.settings import Settings


def examine_ports(surroundings: Surroundings) -> Finding:
    """Look whether each port is free, or held by what `swiftkv up` has started."""
    state = surroundings.stack.state()
    if state is not None and any(state.alive(part) for part in PARTS):
        return Finding("ok", f"`swiftkv up` runs and holds them: {state.url}, {state.ray_dashboard_url}.")
    return worst([_examine(variable, port) for variable, port in _ports(surroundings.settings).items() if port])


def _ports(settings: Settings) -> dict[str, int]:
    return {
        "SWIFTKV_PORT": settings.port,
        "SWIFTKV_SERVE_URL": port_of(settings.serve_url),
        "SWIFTKV_RAY_DASHBOARD_URL": port_of(settings.ray_dashboard_url),
    }


def _examine(variable: str, port: int) -> Finding:
    with socket.socket() as listener:
        # A port whose last connections still linger is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                "warning",
                f"Port {port} ({variable}) is taken{_holder(port)}: {error.strerror}.",
                f"`swiftkv up` would take another port; end what holds it, or let {variable} name another",
            )
    return Finding("ok", f"{port} is free")


def _holder(port: int) -> str:
    """Name of the process that listens there, as far as this user may know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
