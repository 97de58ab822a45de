"""Cost and duration of jobs: cost from time on the cluster, durations from measured jobs. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.jobs.estimates import JobEstimate
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason, Speed
from swiftkv_platform.planning.machines import assumed_speed
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec

_HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in the operator's currency. None: unpriced; if both are None, nothing has a cost."""

    gpu_hour: float | None = None
    cpu_hour: float | None = None

    @property
    def are_known(self) -> bool:
        return self.gpu_hour is not None or self.cpu_hour is not None

    def cost(self, spec: JobSpec, seconds: float) -> float | None:
        """Return the cost of `seconds` with the most workers that the spec allows; None without prices."""
        if not self.are_known:
            return None
        demand = Demand.of(spec)
        hourly = demand.gpus * (self.gpu_hour or 0.0) + demand.cpus * (self.cpu_hour or 0.0)
        return hourly * seconds / _HOUR

    def cost_of(self, job: Job, now: float) -> float | None:
        """Cost of a job so far, over all its attempts."""
        return self.cost(job.spec, job.seconds_on_cluster(now))

    def final_cost_of(self, job: Job, now: float) -> float | None:
        """Return the cost of a job at the end of its training, at its present speed; None if that is not known."""
        if job.status.is_terminal:
            return self.cost_of(job, now)
        if job.progress.seconds_remaining is None:
            return None
        return self.cost(job.spec, job.seconds_on_cluster(now) + job.progress.seconds_remaining)


FREE = Prices()


def cost_cap(spec: JobSpec, policy: TenantPolicy) -> float | None:
    """Return the lower of the job's own cap and its tenant's; None if there is neither."""
    return min((cap for cap in (spec.limits.cost_cap, policy.cost_cap) if cap is not None), default=None)


def over_cap(job: Job, policy: TenantPolicy, prices: Prices, now: float) -> Reason | None:
    """Return the reason to pause a running job that has cost more than its cap; None if it has not."""
    cap, cost = cost_cap(job.spec, policy), prices.cost_of(job, now)
    if cap is None or cost is None or cost <= cap or job.status not in (JobStatus.STARTING, JobStatus.RUNNING):
        return None
    message = f"it has cost {cost:.2f}, and its cap is {cap:.2f}; resume it with a higher limits.cost_cap"
    return Reason(ReasonCode.COST_CAP, message, field="limits.cost_cap")


def measured_speed(job: Job, now: float) -> Speed | None:
    """Return the speed of a job whose present attempt has just succeeded; None if it reported too little to measure
    it."""
    attempt, pace = job.attempt, job.attempt.pace
    if attempt.submitted_at is None or attempt.resume_from is not None or pace is None or job.flops_per_step is None:
        return None
    steps, seconds = job.progress.step - pace.step, pace.last_time - pace.time
    if steps <= 0 or seconds <= 0:
        return None
    return Speed(
        flops_per_second=job.flops_per_step * steps / seconds / job.spec.resources.max_workers,
        startup_s=max(pace.time - attempt.submitted_at - pace.step * seconds / steps, 0.0),
        finish_s=max(now - pace.last_time, 0.0),
        process_memory=_process_memory(job),
    )


def _process_memory(job: Job) -> int | None:
    if job.spec.resources.gpus_per_worker or not job.attempt.peak_memory or job.planned_memory is None:
        return None
    return max(job.attempt.peak_memory - job.planned_memory, 0)


def speed_for(spec: JobSpec, jobs: Iterable[Job], configured: float | None) -> tuple[Speed, str] | None:
    """Return the speed of the newest job on the same kind of workers, preferably with the same teacher, and its id;
    else the FLOPs per second of a worker that are configured, or assumed for its GPU, and their source."""
    alike = [job for job in jobs if job.speed is not None and _workers(job.spec) == _workers(spec)]
    same = [job for job in alike if job.spec.model.name_or_path == spec.model.name_or_path]
    newest = max(same or alike, key=lambda job: job.id, default=None)
    if newest is not None and newest.speed is not None:
        return newest.speed, newest.id
    known = assumed_speed(spec) if configured is None else (configured, "configured")
    return None if known is None else (Speed(known[0], 0.0, 0.0), known[1])


def with_time(found: JobEstimate, spec: JobSpec, speed: tuple[Speed, str] | None, prices: Prices = FREE) -> JobEstimate:
    """Add the time of a job at a speed, and its cost. Sweeps are not estimated."""
    if speed is None:
        return found
    measured, source = speed
    if found.process_memory is not None and measured.process_memory is not None:
        found = found.model_copy(update={"process_memory": measured.process_memory})
    if found.total_flops is None or spec.sweep is not None:
        return found
    training = found.total_flops / (measured.flops_per_second * spec.resources.max_workers)
    seconds = measured.startup_s + training + measured.finish_s
    cost = prices.cost(spec, seconds)
    return found.model_copy(update={"seconds": seconds, "speed_source": source, "cost": cost})


def _workers(spec: JobSpec) -> tuple[object, ...]:
    resources, sharding = spec.resources, spec.sharding
    return (
        resources.max_workers,
        resources.gpus_per_worker,
        resources.cpus_per_worker,
        resources.accelerator_type,
        spec.model.dtype,
        sharding.strategy,
        sharding.cpu_offload,
        spec.training.compile,
    )


def prices(settings: Settings) -> Prices:
    return Prices(settings.gpu_hour_price, settings.cpu_hour_price)
