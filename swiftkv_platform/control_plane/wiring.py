"""Builds the control plane once: its components, the application's state and the control loops."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from uuid import uuid4

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.control_plane.access.audit import AuditTrail, RefusalLimiter
from swiftkv_platform.control_plane.access.sessions import KeyUses, Sessions
from swiftkv_platform.control_plane.access.tenants import TenantPolicies, get_source_access
from swiftkv_platform.control_plane.base import CachedCall
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.session import open_database
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.deployments.repository import DeploymentRepository
from swiftkv_platform.control_plane.deployments.rollout_steps import RolloutReconciler
from swiftkv_platform.control_plane.files.repository import FileRepository
from swiftkv_platform.control_plane.files.service import FileSweeper
from swiftkv_platform.control_plane.health import ControlPlaneHistograms, ControlPlaneMetrics, Readiness
from swiftkv_platform.control_plane.jobs.logs import EventFollowers, LogFollowers, WatchedJobs
from swiftkv_platform.control_plane.jobs.queue import list_reported_nodes
from swiftkv_platform.control_plane.jobs.reconciler import OrphanCleaner, PollSchedule, Reconciler
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.loops import ControlLoop, Leadership, Leases
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.control_plane.parsing import make_import_parsers, make_spec_parsers, make_upload_parsers
from swiftkv_platform.control_plane.ray import Entrypoint, RayJobs
from swiftkv_platform.control_plane.retention import RetentionRepository, RetentionStore, RetentionSweeper
from swiftkv_platform.control_plane.webhooks import Outbox, WebhookDeliverer, make_webhook_rules, send_webhook
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.limits import SIGN_IN_BURST, SIGN_INS_PER_MINUTE
from swiftkv_platform.logs import get_logger
from swiftkv_platform.private_directories import remove_abandoned_workspaces
from swiftkv_platform.security.keys import Credentials
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.traces import SpanRecorder, open_provider
from swiftkv_platform.web.limiters import ConcurrencyLimiter, ConcurrencyLimits, RateLimiter, TenantConcurrencyLimiter

_STOP_TIMEOUT_S = 20.0
_JOBS_AT_ONCE = 16
"""Jobs that the reconciler polls or submits concurrently."""
_NODES_TTL_S = 5.0
"""Seconds for which Ray's report of its nodes is cached."""
LOOPS = ("jobs", "deployments", "rollouts", "webhooks", "files", "retention")


_WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Workers that share cores fall to a fraction of their speed with more than one OpenMP thread each. Ray shows these
variables, so they hold no secrets."""


def build_components(settings: Settings) -> Components:
    """Build the components. Opens the database and, if it is SQLite, upgrades its schema.

    Raises `InvalidInputError` for an address that cannot be used, and `DatabaseUnavailableError`.
    """
    database = open_database(settings)
    if database.is_sqlite:
        database.upgrade()
    else:
        database.check_schema()
    policies = TenantPolicies(settings.tenants_file)
    objects = open_store(settings.resolved_storage_uri, patient=False)  # requests fail fast, the reconciler repeats
    return Components(
        database=database,
        jobs=JobRepository(database, policies),
        deployments=DeploymentRepository(database),
        registry=ModelRepository(database),
        leases=Leases(database),
        cluster=RayJobs(
            settings.ray_dashboard_url,
            entrypoint_num_cpus=settings.entrypoint_num_cpus,
            entrypoint_memory=settings.entrypoint_memory,
            node_groups=settings.node_groups,
        ),
        serving=RayServe(
            settings.resolved_serve_dashboard_url,
            settings.serve_url,
            api_keys_file=settings.serve_api_keys_file,
            access=partial(get_source_access, settings, policies),
            oidc_file=settings.serve_oidc_file,
            allowed_hosts=settings.allowed_hosts,
        ),
        objects=objects,
        attempts=AttemptStore(objects, max_log_bytes=settings.max_log_bytes),
        entrypoint=Entrypoint(
            (sys.executable, "-m", "swiftkv_platform.jobs.distill"), objects.uri, _WORKER_ENVIRONMENT
        ),
        outbox=Outbox(database),
        files=FileRepository(database),
        policies=policies,
        clock=time.time,
    )


@asynccontextmanager
async def run_control_plane(
    app: FastAPI,
    settings: Settings,
    credentials: Credentials | None,
    histograms: ControlPlaneHistograms,
    components: Components | None = None,
) -> AsyncIterator[None]:
    """Give `app` its state and run its loops until the context ends. `components`: parts to use instead of those that
    `settings` describes. Raises as `build_components`."""
    await run_in_threadpool(remove_abandoned_workspaces)
    parts = await run_in_threadpool(build_components, settings) if components is None else components
    app.state.components, app.state.settings = parts, settings
    app.state.spans = SpanRecorder(open_provider("swiftkv-control-plane"))
    app.state.nodes = CachedCall(lambda: list_reported_nodes(parts.cluster), parts.clock, ttl_s=_NODES_TTL_S)
    _set_request_state(app, settings, credentials, parts)
    holder = f"{socket.gethostname()[:40]}-{uuid4().hex[:12]}"
    leaderships = {name: Leadership(parts.leases, name, holder, parts.clock) for name in LOOPS}
    deliverer = WebhookDeliverer(parts.outbox, make_webhook_rules(settings), send_webhook, parts.clock)
    reconciler = Reconciler(
        parts,
        settings,
        leaderships["jobs"],
        histograms,
        app.state.spans,
        polls=PollSchedule(),
        concurrency=_JOBS_AT_ONCE,
    )
    orphans = OrphanCleaner(parts)
    sweeper = RetentionSweeper(
        RetentionRepository(parts.database), RetentionStore(parts.objects), settings, parts.clock
    )

    def run_cleanup() -> None:
        orphans.tick()
        sweeper.tick()

    deploying = DeploymentReconciler(parts, settings, leaderships["deployments"])
    steps = {
        "jobs": reconciler.tick,
        "deployments": deploying.tick,
        "rollouts": RolloutReconciler(parts, settings, leaderships["rollouts"]).tick,
        "webhooks": deliverer.tick,
        "files": FileSweeper(parts.files, parts.objects, parts.clock).tick,
        "retention": run_cleanup,
    }
    # Each has its own thread: Ray Serve is slow to start, and webhook receivers are slow to answer.
    loops = [
        ControlLoop(
            name,
            leaderships[name].guard_step(histograms.measure_step_duration(name, step)),
            interval_s=settings.reconcile_interval_s,
            clock=parts.clock,
        )
        for name, step in steps.items()
    ]
    app.state.readiness = Readiness(parts, loops)
    app.state.ray = app.state.readiness.checks["ray"]
    app.state.metrics = CollectorRegistry()
    histograms.register(app.state.metrics)
    operator_files = {
        **({} if credentials is None else credentials.operator_files),
        "tenants": lambda: parts.policies.is_usable,
    }
    app.state.metrics.register(
        ControlPlaneMetrics(
            parts, loops, reconciler, operator_files, sweeper, orphans, deploying, app.state.readiness.checks
        )
    )
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            await run_in_threadpool(loop.stop, _STOP_TIMEOUT_S)
        await run_in_threadpool(deliverer.close)
        await run_in_threadpool(_release_leases, leaderships.values())
        parts.database.close()
        await run_in_threadpool(app.state.spans.close)


def _set_request_state(app: FastAPI, settings: Settings, credentials: Credentials | None, parts: Components) -> None:
    """Give `app` the state that limits and records its callers."""
    app.state.authenticator = credentials
    app.state.key_uses = KeyUses(parts.database, parts.clock)
    app.state.sessions = credentials and Sessions(
        parts.database, credentials, parts.clock, lifetime_s=settings.session_lifetime_s
    )
    app.state.sign_ins = RateLimiter(
        SIGN_INS_PER_MINUTE.default, parts.clock, burst=SIGN_IN_BURST.default, caller_kind="address"
    )
    app.state.audit = AuditTrail(parts.database)
    app.state.refusal_limiter = RefusalLimiter(parts.clock)
    app.state.concurrency_limiter = TenantConcurrencyLimiter()
    app.state.watches = WatchedJobs(parts.jobs, parts.clock)
    app.state.followers = EventFollowers(app.state.watches.list_events, app.state.concurrency_limiter)
    app.state.streams = ConcurrencyLimiter(
        "streams", ConcurrencyLimits(settings.max_streams_of_key, settings.max_streams_of_tenant, settings.max_streams)
    )
    logs = ConcurrencyLimits(
        settings.max_followed_logs_of_key, settings.max_followed_logs_of_tenant, settings.max_followed_logs
    )
    app.state.log_followers = LogFollowers(parts, logs, app.state.concurrency_limiter)
    app.state.rate_limit = RateLimiter(settings.requests_per_minute, parts.clock)
    app.state.spec_parsers = make_spec_parsers()
    app.state.upload_parsers = make_upload_parsers()
    app.state.import_parsers = make_import_parsers()


def _release_leases(leaderships: Iterable[Leadership]) -> None:
    for leadership in leaderships:
        try:
            leadership.release()
        except DatabaseUnavailableError as error:
            get_logger().info("lease not released; it will expire", reason=error.message)
