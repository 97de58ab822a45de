"""What routes are given: the parts of the control plane, the caller, the page asked for. Builds the real parts."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from swiftkv_platform.cluster.ray_jobs import RayJobs
from swiftkv_platform.cluster.ray_serve import RayServe, http_address
from swiftkv_platform.database.catalog import SqlCatalog
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.orchestration.ports import Catalog, Clock, JobCluster, JobRepository, Page, ServeCluster
from swiftkv_platform.orchestration.reconciler import Entrypoint
from swiftkv_platform.orchestration.service import Caller
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store

_LOCAL_CALLER = Caller(tenant="default", name="local")
"""Who everybody is while no API key is configured."""


@dataclass(frozen=True)
class Components:
    """The outside world of a control plane."""

    database: Database
    jobs: JobRepository
    catalog: Catalog
    cluster: JobCluster
    serving: ServeCluster
    objects: ObjectStore
    attempts: AttemptStore
    entrypoint: Entrypoint
    clock: Clock = time.time


def build_components(settings: Settings) -> Components:
    """The real parts. Opens the database and, where that is SQLite, brings its schema up to date.

    Raises `InvalidInputError` for an address that cannot be used, and `DatabaseUnavailableError`.
    """
    database = Database(settings.resolved_database_url)
    if database.is_sqlite:
        database.upgrade()
    else:
        database.check_schema()
    objects = open_store(settings.resolved_storage_uri, patient=False)  # requests fail fast, the reconciler repeats
    http_host, http_port = http_address(settings.serve_url)
    return Components(
        database=database,
        jobs=SqlJobRepository(database),
        catalog=SqlCatalog(database),
        cluster=RayJobs(settings.ray_dashboard_url),
        serving=RayServe(settings.ray_dashboard_url, http_host=http_host, http_port=http_port),
        objects=objects,
        attempts=AttemptStore(objects),
        # Workers that share cores fall to a fraction of their speed with more than one OpenMP thread each.
        entrypoint=Entrypoint((sys.executable, "-m", "jobs.distill"), objects.uri, {"OMP_NUM_THREADS": "1"}),
    )


def read_object(store: str, key: str) -> bytes:
    """An object of any store, for checking a spec's sources."""
    return open_store(store, patient=False).get_bytes(key)


def get_components(request: Request) -> Components:
    components: Components = request.app.state.components
    return components


def get_settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def get_caller() -> Caller:
    return _LOCAL_CALLER


def newest_first(
    after: Annotated[str | None, Query(description="`last_id` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> Page:
    return Page(after, limit, order)


def oldest_first(
    after: Annotated[str | None, Query(description="`last_id` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Annotated[Literal["asc", "desc"], Query()] = "asc",
) -> Page:
    return Page(after, limit, order)


Parts = Annotated[Components, Depends(get_components)]
TheSettings = Annotated[Settings, Depends(get_settings)]
TheCaller = Annotated[Caller, Depends(get_caller)]
NewestFirst = Annotated[Page, Depends(newest_first)]
OldestFirst = Annotated[Page, Depends(oldest_first)]
