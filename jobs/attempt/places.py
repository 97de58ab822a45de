"""Events of an attempt about the places that its workers wait for and find. Knows Ray's resources, no task."""

from __future__ import annotations

import ray

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.jobs.attempt.events import Reporter
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import ObjectStore

_GIB = 1 << 30


def say_waiting(reporter: Reporter, spec: JobSpec, phase: str, *, num_workers: int = 1) -> None:
    """Tell that workers of a phase are about to be asked for, before they are."""
    reporter.placement({"phase": _name(spec, phase), "state": "waiting", "needs": _needs(spec, num_workers)})


def say_placed(store: ObjectStore, request: AttemptRequest, phase: str) -> None:
    """Tell that a worker of the phase, the one that calls this, has found a place."""
    Reporter(store, request.attempt_id, phase).placement({"phase": _name(request.spec, phase), "state": "placed"})


def _name(spec: JobSpec, phase: str) -> str:
    """A sweep's trials have names of their own."""
    return f"{phase} of {spec.name}"


def _needs(spec: JobSpec, num_workers: int) -> str:
    resources, there = spec.resources, ray.cluster_resources()
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    asked = " and ".join(f"{amount:g} {name}" for name, amount in each.items() if amount)
    if resources.memory_per_worker is not None:
        asked += f" and {resources.memory_per_worker / _GIB:.3g} GiB of memory"
    kind = f" of type {resources.accelerator_type}" if resources.accelerator_type else ""
    total = " and ".join(f"{there.get(name, 0.0):g} {name}" for name, amount in each.items() if amount)
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{workers} with {asked}{kind} each; the whole cluster had {total}"
