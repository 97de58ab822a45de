"""Operations on jobs for routes. They change stored jobs only; the reconciler acts on the cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic_core import to_json

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.access.tenants import Demand, make_source_rules
from swiftkv_platform.control_plane.base import CachedCall, Caller, PageQuery, new_id
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.jobs.estimates import (
    JobEstimate,
    add_time_and_cost,
    check_spec,
    find_speed,
    get_cost_cap,
    get_prices,
    requires_file_access,
)
from swiftkv_platform.control_plane.jobs.job import (
    Event,
    Job,
    JobStatus,
    Reason,
    make_status_event,
    requeue,
    transition,
)
from swiftkv_platform.control_plane.jobs.queue import check_fits_node_groups
from swiftkv_platform.control_plane.jobs.repository import IdempotencyKey, JobFilter
from swiftkv_platform.control_plane.jobs.responses import JobResponse
from swiftkv_platform.control_plane.models.parents import FoundParent, check_parent, check_publish_target
from swiftkv_platform.control_plane.parsing import ParserPool
from swiftkv_platform.control_plane.ray import Node
from swiftkv_platform.control_plane.webhooks import make_webhook_rules
from swiftkv_platform.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    OverQuotaError,
    StaleVersionError,
)
from swiftkv_platform.limits import RESUMPTIONS
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.names import resolve_traffic_windows
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import MAX_SPEC_BYTES
from swiftkv_platform.web.limiters import Client

_MAX_UPDATE_ATTEMPTS = 5
"""Max tries to store a change: the reconciler may change the job between reading and writing."""
_MAX_MEASURED_JOBS = 100
"""Max number of newest jobs that are searched for a measured speed."""
_ACTIVE_STATUSES = frozenset({JobStatus.QUEUED, JobStatus.STARTING, JobStatus.RUNNING, JobStatus.EVALUATING})


@dataclass
class JobService:
    """Submits, pauses, resumes and cancels jobs for callers."""

    parts: Components
    settings: Settings
    nodes: CachedCall[Sequence[Node] | None]
    """Nodes that the jobs' cluster reports; None if it reports none."""
    parsers: ParserPool
    """Processes that check specs which name files."""

    def validate(self, spec: JobSpec, caller: Caller, client: Client) -> JobEstimate:
        """Check what `submit` checks, except the queue's length, and estimate the job's duration; nothing is stored.

        Raises `OverQuotaError`, and as `Access.check_spec`, `WebhookRules.check` and `estimates.check_spec`.
        """
        succeeded = JobFilter(status=JobStatus.SUCCEEDED)
        earlier = self.parts.jobs.list(PageQuery(limit=_MAX_MEASURED_JOBS), tenant=caller.tenant, where=succeeded).items
        speed = find_speed(spec, earlier, self.settings.flops_per_second)
        spec, found = self._validate_spec(spec, caller, client)
        return add_time_and_cost(found, spec, speed, get_prices(self.settings))

    def _validate_spec(self, spec: JobSpec, caller: Caller, client: Client) -> tuple[JobSpec, JobEstimate]:
        """Validate a spec. Returns (spec to store, with resolved targets, windows and checkpoint; estimate)."""
        # 1. Limits of the operator and the tenant.
        check_spec_bytes(spec)
        check_job_limits(spec, self.settings)
        self._check_wandb_entity(spec, caller.tenant)
        self._check_rollout(spec, caller.tenant)
        organizations = self.parts.policies.get(caller.tenant).hub_organizations
        if spec.publish.publication is not None:
            to = check_publish_target(spec.publish.publication, caller.tenant, self.settings)
            spec = spec.model_copy(update={"publish": spec.publish.model_copy(update={"to": to})})
        parent = self.parts.parents.find_parent(spec, caller.tenant)
        if parent is not None:
            spec = spec.inherit_from(parent.spec)
        if spec.is_publish_only:
            self._check_demand(spec, caller.tenant)
            return _pin_parent(spec, parent, JobEstimate()), JobEstimate()
        # 2. Sources, quotas, webhook and prices.
        now = self.parts.clock()
        spec = resolve_traffic_windows(spec, now)
        files = self.parts.find_files(spec, caller.tenant, usable_at=now)
        traffic = self.parts.find_traffic(spec, caller.tenant)
        access = make_source_rules(self.settings).build_access(caller.tenant, organizations, files, traffic)
        self._check_demand(spec, caller.tenant)
        if spec.webhook is not None:
            make_webhook_rules(self.settings).get_secret(spec.webhook, caller.tenant)
        if spec.limits.cost_cap is not None and not get_prices(self.settings).are_known:
            raise InvalidInputError(
                f"limits.cost_cap is {spec.limits.cost_cap:g}, but the operator has set no prices "
                "(SWIFTKV_GPU_HOUR_PRICE, SWIFTKV_CPU_HOUR_PRICE), so no job has a cost; leave it out",
                field="limits.cost_cap",
                value=spec.limits.cost_cap,
            )
        found = (
            self.parsers.run(client, check_spec, spec, access)
            if requires_file_access(spec)
            else check_spec(spec, access)
        )
        return _pin_parent(spec, parent, found), found

    def submit(
        self,
        spec: JobSpec,
        caller: Caller,
        client: Client,
        *,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
    ) -> Job:
        """Store a job; once this returns it is not lost.

        With a key the caller has used before, returns that key's job and checks nothing: quotas, rules and sources may
        have changed since. Raises `IdempotencyConflictError` if the key was used with another body,
        `QuotaExceededError` if the tenant has too many jobs, and as `validate`.
        """
        idempotency = None if idempotency_key is None else IdempotencyKey(idempotency_key, _compute_digest(spec))
        if (
            idempotency is not None
            and (known := self.parts.jobs.find_by_idempotency_key(caller.tenant, idempotency)) is not None
        ):
            return known
        spec, estimate = self._validate_spec(spec, caller, client)
        now = int(self.parts.clock())
        job = Job(
            id=new_id("job"),
            tenant=caller.tenant,
            created_by=caller.name,
            spec=spec,
            created_at=now,
            flops_per_step=estimate.flops_per_step,
            planned_memory=estimate.memory_per_worker,
            traceparent=traceparent,
        )
        self._check_serializable(job)
        policy = self.parts.policies.get(caller.tenant)
        return self.parts.jobs.create(job, make_status_event(job, now=now), idempotency=idempotency, policy=policy)

    def _check_serializable(self, job: Job) -> None:
        """Serialize the job's response, so that no job is stored that cannot be returned."""
        JobResponse.from_job(job, get_prices(self.settings), self.parts.clock()).model_dump_json()

    def _check_wandb_entity(self, spec: JobSpec, tenant: str) -> None:
        """Check where a job writes with the operator's W&B key. Raises `InvalidInputError`."""
        wandb, allowed = spec.tracking.wandb, self.parts.policies.get(tenant).wandb_entities
        if not wandb.entity or wandb.mode in ("offline", "disabled"):
            return
        if allowed is None and make_source_rules(self.settings).roots is None:
            return
        if wandb.entity not in (allowed or ()):
            others = f", or one of {', '.join(allowed)}" if allowed else ""
            raise InvalidInputError(
                f"tracking.wandb.entity is {wandb.entity!r}, which tenant {tenant!r} may not use; leave it out for "
                f"the default entity{others}, set mode: offline, or ask the operator to add it to wandb_entities",
                field="tracking.wandb.entity",
                value=wandb.entity,
            )

    def _check_rollout(self, spec: JobSpec, tenant: str) -> None:
        if spec.rollout is None:
            return
        try:
            self.parts.deployments.get_deployment(spec.rollout.deployment, tenant=tenant)
        except NotFoundError as error:
            raise InvalidInputError(
                f"rollout.deployment is {spec.rollout.deployment!r}: {error.message}",
                field="rollout.deployment",
                value=spec.rollout.deployment,
            ) from error

    def _check_demand(self, spec: JobSpec, tenant: str) -> None:
        check_fits_node_groups(spec, self.settings, self.nodes)
        exceeded = Demand.for_job(spec).find_exceeded_limit(self.parts.policies.get(tenant))
        if exceeded is not None:
            name, requested, most = exceeded
            raise OverQuotaError(
                f"the job requests {requested:g}, above the quota {name} of tenant {tenant!r}, {most:g}, so it can "
                "never start; use fewer or smaller workers",
                field="resources",
                value=requested,
            )

    def cancel(self, job_id: str, caller: Caller) -> Job:
        """Cancel a job; repeating is harmless.

        Raises `NotFoundError`, and `IllegalTransitionError` for a job that has ended otherwise.
        """

        def change(job: Job, now: int) -> tuple[Job, list[Event]]:
            if job.status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
                return job, []
            reason = Reason(ReasonCode.CANCELLED, f"cancelled by {caller.name}")
            cancelled, event = transition(job, JobStatus.CANCELLING, now=now, reason=reason)
            events = [event]
            if not job.status.is_on_cluster:
                cancelled, event = transition(cancelled, JobStatus.CANCELLED, now=now, reason=reason)
                events.append(event)
            return cancelled, events

        return self._update_job(job_id, caller, change)

    def pause(self, job_id: str, caller: Caller) -> Job:
        """Ask a job to checkpoint and leave the cluster; repeating is harmless. Raises as `cancel`."""

        def change(job: Job, now: int) -> tuple[Job, list[Event]]:
            if job.status in (JobStatus.PAUSING, JobStatus.PAUSED):
                return job, []
            status = JobStatus.PAUSING if job.status.is_on_cluster else JobStatus.PAUSED
            reason = Reason(ReasonCode.PAUSED, f"paused by {caller.name}")
            paused, event = transition(job, status, now=now, reason=reason)
            return paused, [event]

        return self._update_job(job_id, caller, change)

    def resume(self, job_id: str, caller: Caller, *, cost_cap: float | None = None) -> Job:
        """Queue a paused job again, from its last checkpoint; a queued or running job stays as it is. `cost_cap`
        replaces `limits.cost_cap` of its spec. Raises as `cancel`, also for a job that is still pausing, and
        `ConflictError` for one that has cost more than its cap, or was resumed too often."""

        def change(job: Job, now: int) -> tuple[Job, list[Event]]:
            if job.status in _ACTIVE_STATUSES:
                return job, []
            if cost_cap is not None:
                limits = job.spec.limits.model_copy(update={"cost_cap": cost_cap})
                job = replace(job, spec=job.spec.model_copy(update={"limits": limits}))
            self._check_cost_cap(job)
            queued, event = requeue(job, now=now, reason=Reason(ReasonCode.RESUMED, f"resumed by {caller.name}"))
            _check_resumptions(job)
            return replace(queued, resumptions=job.resumptions + 1), [event]

        return self._update_job(job_id, caller, change)

    def _check_cost_cap(self, job: Job) -> None:
        cap = get_cost_cap(job.spec, self.parts.policies.get(job.tenant))
        cost = get_prices(self.settings).compute_cost_so_far(job, self.parts.clock())
        if cap is not None and cost is not None and cost > cap:
            raise ConflictError(
                f"cost cap reached: job {job.id} has cost {cost:.2f}, and its cap is {cap:.2f}; resume it with a "
                "higher `cost_cap`, if the tenant's own cap allows it",
                field="cost_cap",
                value=cap,
            )

    def _update_job(self, job_id: str, caller: Caller, change: Callable[[Job, int], tuple[Job, list[Event]]]) -> Job:
        """Apply `change` to the job and store the result, again if others change the job meanwhile. No events mean no
        change."""
        for _ in range(_MAX_UPDATE_ATTEMPTS):
            changed, events = change(self.parts.jobs.get(job_id, tenant=caller.tenant), int(self.parts.clock()))
            if not events:
                return changed
            self._check_serializable(changed)
            try:
                return self.parts.jobs.update(changed, events=events)
            except StaleVersionError as error:
                latest = error
        raise latest


def _pin_parent(spec: JobSpec, parent: FoundParent | None, found: JobEstimate) -> JobSpec:
    """Check that a job can continue from its parent, if any, and return the spec with the parent's id."""
    if parent is None:
        return spec
    check_parent(spec, parent, num_hidden_layers=found.num_hidden_layers)
    training = spec.training.model_copy(update={"from_": parent.parent.name})
    return spec.model_copy(update={"training": training})


def _check_resumptions(job: Job) -> None:
    """Raise `ConflictError` for a job that was paused and resumed too often: each time adds to its history."""
    if job.resumptions >= RESUMPTIONS.default:
        message = (
            f"job {job.id} was resumed {job.resumptions} times, which is the limit; submit a job that continues from "
            "its checkpoint (`training.from`)"
        )
        raise ConflictError(message, field="job_id", value=job.id)


def _compute_digest(spec: JobSpec) -> str:
    """Return the digest of a spec, independent of how the spec was written."""
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_job_limits(spec: JobSpec, settings: Settings) -> None:
    """Raise `InvalidInputError`, with field, value and limit, for a spec above a limit of the operator's."""
    training = spec.training
    requested = (
        ("resources.num_workers", spec.max_total_workers, settings.max_workers_per_job),
        ("training.batch_size", training.batch_size, settings.max_batch_size),
        ("training.micro_batch_size", training.micro_batch_size, settings.max_batch_size),
        ("limits.max_runtime_s", spec.limits.max_runtime_s, settings.max_runtime_s),
    )
    for field, value, most in requested:
        if value is not None and most is not None and value > most:
            message = f"{field} is {value}, above the operator's limit of {most}; use {most} or less"
            raise InvalidInputError(message, field=field, value=value)


def check_spec_bytes(spec: JobSpec) -> None:
    """Raise `InvalidInputError` for a spec that is too long to be stored, read and listed with others."""
    parts = {name: len(to_json(value)) for name, value in spec.model_dump(mode="json").items()}
    size = sum(parts.values())
    if size > MAX_SPEC_BYTES:
        longest = max(parts, key=lambda name: parts[name])
        raise InvalidInputError(
            f"the spec has {size:,} bytes as JSON ({longest}: {parts[longest]:,}); at most {MAX_SPEC_BYTES:,} are "
            "accepted; name data by directories and prefixes instead of single files",
            field=longest,
        )
