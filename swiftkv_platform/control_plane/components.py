"""The control plane's components, and the FastAPI dependencies by which routes get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Request

from swiftkv_platform.contract.attempts import StoredFile
from swiftkv_platform.contract.traffic import make_traffic_prefix
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import CachedCall, Clock
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentRepository
from swiftkv_platform.control_plane.deployments.rollout import RolloutRepository
from swiftkv_platform.control_plane.files.repository import FileRepository
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.loops import Leases
from swiftkv_platform.control_plane.models.parents import Parents
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.control_plane.parsing import LimitedParserPool, ParserPool
from swiftkv_platform.control_plane.ray import Entrypoint, Node, RayJobs
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.control_plane.webhooks import Outbox
from swiftkv_platform.errors import NotFoundError
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.names import CapturedTraffic, list_file_ids, list_traffic_sources
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.storage.traffic import TrafficReader
from swiftkv_platform.traces import SpanRecorder


@dataclass(frozen=True)
class Components:
    """What the control plane works with: database, repositories, Ray clusters and object store."""

    database: Database
    jobs: JobRepository
    deployments: DeploymentRepository
    registry: ModelRepository
    leases: Leases
    cluster: RayJobs
    serving: RayServe
    objects: ObjectStore
    attempts: AttemptStore
    entrypoint: Entrypoint
    outbox: Outbox
    files: FileRepository
    policies: TenantPolicies
    clock: Clock

    @property
    def parents(self) -> Parents:
        """Models and checkpoints that jobs continue from."""
        return Parents(self.jobs, self.registry, self.attempts)

    @property
    def rollouts(self) -> RolloutRepository:
        return RolloutRepository(self.database)

    def find_files(self, spec: JobSpec, tenant: str, *, usable_at: float | None = None) -> Mapping[str, StoredFile]:
        """Return the tenant's uploaded files that a spec names, by id. `usable_at`: files that have expired by this
        time are left out; None for accepted jobs, which may still use expired files."""
        ids = list_file_ids(spec)
        found = self.files.find_existing(ids, tenant=tenant).values() if ids else ()
        return {
            file.id: StoredFile(
                uri=f"{self.objects.uri}/{file.object_key}", sha256=file.sha256, size=file.size, columns=file.columns
            )
            for file in found
            if usable_at is None or file.expires_at is None or file.expires_at > usable_at
        }

    def locate_traffic(self, spec: JobSpec, tenant: str) -> Mapping[str, CapturedTraffic]:
        """Return the captured traffic that a spec names, by deployment. It is below the tenant's own prefix, so that
        no other tenant's is found."""
        return {
            deployment_id: CapturedTraffic(f"{self.objects.uri}/{make_traffic_prefix(tenant, deployment_id)}")
            for deployment_id, _ in list_traffic_sources(spec)
        }

    def find_traffic(self, spec: JobSpec, tenant: str) -> Mapping[str, CapturedTraffic]:
        """Return what `locate_traffic` does with the sizes of the windows of a new spec, without deployments that the
        tenant does not have."""
        found = dict[str, CapturedTraffic]()
        for deployment_id, traffic in self.locate_traffic(spec, tenant).items():
            try:
                self.deployments.get_deployment(deployment_id, tenant=tenant)
            except NotFoundError:
                continue
            reader = TrafficReader(self.objects, make_traffic_prefix(tenant, deployment_id))
            windows = {source.window for name, source in list_traffic_sources(spec) if name == deployment_id}
            sizes = {
                (since, until): sum(part.size for part in reader.list_parts(since=since, until=until))
                for since, until in windows
            }
            days = () if all(sizes.values()) else tuple(day.day for day in reader.list_days())
            found[deployment_id] = replace(traffic, window_sizes=sizes, days=days)
        return found


def get_retention_repository(request: Request) -> RetentionRepository:
    return RetentionRepository(request.app.state.components.database)


def make_state_dependency(name: str) -> Any:
    """Return a FastAPI dependency on the attribute `name` of the application's state."""

    def find(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(find)


ComponentsDep = Annotated[Components, make_state_dependency("components")]
DeletionsDep = Annotated[RetentionRepository, Depends(get_retention_repository)]
SpansDep = Annotated[SpanRecorder, make_state_dependency("spans")]
NodesDep = Annotated[CachedCall[Sequence[Node] | None], make_state_dependency("nodes")]
"""Nodes of the jobs' cluster; None if Ray does not answer."""
RayErrorDep = Annotated[CachedCall[str | None], make_state_dependency("ray")]
"""Why Ray is unavailable; None if it is available."""
RAY_TIMEOUT_S = 2.0
"""Max seconds that a route waits for Ray, so that a hanging Ray does not block a page."""
SpecParsersDep = Annotated[ParserPool, make_state_dependency("spec_parsers")]
UploadParsersDep = Annotated[LimitedParserPool, make_state_dependency("upload_parsers")]
ImportParsersDep = Annotated[LimitedParserPool, make_state_dependency("import_parsers")]
SettingsDep = Annotated[Settings, make_state_dependency("settings")]
