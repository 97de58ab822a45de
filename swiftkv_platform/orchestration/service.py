"""What callers ask of jobs and deployments. Knows rules and ports; the reconciler does what takes time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swiftkv_platform.errors import InvalidInputError, NotFoundError, StaleVersionError
from swiftkv_platform.orchestration.job import Job, JobStatus, Reason, new_id, status_event, transition
from swiftkv_platform.orchestration.ports import (
    Catalog,
    Clock,
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
    Idempotency,
    JobRepository,
)
from swiftkv_platform.orchestration.validation import Estimate, ReadObject, validate
from swiftkv_platform.specs import JobSpec

_UPDATE_TRIES = 5
"""The reconciler may change a job between our reading and writing it."""


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    tenant: str
    name: str


class JobService:
    """Submitting and cancelling."""

    def __init__(self, jobs: JobRepository, *, clock: Clock, read_object: ReadObject) -> None:
        self._jobs = jobs
        self._clock = clock
        self._read_object = read_object

    def validate(self, spec: JobSpec) -> Estimate:
        """Everything `submit` checks; stores nothing. Raises as `validation.validate`."""
        return validate(spec, self._read_object)

    def submit(self, spec: JobSpec, caller: Caller, *, idempotency_key: str | None = None) -> Job:
        """Store a job; once this returns it is not lost.

        With a key the caller has used before, returns that key's job. Raises `IdempotencyConflictError` if that came
        with another body, and as `validate`.
        """
        self.validate(spec)
        now = int(self._clock())
        job = Job(id=new_id("job"), tenant=caller.tenant, created_by=caller.name, spec=spec, created_at=now)
        idempotency = None if idempotency_key is None else Idempotency(idempotency_key, _digest(spec))
        return self._jobs.create(job, status_event(job, now=now), idempotency=idempotency)

    def cancel(self, job_id: str, caller: Caller) -> Job:
        """Ask for the end of a job; asking again is the same.

        Raises `NotFoundError`, and `IllegalTransitionError` for a job that has ended otherwise.
        """
        for _ in range(_UPDATE_TRIES):
            job = self._jobs.get(job_id, tenant=caller.tenant)
            if job.status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
                return job
            now, reason = int(self._clock()), Reason("cancelled", f"cancelled by {caller.name}")
            cancelled, event = transition(job, JobStatus.CANCELLING, now=now, reason=reason)
            events = [event]
            if not job.status.holds_cluster:
                cancelled, event = transition(cancelled, JobStatus.CANCELLED, now=now, reason=reason)
                events.append(event)
            try:
                return self._jobs.update(cancelled, events=events)
            except StaleVersionError as error:
                latest = error
        raise latest


class DeploymentService:
    """Putting models into service and taking them out."""

    def __init__(self, catalog: Catalog, *, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock

    def create(
        self,
        caller: Caller,
        *,
        model: str,
        route_prefix: str,
        min_replicas: int,
        max_replicas: int,
        target_ongoing_requests: float,
        engine: Mapping[str, Any],
    ) -> Deployment:
        """Store a deployment; the reconciler brings it up.

        Raises `InvalidInputError` for an unknown model and `ConflictError` for a route prefix that is taken.
        """
        try:
            artifact_uri = self._catalog.get_model(model, tenant=caller.tenant).artifact_uri
        except NotFoundError as error:
            raise InvalidInputError(
                f"model is {model!r}: there is no such model; the `distilled_model` of a job that succeeded would do",
                field="model",
                value=model,
            ) from error
        spec = DeploymentSpec(
            id=new_id("dep"),
            model=model,
            artifact_uri=artifact_uri,
            route_prefix=route_prefix,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target_ongoing_requests,
            engine=engine,
        )
        return self._catalog.create_deployment(Deployment(spec, caller.tenant, int(self._clock())))

    def delete(self, deployment_id: str, caller: Caller) -> Deployment:
        """Mark a deployment for its end; asking again is the same. Raises `NotFoundError` once it is gone."""
        deployment = self._catalog.get_deployment(deployment_id, tenant=caller.tenant)
        deleting = DeploymentState(DeploymentStatus.DELETING)
        self._catalog.set_deployment_state(deployment_id, deleting)
        return replace(deployment, state=deleting)


def _digest(spec: JobSpec) -> str:
    """The same for every way to write the same spec."""
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
