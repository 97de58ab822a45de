"""A phase that several workers do together: Ray tasks placed all or none, joined by torch's process group. Knows no
phase.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.jobs.attempt.events import LOOK_INTERVAL_S, look
from swiftkv_platform.jobs.failures import explain, root_cause
from swiftkv_platform.jobs.values import STOPPED, Member, StoppedError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import ResourcesSpec
from swiftkv_platform.storage.object_store import ObjectStore

_MAX_FAILURES = 3
"""Times that a group whose worker was lost begins again."""


def group_size(resources: ResourcesSpec) -> int:
    """Workers of a group: as many as the cluster has room for, within what the spec allows."""
    there = ray.cluster_resources()
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    room = min(int(there.get(name, 0.0) // amount) for name, amount in each.items() if amount)
    return max(resources.min_workers, min(resources.max_workers, room))


def run_together(
    function: Callable[..., Any],
    *arguments: Any,
    resources: ResourcesSpec,
    num_workers: int,
    store: ObjectStore,
    request: AttemptRequest,
) -> Any:
    """Return what `function(*arguments, member)` returns on the first of `num_workers` workers, which all run it.
    Raises `StoppedError`: the attempt is to end first."""
    bundle = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    if resources.accelerator_type:
        bundle[f"accelerator_type:{resources.accelerator_type}"] = 0.001
    group = placement_group([{name: amount for name, amount in bundle.items() if amount}] * num_workers)
    try:
        for failures in range(_MAX_FAILURES + 1):
            try:
                return _run_once(function, arguments, resources, group, store, request)
            except StoppedError:
                raise
            except Exception as error:
                if failures == _MAX_FAILURES or root_cause(error) is not None or not explain(error).retryable:
                    raise
                get_logger().warning("group_begins_again", error=explain(error).message)
    finally:
        remove_placement_group(group)
    raise AssertionError("the last failure is raised")


def _run_once(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    resources: ResourcesSpec,
    group: PlacementGroup,
    store: ObjectStore,
    request: AttemptRequest,
) -> Any:
    size = group.bundle_count

    def at(rank: int) -> dict[str, Any]:
        return {"max_retries": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}

    each = {"num_cpus": resources.cpus_per_worker, "num_gpus": resources.gpus_per_worker}
    tasks = [ray.remote(_meeting_place).options(num_cpus=0, **at(0)).remote()]
    try:
        address = _wait(tasks, store, request)
        worker = ray.remote(function)
        tasks = [
            worker.options(**each, **at(rank)).remote(*arguments, Member(rank, size, address)) for rank in range(size)
        ]
        return _wait(tasks, store, request)
    except BaseException:
        _, running = ray.wait(tasks, num_returns=len(tasks), timeout=0)  # to cancel what has ended may end this process
        for task in running:
            ray.cancel(task, force=True)
        raise


def _wait(tasks: list[ray.ObjectRef], store: ObjectStore, request: AttemptRequest) -> Any:
    """Return the first task's result when all have ended, or raise what ends one of them."""
    pending = tasks
    while pending:
        done, pending = ray.wait(pending, timeout=LOOK_INTERVAL_S)
        for task in done:
            ray.get(task)
        stop_request = look(store, request) if pending else None
        if stop_request in STOPPED:
            raise StoppedError(STOPPED[stop_request])
    return ray.get(tasks[0])


def _meeting_place() -> str:
    """Host and a free port of the machine of the first worker."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"{ray.util.get_node_ip_address()}:{port}"
