"""`swiftkv quota`: what the caller's tenant may use, and uses."""

from __future__ import annotations

from swiftkv_platform.cli.context import Json, Url, connect
from swiftkv_platform.cli.output import print_fields, print_json
from swiftkv_platform.client import Quota
from swiftkv_platform.local.units import plural, size


def quota(url: Url = None, json: Json = False) -> None:
    """Show what your tenant may use of the cluster, and uses."""
    with connect(url) as client:
        found = client.quota()
    if json:
        print_json(found)
    else:
        print_fields(_sentences(found))


def _sentences(quota: Quota) -> dict[str, str]:
    return {
        "tenant": f"{quota.tenant}, weight {quota.weight:g} in the queue",
        "queued": _used(quota.queued_jobs, quota.max_queued_jobs, "job"),
        "running": _used(quota.running_jobs, quota.max_running_jobs, "job"),
        "GPUs": _held(quota, "gpus", quota.gpus, quota.max_gpus, "GPU"),
        "CPUs": _held(quota, "cpus", quota.cpus, quota.max_cpus, "CPU core"),
        "replicas": _used(quota.replicas, quota.max_replicas, "replica"),
        "files": size(quota.stored_bytes)
        + (", no limit" if quota.max_stored_bytes is None else f" of {size(quota.max_stored_bytes)}"),
    }


def _used(number: float, most: float | None, thing: str) -> str:
    return f"{plural(number, thing)}, no limit" if most is None else f"{number:g} of {plural(most, thing)}"


def _held(quota: Quota, kind: str, number: float, most: float | None, thing: str) -> str:
    holders = {"jobs": quota.held_by_jobs.get(kind, 0), "deployments": quota.held_by_deployments.get(kind, 0)}
    held = " and ".join(f"{amount:g} by {holder}" for holder, amount in holders.items() if amount)
    return _used(number, most, thing) + (f"; {held}" if held else "")
