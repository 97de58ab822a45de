"""Check of Ray: reachable, of the version that is installed here, with room for a job."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.errors import ClusterUnavailableError

_CPUS = 4
"""CPUs that hold a small job's driver and workers beside a replica."""


def examine_ray(surroundings: Surroundings) -> Finding:
    """Ask the local stack's Ray, else the one that the settings name."""
    stack, settings = surroundings.stack, surroundings.settings
    state = stack.state()
    if state is None and "ray_dashboard_url" not in settings.model_fields_set:
        return Finding("ok", "None is configured or started; `swiftkv up` starts one.")
    if state is not None and not state.alive("ray"):
        message = f"Ray, which `swiftkv up` had started at {state.ray_dashboard_url}, has ended."
        return Finding("failed", message, f"swiftkv up; its log is {stack.logs / 'ray.log'}")
    from swiftkv_platform.cluster.dashboard import RayDashboard

    url = settings.ray_dashboard_url if state is None else state.ray_dashboard_url
    token_file = None if state is None else stack.token_file
    dashboard = RayDashboard(url, timeout_s=surroundings.timeout_s / 2, token_file=token_file)
    try:
        answer = dashboard.document(dashboard.request("GET", "/api/version"), "tell its version")
        nodes = dashboard.document(dashboard.request("GET", "/api/v0/nodes?detail=1"), "list its nodes")
    except ClusterUnavailableError as error:
        return Finding("failed", one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_RAY_DASHBOARD_URL")
    finally:
        dashboard.close()
    return _judged(url, str(answer["ray_version"]), nodes["data"]["result"]["result"])


def _judged(url: str, theirs: str, nodes: list[dict[str, Any]]) -> Finding:
    ours = version("ray")
    if theirs != ours:
        message = f"Ray at {url} is {theirs}, and {ours} is installed here."
        return Finding("failed", message, f"pip install ray=={theirs}, or give the cluster's image {ours}")
    alive = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    message = f"Ray {ours} at {url} has {len(alive)} nodes, {cpus:g} CPUs and {gpus:g} GPUs"
    if cpus < _CPUS:
        advice = "add nodes, or start it with more: swiftkv down && swiftkv up --num-cpus 4"
        return Finding("warning", f"{message}; a small job and a replica take {_CPUS} CPUs.", advice)
    return Finding("ok", f"{message}.")
