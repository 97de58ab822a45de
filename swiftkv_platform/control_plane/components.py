"""The control plane's components, and the FastAPI dependencies by which routes get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from swiftkv_platform.contract.attempts import StoredFile
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.cached_call import CachedCall
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentRepository
from swiftkv_platform.control_plane.deployments.rollout import RolloutRepository
from swiftkv_platform.control_plane.files.repository import FileRepository
from swiftkv_platform.control_plane.hooks.outbox import Outbox
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.loops import Leases
from swiftkv_platform.control_plane.models.parents import Parents
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.control_plane.parsing import LimitedParserPool, ParserPool
from swiftkv_platform.control_plane.ray.jobs import Entrypoint, RayJobs
from swiftkv_platform.control_plane.ray.placement import Node
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.access import list_file_ids
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.traces import Spans


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


def get_retention_repository(request: Request) -> RetentionRepository:
    return RetentionRepository(request.app.state.components.database)


def make_state_dependency(name: str) -> Any:
    """Return a FastAPI dependency on the attribute `name` of the application's state."""

    def find(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(find)


ComponentsDep = Annotated[Components, make_state_dependency("components")]
DeletionsDep = Annotated[RetentionRepository, Depends(get_retention_repository)]
SpansDep = Annotated[Spans, make_state_dependency("spans")]
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
