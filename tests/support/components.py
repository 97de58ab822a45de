"""The control plane's parts on a real database and object store, with fake clusters."""

import time
from typing import Any

from fastapi.routing import _IncludedRouter

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.repository import DeploymentRepository
from swiftkv_platform.control_plane.files.repository import FileRepository
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.loops import Leases
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.control_plane.ray import Entrypoint
from swiftkv_platform.control_plane.webhooks import Outbox
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.support.fakes.cluster import FakeCluster
from tests.support.fakes.serve_cluster import FakeServeCluster


def _build_once(build: Any) -> Any:
    """Share built routes among the control planes of a process; building them is most of a control plane's start."""
    built: dict[int, Any] = {}

    def build_or_take(included: Any, route: Any) -> Any:
        if not getattr(route, "endpoint", build).__module__.startswith("swiftkv_platform.control_plane."):
            return build(included, route)
        if id(route) not in built:
            built[id(route)] = build(included, route)
        return built[id(route)]

    return build_or_take


_IncludedRouter._build_effective_context = _build_once(_IncludedRouter._build_effective_context)  # type: ignore[method-assign]


def make_components(
    database: Database, objects: ObjectStore, *, cluster: FakeCluster | None = None, clock: Clock = time.time
) -> Components:
    return Components(
        database=database,
        jobs=JobRepository(database, TenantPolicies()),
        deployments=DeploymentRepository(database),
        registry=ModelRepository(database),
        leases=Leases(database),
        outbox=Outbox(database),
        files=FileRepository(database),
        cluster=cluster or FakeCluster(),
        serving=FakeServeCluster(),
        objects=objects,
        attempts=AttemptStore(objects),
        entrypoint=Entrypoint(("python",), objects.uri),
        policies=TenantPolicies(),
        clock=clock,
    )
