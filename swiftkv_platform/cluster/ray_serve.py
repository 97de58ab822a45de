"""Deployments as Ray Serve applications, over the declarative REST interface of Ray's dashboard. Knows HTTP and Ray's
words, neither models nor torch: what an application is, `serve.app:build_app` knows on the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

import httpx

from swiftkv_platform.cluster.ray_jobs import auth_headers
from swiftkv_platform.errors import ClusterUnavailableError, InvalidInputError
from swiftkv_platform.orchestration.ports import DeploymentSpec, DeploymentState, DeploymentStatus

APPLICATION = "serve.app:build_app"
"""What the cluster imports for every deployment."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PATH = "/api/serve/applications/"

# The first `apply` starts Serve's controller and proxies, and waits for them.
_TIMEOUT_S = httpx.Timeout(120.0, connect=3.0)

_STATUS = {
    "NOT_STARTED": DeploymentStatus.DEPLOYING,
    "DEPLOYING": DeploymentStatus.DEPLOYING,
    "RUNNING": DeploymentStatus.RUNNING,
    "UNHEALTHY": DeploymentStatus.UNHEALTHY,
    "DEPLOY_FAILED": DeploymentStatus.FAILED,
    "DELETING": DeploymentStatus.DELETING,
}

_RAISED = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): ", re.MULTILINE)
"""Beginning of the line of a traceback that names the error."""


def http_address(serve_url: str) -> tuple[str, int]:
    """Host and port for Serve's proxies to listen on, from the address clients use. Raises `InvalidInputError`.

    A name that clients reach from elsewhere is rarely one that every node could bind: there they listen on all.
    """
    parts = urlsplit(serve_url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise InvalidInputError(
            f"serve_url is {serve_url!r}; give http://host:port", field="serve_url", value=serve_url
        )
    if parts.hostname in _LOOPBACK:
        return parts.hostname, parts.port
    return "0.0.0.0", parts.port  # noqa: S104  # the operator has named an address that others reach


class RayServe:
    """`ServeCluster` on Ray Serve.

    Args:
        dashboard_url: where Ray's dashboard answers. No connection is made before the first call.
        http_host: address Serve's proxies listen on. Ray reads it when the first `apply` starts Serve, not later.
        http_port: their port; likewise.
    """

    def __init__(self, dashboard_url: str, *, http_host: str = "127.0.0.1", http_port: int = 8001) -> None:
        self._url = dashboard_url.rstrip("/")
        self._http_options = {"host": http_host, "port": http_port}
        # A proxy from the environment cannot reach a cluster's own addresses.
        self._http = httpx.Client(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False)

    def apply(self, deployments: Sequence[DeploymentSpec]) -> None:
        config = {
            "http_options": self._http_options,
            "applications": [_application(deployment) for deployment in deployments],
        }
        self._request("PUT", "configure Serve", json=config)

    def status(self) -> Mapping[str, DeploymentState]:
        try:
            details = self._request("GET", "tell the state of Serve").json()
        except ValueError as error:
            raise self._unavailable(f"did not tell the state of Serve in JSON: {error}") from error
        listening = any(proxy["status"] == "HEALTHY" for proxy in details.get("proxies", {}).values())
        applications: dict[str, Any] = details.get("applications", {})
        return {name: _state(application, listening) for name, application in applications.items()}

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, action: str, *, json: Any = None) -> httpx.Response:
        try:
            response = self._http.request(method, _PATH, json=json, headers=auth_headers())
        except httpx.TransportError as error:
            raise self._unavailable(f"does not answer: {error or type(error).__name__}; is it running?") from error
        if not response.is_success:
            raise self._unavailable(f"could not {action}: {response.status_code} {_reason(response.text)}")
        return response

    def _unavailable(self, what: str) -> ClusterUnavailableError:
        return ClusterUnavailableError(f"Ray at {self._url} {what}", field="ray_dashboard_url", value=self._url)


def _application(deployment: DeploymentSpec) -> dict[str, Any]:
    """A deployment in Serve's config; the application's name is the deployment's id."""
    arguments = {field.name: getattr(deployment, field.name) for field in fields(deployment)}
    return {
        "name": deployment.id,
        "route_prefix": deployment.route_prefix,
        "import_path": APPLICATION,
        "args": arguments | {"engine": dict(deployment.engine)},
    }


def _state(application: Mapping[str, Any], listening: bool) -> DeploymentState:
    """Ray's word on an application; it is not running while no proxy takes requests for it."""
    status = _STATUS[application["status"]]
    deployments: Iterable[Mapping[str, Any]] = list(application.get("deployments", {}).values())
    replicas = sum(replica["state"] == "RUNNING" for deployment in deployments for replica in deployment["replicas"])
    # The application's own message only says which deployment failed, where one did.
    messages = [*(deployment["message"] for deployment in deployments), application["message"]]
    message = next((_reason(text) for text in messages if text), "")
    if status is DeploymentStatus.RUNNING and not listening:
        return DeploymentState(DeploymentStatus.DEPLOYING, "no HTTP proxy of Serve is healthy yet", replicas)
    return DeploymentState(status, message, replicas)


def _reason(text: str) -> str:
    """The error at the end of a traceback; the text itself where there is none."""
    starts = [match.start() for match in _RAISED.finditer(text)]
    return text[starts[-1] if starts else 0 :].strip()
