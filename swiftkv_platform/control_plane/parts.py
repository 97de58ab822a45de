"""Dependencies of routes: the parts of the control plane, the caller, the page asked for. Builds the real parts."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.control_plane.access.audit_middleware import record_of
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Policies, Tenants
from swiftkv_platform.control_plane.base import Caller, Clock, Page
from swiftkv_platform.control_plane.database.session import Database, open_database
from swiftkv_platform.control_plane.deployments.deployment import Catalog, ServeCluster
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.rows import SqlCatalog, SqlRegistry
from swiftkv_platform.control_plane.files.file import FileRepository
from swiftkv_platform.control_plane.files.rows import SqlFiles
from swiftkv_platform.control_plane.hooks.rows import SqlOutbox
from swiftkv_platform.control_plane.hooks.webhooks import SecretFiles, WebhookRules, recipients
from swiftkv_platform.control_plane.jobs.costs import Prices
from swiftkv_platform.control_plane.jobs.following import Watches
from swiftkv_platform.control_plane.jobs.parents import Parents
from swiftkv_platform.control_plane.jobs.ports import JobCluster, JobRepository
from swiftkv_platform.control_plane.jobs.ray_jobs import RayJobs
from swiftkv_platform.control_plane.jobs.reconciler import Entrypoint
from swiftkv_platform.control_plane.jobs.rows import SqlJobRepository
from swiftkv_platform.control_plane.models.registry import Registry
from swiftkv_platform.control_plane.upkeep.leadership import Leases
from swiftkv_platform.control_plane.upkeep.leases import SqlLeases
from swiftkv_platform.control_plane.upkeep.retention import Kind, Retention
from swiftkv_platform.control_plane.upkeep.rows import SqlRetention
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.sources.small_files import CONFIG_BYTES, checked_length
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.traces import Spans
from swiftkv_platform.web.bodies import Sender
from swiftkv_platform.web.places import Places

SESSION_COOKIE = "swiftkv_session"
"""Carries the id of the dashboard's session. No other site's page can make a browser send it (`SameSite=Strict`)."""
_LOCAL_CALLER = Caller(tenant="default", name="local")
"""Caller of every request while no API key is configured."""
_CHANGING = frozenset({Scope.JOBS_WRITE, Scope.DEPLOY})
"""Scopes of routes that change something."""
SIGN_IN_PATH = "/session"
_WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Workers that share cores fall to a fraction of their speed with more than one OpenMP thread each. Ray shows these
variables, so they hold no secrets."""
Order = Literal["asc", "desc"]


@dataclass(frozen=True)
class Components:
    """The outside world of a control plane."""

    database: Database
    jobs: JobRepository
    catalog: Catalog
    registry: Registry
    leases: Leases
    cluster: JobCluster
    serving: ServeCluster
    objects: ObjectStore
    attempts: AttemptStore
    entrypoint: Entrypoint
    outbox: SqlOutbox
    files: FileRepository
    policies: Policies = NO_LIMITS
    clock: Clock = time.time


def build_components(settings: Settings) -> Components:
    """The real parts. Opens the database and, where that is SQLite, brings its schema up to date.

    Raises `InvalidInputError` for an address that cannot be used, and `DatabaseUnavailableError`.
    """
    database = open_database(settings)
    if database.is_sqlite:
        database.upgrade()
    else:
        database.check_schema()
    policies = Tenants(settings.tenants_file)
    objects = open_store(settings.resolved_storage_uri, patient=False)  # requests fail fast, the reconciler repeats
    return Components(
        database=database,
        jobs=SqlJobRepository(database, recipients(policies)),
        catalog=SqlCatalog(database),
        registry=SqlRegistry(database),
        leases=SqlLeases(database),
        cluster=RayJobs(
            settings.ray_dashboard_url,
            entrypoint_num_cpus=settings.entrypoint_num_cpus,
            entrypoint_memory=settings.entrypoint_memory,
        ),
        serving=RayServe(
            settings.resolved_serve_dashboard_url,
            settings.serve_url,
            api_keys_file=settings.serve_api_keys_file,
            access=partial(tenant_access, source_rules(settings), policies),
            oidc_file=settings.serve_oidc_file,
            allowed_hosts=settings.allowed_hosts,
        ),
        objects=objects,
        attempts=AttemptStore(objects, max_log_bytes=settings.max_log_bytes),
        entrypoint=Entrypoint(
            (sys.executable, "-m", "swiftkv_platform.jobs.distill"), objects.uri, _WORKER_ENVIRONMENT
        ),
        outbox=SqlOutbox(database),
        files=SqlFiles(database),
        policies=policies,
    )


def prices(settings: Settings) -> Prices:
    return Prices(settings.gpu_hour_price, settings.cpu_hour_price)


def retention(settings: Settings) -> Retention:
    """Times for which things are kept."""
    days = ("deliveries", "idempotency_keys", "promotions", "audit", "models", "jobs")
    return Retention(
        ended_jobs={kind: getattr(settings, f"retention_{kind}_days") for kind in Kind},
        metric_points=settings.retention_metric_points,
        rollbacks=settings.retention_rollbacks,
        **{name: getattr(settings, f"retention_{name}_days") for name in days},
    )


def retained_rows(request: Request) -> SqlRetention:
    return SqlRetention(request.app.state.components.database)


def source_rules(settings: Settings) -> SourceRules:
    return SourceRules(settings.resolved_source_roots, code_tasks=settings.allow_code_tasks)


def tenant_access(rules: SourceRules, policies: Policies, tenant: str | None) -> Access:
    """Sources that a tenant may read; without a tenant only the hub, where sources have rules."""
    if tenant is None:
        return Access(roots=None if rules.roots is None else ())
    return rules.access(tenant, policies.policy(tenant).hub_organizations)


def webhook_rules(settings: Settings) -> WebhookRules:
    return WebhookRules(settings.webhook_origins, SecretFiles(settings.secrets_dir))


def read_object(store: str, key: str) -> bytes:
    """A small object of any store, for checking a spec's sources. Raises `UnusableFileError` for one that is not."""
    data = b"".join(open_store(store, patient=False).stream(key, stop=CONFIG_BYTES + 1))
    return checked_length(data, CONFIG_BYTES)


def parents_service(request: Request) -> Parents:
    parts: Components = request.app.state.components
    return Parents(parts.jobs, parts.registry, parts.attempts)


def identified(request: Request) -> Principal | None:
    """The caller of a request, counted once; None where no keys are needed.

    Raises `UnauthenticatedError` and `RateLimitedError`.
    """
    authenticator: Authenticator | None = request.app.state.authenticator
    record = record_of(request)
    if authenticator is None:
        record.identify(request, None, name=_LOCAL_CALLER.name, tenant=_LOCAL_CALLER.tenant)
        return None
    if not hasattr(request.state, "principal"):
        key = request.state.principal = authenticator.authenticate(authorization(request))
        record.identify(request, key, name=key.name, tenant=key.tenant)
        request.app.state.rate_limit.take(key.name)
        request.app.state.key_uses.note(key)
    principal: Principal = request.state.principal
    return principal


async def admit(request: Request) -> Sender:
    """Let a request in before its body is read. Raises as `identified`, and for sign-ins as `sign_ins.take`."""
    if request.url.path == SIGN_IN_PATH:
        address = request.client.host if request.client else "unknown"
        if request.app.state.authenticator is not None:
            request.app.state.sign_ins.take(address)
        return Sender("", address)
    key = await run_in_threadpool(identified, request)
    caller = _LOCAL_CALLER if key is None else Caller(key.tenant, key.name)
    return Sender(caller.tenant, caller.name)


def get_caller(
    request: Request,
    scopes: SecurityScopes,
    _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> Caller:
    """Return the caller, if it is allowed. Raises `UnauthenticatedError`, `RateLimitedError` and `ForbiddenError`."""
    key = identified(request)
    if key is not None:
        for scope in scopes.scopes:
            key.require(Scope(scope))
        if request.method not in ("GET", "HEAD"):
            get_logger().info("audit", tenant=key.tenant, key=key.name, method=request.method, path=request.url.path)
    record_of(request).open(only_asks=_CHANGING.isdisjoint(map(Scope, scopes.scopes)))
    caller = request.state.caller = _LOCAL_CALLER if key is None else Caller(tenant=key.tenant, name=key.name)
    return caller


async def hold_stream(request: Request) -> AsyncIterator[None]:
    """Hold one of the caller's streams until the answer is sent. Raises `OverloadedError`.

    A route's caller comes before it in the parameters. Routes that answer with a stream of events where one is wanted
    hold none for a page of them.
    """
    caller: Caller = request.state.caller
    streams: Places = request.app.state.streams
    if request.scope["route"].path.endswith("/events") and not wants_events(request):
        yield
        return
    with streams.place(caller.tenant, caller.name):
        yield


def wants_events(request: Request) -> bool:
    """Whether the caller accepts a stream of events."""
    return "text/event-stream" in request.headers.get("accept", "")


def authorization(request: Request) -> str | None:
    """The caller's `Authorization`, or that of the dashboard's session. Raises `UnauthenticatedError`."""
    header = request.headers.get("authorization")
    found = current_session(request) if header is None else None
    return header if found is None else found.authorization


def current_session(request: Request) -> Session | None:
    """The session that the request's cookie names, looked up once. Raises `UnauthenticatedError` where it has ended."""
    cookie = request.cookies.get(SESSION_COOKIE)
    sessions: Sessions | None = request.app.state.sessions
    if not cookie or sessions is None:
        return None
    if not hasattr(request.state, "session"):
        request.state.session = sessions.find(cookie)
    session: Session = request.state.session
    return session


def paged(default: int, first: Order, *, most: int = 1000) -> Callable[..., Page]:
    """The part of a list that a query asks for, of `default` items without a word."""

    def page(
        after: str | None = Query(None, description="`last_id` of the page before"),
        limit: int = Query(default, ge=1, le=most),
        order: Order = first,
    ) -> Page:
        return Page(after, limit, order)

    return page


def _part(name: str) -> Any:
    def find(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(find)


Parts = Annotated[Components, _part("components")]
Deletions = Annotated[SqlRetention, Depends(retained_rows)]
TheParents = Annotated[Parents, Depends(parents_service)]
JobSpans = Annotated[Spans, _part("spans")]
TheWatches = Annotated[Watches, _part("watches")]
TheSettings = Annotated[Settings, _part("settings")]
Reader = Annotated[Caller, Security(get_caller, scopes=[Scope.JOBS_READ])]
Writer = Annotated[Caller, Security(get_caller, scopes=[Scope.JOBS_WRITE])]
Asker = Annotated[Caller, Security(get_caller, scopes=[Scope.GENERATE])]
Deployer = Annotated[Caller, Security(get_caller, scopes=[Scope.DEPLOY])]
NewestFirst = Annotated[Page, Depends(paged(20, "desc"))]
Streamed = Annotated[None, Depends(hold_stream)]
OldestFirst = Annotated[Page, Depends(paged(100, "asc"))]
