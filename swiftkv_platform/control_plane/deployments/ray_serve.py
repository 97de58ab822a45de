"""Deployments as Ray Serve applications, over the declarative REST interface of Ray's dashboard. Knows Ray's terms,
neither models nor torch; the application is `swiftkv_platform.serve.app:build_app` on the cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from swiftkv_platform.contract.autoscaling import REVISION_HEADER, compute_replica_resources, make_autoscaling_config
from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.ray import RayDashboard, extract_last_error
from swiftkv_platform.errors import InvalidInputError, UnreadableRowError
from swiftkv_platform.limits import KEEP_ALIVE_SECONDS
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs.deployment import ResolvedDeployment, ServedSpec
from swiftkv_platform.web.middleware import is_local_name

_HEALTH_TIMEOUT = httpx.Timeout(2.0)
"""Seconds; they delay the reconciler's round."""

_MAX_HEALTH_REQUESTS = 16
"""Max health requests per round; the proxy routes each to any replica."""


@dataclass
class RevisionProgress:
    """Progress of a deployment towards a revision."""

    revision: str
    refusals: dict[str, str] = field(default_factory=dict)
    """Why the revision was refused, by replica."""
    load_seconds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by phase of loading, by replica that serves the revision."""


class RevisionPoller:
    """Polls the replicas of each deployment until all have settled, and again when another revision is wanted.
    `serve_url`: address of Serve's HTTP proxies."""

    def __init__(self, serve_url: str) -> None:
        self._url = serve_url.rstrip("/")
        self._http = httpx.Client(timeout=_HEALTH_TIMEOUT, trust_env=False)
        self._progress: dict[str, RevisionProgress] = {}

    def set_wanted(self, revisions: Mapping[str, str]) -> None:
        """Set the wanted revisions by deployment; other deployments are forgotten."""
        known = self._progress
        self._progress = {
            name: known[name] if name in known and known[name].revision == revision else RevisionProgress(revision)
            for name, revision in revisions.items()
        }

    def poll(self, name: str, route_prefix: str, replicas: Collection[str]) -> RevisionProgress | None:
        """Ask the running replicas of a deployment, and return its progress; None if no revision of it is known to be
        wanted."""
        progress = self._progress.get(name)
        if progress is None:
            return None
        for _ in range(min(4 * len(replicas), _MAX_HEALTH_REQUESTS)):
            if ({*progress.refusals, *progress.load_seconds}) >= set(replicas):
                break
            said = self._fetch_health(route_prefix, progress.revision)
            if said is None:
                break
            if "swap" not in said:  # this replica has not received the revision yet
                continue
            swap = said["swap"]
            if swap["revision"] != progress.revision or swap["status"] == "loading":
                continue
            replica = said["replica"]
            if swap["status"] == "refused":
                progress.refusals[replica] = swap["message"]
            else:
                progress.refusals.pop(replica, None)
                progress.load_seconds[replica] = said.get("load_seconds", {})  # older replicas report none
        return progress

    def close(self) -> None:
        self._http.close()

    def _fetch_health(self, route_prefix: str, revision: str) -> dict[str, Any] | None:
        """Return the `/health` document of some replica; None if none answers."""
        url = f"{self._url}{route_prefix.rstrip('/')}/health"
        try:
            response = self._http.get(url, headers={REVISION_HEADER: revision})
            document: dict[str, Any] = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError):
            return None
        return document or None


APPLICATION = "swiftkv_platform.serve.app:build_app"
"""Import path of every deployment's application."""

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_API_PATH = "/api/serve/applications/"

# The first `apply` starts Serve's controller and proxies, and waits for them.
_API_TIMEOUT_S = 120.0
_STATUS_TIMEOUT_S = 30.0
"""Seconds to wait for the state of Serve, so that an unknown state is soon shown as unknown."""

_STATUS_BY_RAY_STATUS = {
    "NOT_STARTED": DeploymentStatus.DEPLOYING,
    "DEPLOYING": DeploymentStatus.DEPLOYING,
    "RUNNING": DeploymentStatus.RUNNING,
    "UNHEALTHY": DeploymentStatus.UNHEALTHY,
    "DEPLOY_FAILED": DeploymentStatus.FAILED,
    "DELETING": DeploymentStatus.DELETING,
}


def parse_http_address(serve_url: str) -> tuple[str, int]:
    """Return (host, port) for Serve's proxies to listen on, from the clients' address. Raises `InvalidInputError`.

    Nodes can rarely bind a host name that clients reach from elsewhere: for such a name they listen on all.
    """
    parts = urlsplit(serve_url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise InvalidInputError.for_field("serve_url", serve_url, "; give http://host:port")
    if parts.hostname in _LOOPBACK_HOSTS:
        return parts.hostname, parts.port
    return "0.0.0.0", parts.port  # noqa: S104  # the operator has named an address that others reach


class RayServe:
    """Deployments on Ray Serve. Every method raises `ClusterUnavailableError` when Ray does not answer.

    Args:
        dashboard_url: address of Ray's dashboard. No connection is made before the first call.
        serve_url: `http://host:port` where clients reach Serve's proxies. Ray reads where they listen when the first
            `apply` starts Serve, not later.
        api_keys_file: file of hashed keys, by its path on the cluster's machines; None: replicas know no key.
        oidc_file: file of trusted issuers, likewise; with neither file, replicas admit all callers.
        allowed_hosts: further hosts by which clients may address deployments, besides that of `serve_url`, if there are
            no keys.
        access: sources from which a tenant's deployments may read the base models of adapters; called with None for a
            deployment stored before there were tenants.

    Raises `InvalidInputError` for a `serve_url` that is no such address.
    """

    def __init__(
        self,
        dashboard_url: str,
        serve_url: str = "http://127.0.0.1:8001",
        *,
        api_keys_file: Path | None = None,
        oidc_file: Path | None = None,
        allowed_hosts: Sequence[str] = (),
        access: Callable[[str | None], Access] = lambda _: UNRESTRICTED,
    ) -> None:
        host, port = parse_http_address(serve_url)
        self._dashboard = RayDashboard(dashboard_url, timeout_s=_API_TIMEOUT_S)
        self._http_options = {"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE_SECONDS.default}
        files = {"api_keys_file": api_keys_file, "oidc_file": oidc_file}
        self._files = {name: str(path) for name, path in files.items() if path is not None}
        hosts = {urlsplit(serve_url).hostname or "", *allowed_hosts}
        self._hosts = () if self._files else tuple(sorted(each for each in hosts if not is_local_name(each)))
        self._access = access
        self._revisions = RevisionPoller(serve_url)

    def apply(self, deployments: Sequence[ResolvedDeployment], *, keep: Collection[str] = ()) -> None:
        """Make exactly these the served applications, and `keep` (ids) those that stay as they are, if they are served.
        Returns before they are ready. Raises `UnreadableRowError`, and changes nothing, if an application to keep is
        served but Ray does not return its config."""
        applications = [
            _make_application(deployment, self._files, self._access(deployment.tenant), self._hosts)
            for deployment in deployments
        ]
        if keep:
            applications += _list_deployed_configs(self._get_details().get("applications", {}), keep)
        config = {"http_options": self._http_options, "applications": applications}
        self._dashboard.check_success(self._dashboard.request("PUT", _API_PATH, json=config), "configure Serve")
        self._revisions.set_wanted({deployment.id: _compute_revision(deployment) for deployment in deployments})

    def list_states(self) -> Mapping[str, DeploymentState]:
        """Return states by deployment id; an application that is gone is absent."""
        details = self._get_details()
        listening = any(proxy["status"] == "HEALTHY" for proxy in details.get("proxies", {}).values())
        applications: dict[str, Any] = details.get("applications", {})
        return {name: self._get_state(name, application, listening) for name, application in applications.items()}

    def _get_details(self) -> Mapping[str, Any]:
        response = self._dashboard.request("GET", _API_PATH, timeout_s=_STATUS_TIMEOUT_S)
        return self._dashboard.parse_object(response, "read the state of Serve")

    def close(self) -> None:
        self._dashboard.close()
        self._revisions.close()

    def _get_state(self, name: str, application: Mapping[str, Any], listening: bool) -> DeploymentState:
        """Return an application's state. It is not running while no proxy takes requests for it, or while replicas
        serve another revision than the wanted one."""
        state = _parse_state(application, listening)
        replicas = _list_running_replicas(application)
        if state.status is not DeploymentStatus.RUNNING or not replicas:
            return state
        progress = self._revisions.poll(name, application["route_prefix"], replicas)
        if progress is None:
            return state
        refusal = next((progress.refusals[each] for each in replicas if each in progress.refusals), None)
        if refusal is not None:
            message = f"the previous version is still serving: {refusal}"
            return DeploymentState(DeploymentStatus.REFUSED, message, len(replicas))
        loads = [progress.load_seconds[each] for each in replicas if each in progress.load_seconds]
        loaded = max(loads, key=lambda seconds: sum(seconds.values()), default={})
        if len(loads) < len(replicas):
            message = f"{len(loads)} of {len(replicas)} replicas serve the new version"
            return DeploymentState(DeploymentStatus.SWAPPING, message, len(replicas), loaded)
        return replace(state, load_seconds=loaded)


def _make_application(
    deployment: ResolvedDeployment, files: Mapping[str, str], access: Access = UNRESTRICTED, hosts: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a deployment in Serve's config; the application's name is the deployment's id.

    A change of `args` replaces the replicas; settings that live replicas can take over are in the deployment's
    `user_config`.
    """
    keys: dict[str, Any] = {**files, "tenant": deployment.tenant} if files else {}
    if hosts:
        keys["allowed_hosts"] = list(hosts)
    return {
        "name": deployment.id,
        "route_prefix": deployment.route_prefix,
        "import_path": APPLICATION,
        "args": {"id": deployment.id, **keys, **compute_replica_resources(deployment.engine)},
        "deployments": [
            {
                "name": "Replica",
                "user_config": {
                    **_make_user_config(deployment),
                    **_make_base_access(access),
                    "revision": _compute_revision(deployment),
                },
                "autoscaling_config": make_autoscaling_config(deployment),
            }
        ],
    }


def _list_deployed_configs(applications: Mapping[str, Any], keep: Collection[str]) -> list[dict[str, Any]]:
    """Return the configurations of those applications in `keep` that are served, as they were deployed."""
    kept = []
    for name in sorted(keep):
        application = applications.get(name)
        if application is None or _STATUS_BY_RAY_STATUS.get(application["status"]) is DeploymentStatus.DELETING:
            continue
        config = application.get("deployed_app_config")
        if config is None:
            raise UnreadableRowError(
                f"the stored deployment {name} cannot be read, and Ray Serve does not report its configuration. No "
                "deployment is changed, since applying the others would delete this one. Delete its database row, or "
                "run the version of the control plane that stored it",
                field="deployment_id",
                value=name,
            )
        kept.append(config)
    return kept


def _make_user_config(deployment: ResolvedDeployment) -> dict[str, Any]:
    included = {*ServedSpec.model_fields, "artifact_uri"}
    served = deployment.model_dump(mode="json", include=included)
    return {name: value for name, value in served.items() if value is not None}


def _make_base_access(access: Access) -> dict[str, Any]:
    """Return the rules for the base models of adapters, if access is restricted."""
    rules = {"roots": access.roots, "hub_organizations": access.hub_organizations}
    closed = {name: list(opened) for name, opened in rules.items() if opened is not None}
    return {"base_access": closed} if closed else {}


def _compute_revision(deployment: ResolvedDeployment) -> str:
    """Return a digest of what replicas load; it is equal for deployments that load the same."""
    canonical = json.dumps(_make_user_config(deployment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _list_running_replicas(application: Mapping[str, Any]) -> list[str]:
    """Ids of the replicas that take requests."""
    deployments: Iterable[Mapping[str, Any]] = application.get("deployments", {}).values()
    replicas = [replica for deployment in deployments for replica in deployment["replicas"]]
    return [replica["replica_id"] for replica in replicas if replica["state"] in ("RUNNING", "UPDATING")]


def _parse_state(application: Mapping[str, Any], listening: bool) -> DeploymentState:
    status = _STATUS_BY_RAY_STATUS[application["status"]]
    replicas = len(_list_running_replicas(application))
    # The application's own message only says which deployment failed, if one did.
    deployments: Iterable[Mapping[str, Any]] = application.get("deployments", {}).values()
    messages = [*(deployment["message"] for deployment in deployments), application["message"]]
    message = next((extract_last_error(text) for text in messages if text), "")
    if status is DeploymentStatus.RUNNING and not listening:
        return DeploymentState(DeploymentStatus.DEPLOYING, "no healthy HTTP proxy of Ray Serve yet", replicas)
    return DeploymentState(status, message, replicas)
